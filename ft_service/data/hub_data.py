"""Data sets from Hugging Face's hub: `training_file: hf://ORG/NAME`, once `ft pull --data ORG/NAME`
has fetched it.

FT_HOME/datasets/.pulls/<organisation>--<name>@<commit>/    an incomplete download
FT_HOME/datasets/<organisation>/<name>/                     the data files of the repository, with
origin.json
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ft_service.bases import hub
from ft_service.bases.origin import ORIGIN, Origin, read_origin, write_origin
from ft_service.data.formats.detect_format import may_hold_data
from ft_service.errors import FtError, SpecError
from ft_service.wording import counted

PREFIX = "hf://"
FOLDER = "datasets"
"""Folder below FT_HOME."""


def data_names(listing: hub.HubRepository) -> list[str]:
    """Return the data files of a repository, sorted.

    Raises SpecError if no file has a supported format.
    """
    names = sorted(
        name
        for name in listing.files
        if may_hold_data(name) and hub.is_plain_name(name) and name != ORIGIN
    )
    if not names:
        raise SpecError(
            f"{listing.repository} holds no data files (JSON lines, JSON, CSV, Parquet or Arrow).",
            param="model",
        )
    return names


def pull_data(
    listing: hub.HubRepository, folder: Path, tell: Callable[[str], object], *, shows_bars: bool
) -> Path:
    """Fetch the data files of a repository, and return their folder below `folder`.

    Files of the same commit are kept; those of another commit are replaced.

    Raises SpecError for a repository without data files, FtError for a full disk and for damaged
    downloads, UnavailableError.
    """
    target = folder / listing.repository
    names = data_names(listing)
    origin = read_origin(target)
    if origin is not None and origin.commit == listing.commit:
        tell(f"{listing.repository} is there already, at {listing.commit[:12]}.")
        return target
    tell(f"{listing.repository} at {listing.commit[:12]}: {counted(len(names), 'data file')}.")
    staged = folder / hub.STAGED / f"{listing.repository.replace('/', '--')}@{listing.commit[:12]}"
    hub.fetch(listing, staged, names, shows_bars=shows_bars)
    digests = hub.digests(listing, staged, names)
    write_origin(
        staged,
        Origin(listing.repository, listing.revision, listing.commit, listing.licence, digests),
    )
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)
    return target


def fetched(name: str, folder: Path) -> Path:
    """Return the path of `hf://ORG/NAME[/PATH]` below `folder`.

    Raises FtError if it was not fetched, SpecError for an invalid name.
    """
    parts = name.removeprefix(PREFIX).strip("/").split("/")
    if len(parts) < 2 or not hub.is_plain_name("/".join(parts)):
        raise SpecError(
            f"{name!r}: write hf://ORG/NAME, or hf://ORG/NAME/PATH of a file or folder in it."
        )
    path = folder.joinpath(*parts)
    if not path.exists():
        repository = "/".join(parts[:2])
        if folder.joinpath(*parts[:2]).exists():
            raise SpecError(
                f"{name}: {repository} was fetched, and holds no {'/'.join(parts[2:])}."
            )
        raise FtError(f"{name} was not fetched yet: ft pull --data {repository}")
    return path
