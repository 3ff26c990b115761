"""Bases that are not here, for plans: looked up at the hub, and all but their weights fetched into
a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_service.bases import hub
from ft_service.bases.catalogue import Catalogue
from ft_service.bases.origin import is_published
from ft_service.control.bases.pulling import NOT_HERE
from ft_service.errors import SpecError, UnavailableError
from ft_service.settings import Settings
from ft_service.wording import bytes_text


@contextmanager
def planned_base(
    name: str, settings: Settings, tell: Callable[[str], object]
) -> Iterator[tuple[Settings, str | None]]:
    """Yield settings whose folders of models hold a base, if need be only as far as a plan needs
    it, and a sentence that says so; None: it is here.

    `name`: a SPEC's model; one that no hub has, such as a tuned model's, is left to whoever reads
    the SPEC. `tell`: called if the hub is asked. Raises SpecError for a base that neither this host
    nor the hub has, or that the hub does not give.
    """
    unknown = _unknown(name, settings)
    if unknown is None:
        yield settings, None
        return
    with tempfile.TemporaryDirectory(prefix="ft-plan-") as folder:
        tell(f"{name} is not here: its configuration and tokenizer are fetched for the plan …")
        try:
            repository, revision = hub.parse_name(name)
            found = hub.look_up(repository, revision)
            staged = hub.fetch_small_files(found, Path(folder))
        except UnavailableError as error:
            message = (
                f"{unknown.message} The hub was not asked for its plan: {error.message} A folder "
                "with its config.json can be planned without a hub: --model DIR."
            )
            raise SpecError(message, param="model", code=unknown.code) from None
        except SpecError as error:
            if error.code != "model_not_found":
                raise
            message = f"{unknown.message} {error.message}"
            raise SpecError(message, param="model", code=error.code) from None
        target = Path(folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.rename(target)
        size = bytes_text(found.bytes([*found.small_files(), *found.weights()]))
        licence = found.licence or "none is named"
        fetch = (
            f"{NOT_HERE.format(name=name)} They take {size} (licence: {licence}): ft pull {name}"
        )
        folders = [*settings.model_folders(), Path(folder)]
        yield settings.model_copy(update={"models": folders}), fetch


def _unknown(name: str, settings: Settings) -> SpecError | None:
    """The refusal of a name that no base here has, and a hub may know; None: it is another name."""
    if not is_published(name.partition("@")[0]):
        return None
    try:
        Catalogue.from_settings(settings).find(name, to_train=False)
    except SpecError as error:
        return error
    return None
