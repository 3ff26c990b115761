"""The contents of a base's folder: config.json, and its tensors as the headers of its files list them. No weight is read.

Headers do not give the logical shape of a weight that bitsandbytes quantised; it is read from the few bytes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import (
    document_or_none,
    is_base_file,
    open_base_file,
    read_document,
    require_openable,
    unreadable_base,
)
from ft_service.bases.published_layouts import STATE
from ft_service.bases.safetensors_folder import INDEX, Index, files_of, read_index, read_tensors
from ft_service.bases.safetensors_header import TensorEntry, shown
from ft_service.bases.wrapped import INSIDE, PARTS_BESIDE
from ft_service.errors import SpecError

MAX_STATE_BYTES = 10_000
_MODELOPT = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says what it has quantised, at times there alone."""
FileState = tuple[int, int, int]
"""Of a file: time of its last change in ns, bytes, inode. A file that was replaced has another one."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a base's files, by its logical name. `dtype` as safetensors writes it: BF16, F8_E4M3, U8, …"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    content: bytes = b""
    """Of the state of a bitsandbytes weight; empty for every other tensor."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class BaseContents:
    """A base's folder: its config.json, and its tensors as the files list them. Equal only to itself: it is a key."""

    config: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_contents(folder: Path) -> BaseContents:
    """Read config and headers; remembered until a file changes. Raises SpecError saying which file is missing or broken."""
    try:
        require_openable(folder)
        index = folder / INDEX
        listed = _index(folder, file_state(index) if index.is_file() else None)
        announced = [folder / _MODELOPT] if is_base_file(folder / _MODELOPT) else []
        files = [folder / "config.json", *announced, *files_of(folder, listed)]
        return _read(folder, tuple((path.name, *_state(path)) for path in files))
    except OSError as error:
        raise SpecError(
            f"The base in {folder} cannot be read: {error.strerror or error}.", param="model", code="model_unreadable"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises SpecError if it is missing or broken."""
    path = folder / "config.json"
    try:
        return _config(path)
    except OSError as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None


def file_state(path: Path) -> FileState:
    """A value that changes when the file does. Raises OSError."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _state(path: Path) -> FileState:
    try:
        return file_state(path)
    except OSError as error:
        raise unreadable_base(path, error.strerror or "it cannot be read") from None


@lru_cache(maxsize=32)
def _index(folder: Path, state: FileState | None) -> Index:
    """The index of a base. `state`: of the index file, None: there is none."""
    return read_index(folder)


@lru_cache(maxsize=32)
def _read(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> BaseContents:
    """`files`: config.json and the files with weights, and their states."""
    tensors = tuple(_stored(name, entry) for name, entry in read_tensors(folder).items())
    return BaseContents(_config(folder / "config.json"), tensors)


def _stored(name: str, entry: TensorEntry) -> StoredTensor:
    content = b""
    if STATE in name:
        with open_base_file(entry.path) as file:
            file.seek(entry.start)
            content = file.read(min(entry.bytes, MAX_STATE_BYTES))
    return StoredTensor(name, entry.dtype, entry.shape, entry.bytes, content)


def _config(path: Path) -> dict[str, Any]:
    document = read_document(path)
    _require_kinds(path, document, "")
    announced = document_or_none(path.with_name(_MODELOPT))
    if announced is not None and document.get("quantization_config") is None:
        said = announced.get("quantization")
        document["quantization_config"] = {"quant_method": "modelopt", **(said if isinstance(said, dict) else {})}
    return document


def _require_kinds(path: Path, section: Mapping[str, Any], before: str) -> None:
    """Raises SpecError for a name or a section of a config.json that is something else. `before`: the section's own name."""
    for key, kind, wanted in (("model_type", str, "a name"), ("architectures", list, "a list of names")):
        given = section.get(key)
        names = given if isinstance(given, list) else [given]
        if given is not None and not (isinstance(given, kind) and all(isinstance(name, str) for name in names)):
            raise unreadable_base(path, f"it says {before}{key} = {shown(given)}, and that must be {wanted}")
    for part in (INSIDE, "text_config", *PARTS_BESIDE):
        inner = section.get(part)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise unreadable_base(path, f"it says {before}{part} = {shown(inner)}, and that must be an object")
        _require_kinds(path, inner, f"{before}{part}.")
