"""Where a base comes from, in words that mean the same on another machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

_PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`organisation/name`, as hubs name models."""
_CACHED = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")
"""A model's folder in Hugging Face's cache, two above its files (`snapshots/<revision>`)."""


def is_published(name: str) -> bool:
    """Whether a name has the form of a published model's."""
    return _PUBLISHED.fullmatch(name) is not None


def portable_name(folder: Path, name: str) -> str:
    """The name under which others find a base, never a path: what its cache folder or its config.json says it was published as,
    else `name`, the catalogue's.
    """
    above = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    if cached := _CACHED.fullmatch(above):
        return f"{cached['organisation']}/{cached['name']}"
    try:
        said = json.loads((folder / "config.json").read_bytes()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        said = None
    return said if isinstance(said, str) and is_published(said) and not (Path(said)).is_dir() else name
