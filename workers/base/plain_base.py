"""A base as plain tensors, whatever it is stored as: what merging reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ft_service.bases.published_layouts import is_companion
from workers.base.source import Safetensors
from workers.base.stacks import Stack
from workers.base.stored import StoredBase


class PlainBase:
    """The tensors that a base would hold if it were saved in bf16: quantised weights by the values that they stand for."""

    def __init__(self, files: Safetensors, folder: Path) -> None:
        """Raises SpecError for a method of quantisation that is not known."""
        self._files, self._base = files, StoredBase.open(files, folder)
        self.declared = self._base.declared
        """Whether config.json says that something is quantised."""
        self._names = [name for name in files.names() if not (self.declared and is_companion(name))]
        self._known = set(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """As transformers saves it: stacks that are published the other way round are [experts, in, out]."""
        stored = self._base.stored(name) if self.declared else None
        if isinstance(stored, Stack) and stored.by_outputs:
            return stored.shape[0], stored.shape[2], stored.shape[1]
        return self._files.shape(name) if stored is None else stored.shape

    def dtype(self, name: str) -> str:
        return "BF16" if self.declared and self._base.stored(name) is not None else self._files.dtype(name)

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows [start, end); of a stack, matrices."""
        stored = self._base.stored(name) if self.declared else None
        if isinstance(stored, Stack):
            matrices = torch.stack([stored.matrix(index).rows(0, stored.shape[1]) for index in range(start, end)])
            return matrices.mT if stored.by_outputs else matrices
        return self._base.rows(name, start, end)

    def whole(self, name: str) -> Tensor:
        """All of a tensor that is small, or is replaced."""
        stored = self._base.stored(name) if self.declared else None
        return self._files.whole(name) if stored is None else self.rows(name, 0, self.shape(name)[0])
