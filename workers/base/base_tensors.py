"""The tensors of a base's folder, read by rows from safetensors; bytes read are counted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ft_service.bases.safetensors_folder import read_tensors, unreadable_base
from ft_service.bases.safetensors_header import TensorEntry, read_header
from workers.base.layouts import logical_names


class Safetensors:
    """The tensors of a base, in one file or several, opened lazily.

    It returns views of mapped files: copy what you keep.
    """

    def __init__(
        self, folder: str | Path, tensors: Mapping[str, TensorEntry] | None = None
    ) -> None:
        """`tensors`: by name; None: those of the folder, whose headers are read with the first
        tensor.

        Raises SpecError then for a file that is missing or damaged, as trying again cannot help;
        OSError where it may.
        """
        self._folder = Path(folder)
        self._given = tensors
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        self.bytes_read = 0
        """Bytes of all tensors and slices that were read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @cached_property
    def _tensors(self) -> Mapping[str, TensorEntry]:
        if self._given is not None:
            return self._given
        entries = read_tensors(self._folder)
        names = logical_names({name: entry.dtype for name, entry in entries.items()})
        return {names[name]: entry for name, entry in entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """A tensor's dtype as safetensors writes it: "BF16", "F8_E4M3", "U8" …"""
        return self._tensors[name].dtype

    def bytes(self, name: str) -> int:
        return self._tensors[name].bytes

    def rows(
        self, name: str, start: int, end: int, index: int | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Rows [start, end) of a tensor, in its own dtype; `index`: of one of the matrices
        [matrices, rows, cols] in it; `transposed`: it is, or they are, [cols, rows].
        """
        source = self._slice(name)
        span = slice(start, end) if start < end else slice(0, 1)
        inside = (slice(None), span) if transposed else (span,)
        at = inside if index is None else (index, *inside)
        rows = source[at].mT if transposed else source[at]
        if start >= end:
            return rows[:0]
        self.bytes_read += rows.nbytes
        return rows

    def whole(self, name: str) -> Tensor:
        """All of a (small) tensor, scalars included."""
        tensor = self._handle(name).get_tensor(self._tensors[name].name)
        self.bytes_read += tensor.nbytes
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(self._tensors[name].name)

    def _handle(self, name: str) -> Any:
        path = self._tensors[name].path
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:  # its header was fine a moment ago
                raise unreadable_base(
                    path, f"it has changed since its header was read ({error})"
                ) from None
        return self._open[path]


def single_file(path: Path) -> Safetensors:
    """One file by itself. Raises HeaderError for one that is damaged."""
    return Safetensors(path.parent, read_header(path).tensors)
