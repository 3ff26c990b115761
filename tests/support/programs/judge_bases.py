"""Judge every base below a folder as server and command line do once it is described, within a
limit of memory; JSON on standard output.

{"listed": {base: why it cannot be trained on, or null}, "created": {base: the refusal, or null},
"planned": the same}
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.bases.description import Description
from ft_service.control.bases.base_facts import base_facts
from ft_service.data.tokenizer_files import stops_of, tokenizer_files, tokenizer_state
from ft_service.errors import FtError
from ft_service.plan.admit import admit
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from ft_service.spec import JobSpec
from tests.support.bases import save_base, spec_on
from tests.support.describing import small_document
from tests.support.hostile_bases import wrong_configs

MEMORY = 3 * 2**29


def refusal(look: Callable[[], object]) -> str | None:
    """The words of a refusal; None: there is none.

    What is not a refusal is an error of this program.
    """
    try:
        look()
    except FtError as error:
        return error.message
    return None


def main(models: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found: dict[str, Any] = {"listed": {}, "created": {}, "planned": {}}
    catalogue = Catalogue([models])
    descriptions = Descriptions(None, "tests", lambda folder, stop: small_document(folder))

    for base in catalogue.list_models():
        found["listed"][base.name] = base_facts(base.path, descriptions.describe(base.path)).why_not

    def described(spec: JobSpec) -> Description:
        return descriptions.describe(Path(spec.model.path)).description()

    for folder in sorted(path for path in models.iterdir() if path.is_dir()):
        spec = spec_on(folder)
        found["created"][folder.name] = refusal(
            lambda name=folder.name, spec=spec: (
                catalogue.find(name),
                admit(described(spec), spec, MACHINES["H100"]),
            )
        )
        found["planned"][folder.name] = refusal(
            lambda spec=spec: plan_job(described(spec), spec, MACHINES["H100"])
        )
        refusal(
            lambda folder=folder: (
                tokenizer_files(folder),
                tokenizer_state(str(folder)),
                stops_of(folder),
            )
        )
    folder = save_base(models / "fields")
    for name, config in wrong_configs():
        (folder / "config.json").write_text(json.dumps(config))
        other = refusal(lambda: stops_of(folder))
        assert other is None, f"{name}: {other}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
