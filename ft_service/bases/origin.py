"""The origin of a base, in terms that are valid on other machines.

origin.json                                   Origin, in the folder of a base that `ft pull` fetched
models--ORG--NAME/snapshots/REVISION/         the base ORG/NAME in Hugging Face's cache; refs/main
names the newest revision
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ft_service.bases.base_files import cached_name, document_or_none, open_base_file, read_bytes
from ft_service.errors import SpecError

ORIGIN = "origin.json"
_PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`organisation/name`, as hubs name models."""
_CARD_BYTES = 20_000
"""Bytes of a model's card that are read for its licence, which is at the beginning."""
_SHORT = 12
"""Letters of a commit in a name."""


@dataclass(frozen=True)
class Origin:
    """The repository and commit that a base was fetched from."""

    repository: str
    """ORG/NAME."""
    revision: str
    """The revision that the user named."""
    commit: str
    licence: str | None
    files: dict[str, str]
    """Name → SHA-256."""


def read_origin(folder: Path) -> Origin | None:
    """The origin of a base; None: it was not pulled, or its origin.json is of another kind."""
    document = document_or_none(folder / ORIGIN)
    if document is None:
        return None
    fields: dict[str, Any] = {name: document.get(name) for name in Origin.__dataclass_fields__}
    origin = Origin(**fields)
    whole = all(
        isinstance(part, str)
        for part in (origin.repository, origin.revision, origin.commit, origin.licence or "")
    )
    return origin if whole and is_published(origin.repository) else None


def write_origin(folder: Path, origin: Origin) -> None:
    (folder / ORIGIN).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")


def licence_of(folder: Path) -> str | None:
    """A base's licence, from the hub that it was pulled from, or from its card; None: neither names
    one.
    """
    origin = read_origin(folder)
    if origin is not None and origin.licence:
        return origin.licence
    try:
        with open_base_file(folder / "README.md") as file:
            text = file.read(_CARD_BYTES).decode(errors="ignore")
        metadata = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, SpecError, ValueError, yaml.YAMLError, IndexError, RecursionError):
        return None
    licence = metadata.get("license") if isinstance(metadata, dict) else None
    return licence if isinstance(licence, str) else None


def is_published(name: str) -> bool:
    """Whether a name has the form ORG/NAME of a published model."""
    return _PUBLISHED.fullmatch(name) is not None


def cached_snapshots(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, folder) of a model's snapshots in Hugging Face's cache: ORG/NAME is the one that
    `main` names, or the newest; others are ORG/NAME@COMMIT.
    """
    name = cached_name(folder)
    there = sorted(
        (path for path in (folder / "snapshots").glob("*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    if name is None or not there:
        return
    try:
        main = read_bytes(folder / "refs" / "main").decode(errors="replace").strip()
    except (OSError, SpecError):
        main = ""
    first = next((path for path in there if path.name == main), there[-1])
    yield name, first
    yield from ((f"{name}@{path.name[:_SHORT]}", path) for path in there if path != first)


def portable_name(folder: Path, name: str) -> str:
    """The published name of a base, by its origin, its cache folder or its config.json; else
    `name`, the catalogue's.
    """
    if origin := read_origin(folder):
        return origin.repository
    if folder.parent.name == "snapshots" and (cached := cached_name(folder.parent.parent)):
        return cached
    given = (document_or_none(folder / "config.json") or {}).get("_name_or_path")
    return (
        given
        if isinstance(given, str) and is_published(given) and not Path(given).is_dir()
        else name
    )
