"""Data sets from Hugging Face's hub: `training_file: hf://ORG/NAME`, once `ft pull --data ORG/NAME` has fetched it.

FT_HOME/datasets/.pulls/<organisation>--<name>@<commit>/    what is fetched, until all of it is there
FT_HOME/datasets/<organisation>/<name>/                     the data files as they lie in the repository, with origin.json
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ft_service.bases import hub
from ft_service.bases.origin import ORIGIN, Origin, read_origin, write_origin
from ft_service.data.formats.recognise import may_hold_data
from ft_service.errors import FtError, SpecError

PREFIX = "hf://"
FOLDER = "datasets"
"""Of FT_HOME."""


def data_names(found: hub.HubRepository) -> list[str]:
    """Return the data files of a repository, in their order. Raises SpecError where it has none that is read here."""
    names = sorted(name for name in found.files if may_hold_data(name) and hub.is_plain_name(name) and name != ORIGIN)
    if not names:
        raise SpecError(f"{found.repository} holds no data files (JSON lines, JSON, CSV, Parquet or Arrow).", param="model")
    return names


def pull_data(found: hub.HubRepository, folder: Path, tell: Callable[[str], object], *, shows_bars: bool) -> Path:
    """Fetch the data files of a repository into `folder`; the data set's own folder there. One that is there at this commit
    stays as it is, and one at another commit is replaced.

    Raises SpecError for a repository without data files, FtError for a full disk and for what arrived damaged, and
    UnavailableError.
    """
    target = folder / found.repository
    names = data_names(found)
    there = read_origin(target)
    if there is not None and there.commit == found.commit:
        tell(f"{found.repository} is there already, at {found.commit[:12]}.")
        return target
    tell(f"{found.repository} at {found.commit[:12]}: {len(names)} data file{'' if len(names) == 1 else 's'}.")
    staged = folder / hub.STAGED / f"{found.repository.replace('/', '--')}@{found.commit[:12]}"
    hub.fetch(found, staged, names, shows_bars=shows_bars)
    digests = hub.digests(found, staged, names)
    write_origin(staged, Origin(found.repository, found.revision, found.commit, found.licence, digests))
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return target


def fetched(name: str, folder: Path) -> Path:
    """Return the folder, or the file, that `hf://ORG/NAME[/PATH]` names below `folder`. Raises FtError if it was not fetched,
    SpecError for another name."""
    parts = name.removeprefix(PREFIX).strip("/").split("/")
    if len(parts) < 2 or not hub.is_plain_name("/".join(parts)):
        raise SpecError(f"{name!r}: write hf://ORG/NAME, or hf://ORG/NAME/PATH of a file or folder in it.")
    path = folder.joinpath(*parts)
    if not path.exists():
        repository = "/".join(parts[:2])
        if folder.joinpath(*parts[:2]).exists():
            raise SpecError(f"{name}: {repository} was fetched, and holds no {'/'.join(parts[2:])}.")
        raise FtError(f"{name} was not fetched yet: ft pull --data {repository}")
    return path
