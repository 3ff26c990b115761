"""The tensors of a base: one safetensors file, or several with an index from tensor names to
files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import INDEX as INDEX_LIMIT
from ft_service.bases.base_files import open_base_file, read_bytes, shown, unreadable_base
from ft_service.bases.safetensors_header import (
    Header,
    HeaderError,
    TensorEntry,
    header_in,
    parse_object,
)
from ft_service.errors import SpecError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_NAME = 255
"""Most bytes of a file's name in most file systems."""
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors that remain when the file is read again."""

Index = Mapping[str, str]
"""Name of a tensor → name of its file."""


def read_tensors(folder: Path, index: Index | None = None) -> dict[str, TensorEntry]:
    """The tensors of a base that its index names, by name, file by file in sorted order.

    `index`: None: it is read.

    Raises SpecError naming the file and tensor that is missing or damaged; OSError if another try
    may help.
    """
    index = read_index(folder) if index is None else index
    entries: dict[str, TensorEntry] = {}
    for path in sorted({folder / file for file in index.values()} if index else [folder / SINGLE]):
        for name, entry in header_of(path).tensors.items():
            if index and name not in index:
                continue
            if name in entries:
                raise unreadable_base(
                    path,
                    f"tensor {shown(name)} is in {entries[name].path.name} too: one of the two is "
                    "from another copy",
                )
            entries[name] = entry
    for name, file in (index or {}).items():
        if name not in entries or entries[name].path.name != file:
            raise unreadable_base(
                folder / file, f"it lacks tensor {shown(name)}, which {INDEX} says it holds"
            )
    return entries


def header_of(path: Path) -> Header:
    """The header of a base's file. Raises SpecError, or OSError if another try may help."""
    try:
        with open_base_file(path) as file:
            return header_in(file, path)
    except HeaderError as error:
        raise unreadable_base(path, error.why) from None
    except _GONE as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a base, sorted.

    Raises SpecError for a folder without any, or OSError.
    """
    return files_of(folder, read_index(folder))


def files_of(folder: Path, index: Index) -> list[Path]:
    """The files that an index names, sorted; SINGLE for an empty one."""
    return [folder / name for name in sorted(set(index.values()))] or [folder / SINGLE]


def read_index(folder: Path) -> Index:
    """Read the index. Empty: SINGLE holds all tensors.

    Raises SpecError for a folder without index and SINGLE; OSError.
    """
    path = folder / INDEX
    if not os.path.lexists(path):
        if not os.path.lexists(folder / SINGLE):
            raise SpecError(
                f"{folder} has neither {SINGLE} nor {INDEX}.",
                param="model",
                code="model_unreadable",
            )
        return {}
    files = _json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise unreadable_base(path, "it has no weight_map of tensor names to files")
    for name, file in files.items():
        if not _is_file_name(file):
            raise unreadable_base(
                path,
                f"it says that tensor {shown(name)} is in {shown(file)}, which is no file of this "
                "folder",
            )
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_bytes(path, INDEX_LIMIT), INDEX_LIMIT)
    except ValueError as error:
        raise unreadable_base(path, str(error)) from None
    except _GONE as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None


def _is_file_name(name: object) -> bool:
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or "/" in name
        or "\\" in name
        or name in ("", ".", "..")
    ):
        return False
    return len(name.encode()) <= _LONGEST_NAME
