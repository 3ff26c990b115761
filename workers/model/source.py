"""The tensors of a Hugging Face folder, read by rows from safetensors, and what was read of them counted."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from ft_service.errors import SpecError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Safetensors:
    """A checkpoint in one file or several, opened lazily. What it returns are views of mapped files: copy what is kept."""

    def __init__(self, folder: str | Path, file_of: dict[str, str] | None = None) -> None:
        """`file_of`: tensor name → file; None: as the folder says, once a tensor is asked for (SpecError if it has none)."""
        self._folder = Path(folder)
        self._given = file_of
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self.bytes_read = 0
        """Bytes of all the tensors and slices that were asked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @cached_property
    def _files(self) -> dict[str, str]:
        return _file_of_each_tensor(self._folder) if self._given is None else self._given

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: "BF16", "F8_E4M3", "U8" …"""
        return self._slice(name).get_dtype()

    def rows(self, name: str, start: int, end: int, index: int | None = None) -> Tensor:
        """Rows [start, end) of a tensor, in its own dtype; `index`: of one of the matrices [matrices, rows, cols] in it."""
        source = self._slice(name)
        span = slice(start, end) if start < end else slice(0, 1)
        found = source[span] if index is None else source[index, span]
        if start >= end:
            return found[:0]
        self.bytes_read += found.nbytes
        return found

    def whole(self, name: str) -> Tensor:
        """All of a (small) tensor, scalars included."""
        found = self._handle(name).get_tensor(name)
        self.bytes_read += found.nbytes
        return found

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file]


def single_file(path: Path) -> Safetensors:
    """One file by itself."""
    with safe_open(path, framework="pt") as file:
        return Safetensors(path.parent, dict.fromkeys(file.keys(), path.name))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, sorted. Raises SpecError for a folder without any."""
    of_tensors = _index(folder)
    return [folder / SINGLE] if of_tensors is None else [folder / name for name in sorted(set(of_tensors.values()))]


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    of_tensors = _index(folder)
    if of_tensors is not None:
        return of_tensors
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor → file, None: all are in one file. Raises SpecError for a folder without either."""
    index = folder / INDEX
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    if not (folder / SINGLE).is_file():
        raise SpecError(f"{folder} has neither {SINGLE} nor {INDEX}.", param="model")
    return None
