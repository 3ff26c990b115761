"""Judge every base below a folder as server and command line do, within a limit of memory; JSON on standard output.

{"listed": {base: why it cannot be trained on, or null}, "created": {base: the refusal, or null}, "planned": the same}
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_service.bases.catalogue import Catalogue
from ft_service.control.base_facts import base_facts
from ft_service.data.tokenizer_files import stops_of, tokenizer_files, tokenizer_state
from ft_service.errors import FtError
from ft_service.plan.admit import admit
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from tests.support.bases import save_base, spec_on
from tests.support.hostile_bases import wrong_configs

MEMORY = 3 * 2**29
LONGEST = 2_000
"""Characters of a refusal: nothing from a file is repeated as a whole."""


def refusal(look: Callable[[], object]) -> str | None:
    """The words of a refusal; None: there is none. What is not a refusal is an error of this program."""
    try:
        look()
    except FtError as error:
        return error.message
    return None


def main(models: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found: dict[str, Any] = {"listed": {}, "created": {}, "planned": {}}
    catalogue = Catalogue([models])
    for base in catalogue.list_models():
        found["listed"][base.name] = base_facts(base.path, base.name).why_not
    for folder in sorted(path for path in models.iterdir() if path.is_dir()):
        spec = spec_on(folder)
        found["created"][folder.name] = refusal(lambda name=folder.name, spec=spec: (catalogue.find(name), admit(spec)))
        found["planned"][folder.name] = refusal(lambda spec=spec: plan_job(spec, MACHINES["H100"], to_train=False))
        refusal(lambda folder=folder: (tokenizer_files(folder), tokenizer_state(str(folder)), stops_of(folder)))
    folder = save_base(models / "fields")
    for name, config in wrong_configs():
        (folder / "config.json").write_text(json.dumps(config))
        why, other = base_facts(folder, name).why_not, refusal(lambda: stops_of(folder))
        assert why is None or "cannot be judged" not in why, f"{name}: {why}"
        assert len(why or "") < LONGEST, f"{name}: {why}"
        assert other is None, f"{name}: {other}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
