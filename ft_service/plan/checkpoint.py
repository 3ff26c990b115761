"""What a base's safetensors files hold, from their headers: an 8-byte length and that much JSON. No weight is read.

What headers cannot tell of a weight that bitsandbytes quantised, its logical shape, is read from the few bytes beside it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ft_service.errors import SpecError
from ft_service.published import STATE

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_STATE_BYTES = 10_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint. `dtype` as safetensors writes it: BF16, F8_E4M3, U8, …"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes = b""
    """Of the state of a bitsandbytes weight; empty for every other tensor."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A base's folder: its config.json, and its tensors as the files list them. Equal only to itself: it is a key."""

    config: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config and headers; remembered until a file changes. Raises SpecError saying which file is missing or broken."""
    files = [folder / "config.json", *_weight_files(folder)]
    return _read(folder, tuple((path.name, *_state(path)) for path in files))


def _state(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise _broken(path, error.strerror or "it cannot be read") from None
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=32)
def _read(folder: Path, files: tuple[tuple[str, int, int], ...]) -> Checkpoint:
    (config_name, *_), *weights = files
    tensors = [tensor for name, _, size in weights for tensor in _tensors(folder / name, size)]
    return Checkpoint(_mapping(folder / config_name), tuple(tensors))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise SpecError(f"{folder} has neither {SINGLE} nor {INDEX}.", param="model")
        return [folder / SINGLE]
    return list(_indexed_files(index, _state(index)))


@lru_cache(maxsize=32)
def _indexed_files(index: Path, state: tuple[int, int]) -> tuple[Path, ...]:
    names = _mapping(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise _broken(index, "it has no weight_map of tensor names to files")
    return tuple(index.parent / name for name in sorted(set(names.values())))


def _tensors(path: Path, size: int) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _broken(path, "it does not begin with a safetensors header")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = [_tensor(name, entry, file, 8 + length) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _broken(path, f"its safetensors header cannot be read ({type(error).__name__})") from None
    if size < 8 + length + end:
        raise _broken(path, f"it is {size} bytes long and should be {8 + length + end}: a copy or download was cut short")
    return found


def _tensor(name: str, entry: Mapping[str, Any], file: BinaryIO, data: int) -> StoredTensor:
    """`data`: where the file's tensors begin."""
    content = b""
    if STATE in name:
        start, end = entry["data_offsets"]
        file.seek(data + start)
        content = file.read(min(end - start, MAX_STATE_BYTES))
    return StoredTensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), content)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _broken(path, f"it is not readable as JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise _broken(path, "it holds no JSON object")
    return document


def _broken(path: Path, reason: str) -> SpecError:
    return SpecError(f"The base's {path.name} in {path.parent}: {reason}.", param="model", code="model_unreadable")
