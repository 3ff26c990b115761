"""Copies one weight's rows from the base's files into their storage, a bounded number at a time, and measures the loss of
precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.base.stored import StoredWeight
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import QUANTIZED

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Elements quantised at a time: the kernels take about 40 bytes each meanwhile, whatever the size of the tensor."""


_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc; other C libraries have none."""


class Values(Protocol):
    """Tensors by name, read by rows."""

    def rows(self, name: str, start: int, end: int) -> Tensor: ...

    def stored(self, name: str) -> StoredWeight | None: ...


@dataclass
class Deviation:
    """Squared norms over some rows of a weight: of its values, and of what storing them changed."""

    changed: Tensor | float = 0.0
    values: Tensor | float = 0.0

    def add(self, stored: Tensor, values: Tensor) -> None:
        values = values.float()
        self.changed = self.changed + (stored.float() - values).square_().sum(dtype=torch.float64)
        self.values = self.values + values.square().sum(dtype=torch.float64)

    def sums(self) -> tuple[float, float]:
        return float(self.changed), float(self.values)


def fill(storage: Tensor, base: Values, name: str, start: int, end: int, dtype: torch.dtype) -> Deviation | None:
    """Put rows [start, end) of `name` into `storage` [end - start, ..], on its device. Returns None if no value changed.

    `dtype`: what weights are rounded to, also before they are quantised, whatever wider dtype `storage` may have.
    """
    if not isinstance(storage, RowQuantized):
        return _fill_plain(storage, base, name, start, end, dtype)
    stored = base.stored(name)
    if stored is not None and stored.exact and stored.format is not None and type(storage) is QUANTIZED[stored.format]:
        for low, high in _chunks(start, end, storage):
            _put(storage.parts, low - start, stored.parts(low, high))
        return None
    deviation = Deviation()
    for low, high in _chunks(start, end, storage):
        values = base.rows(name, low, high).to(storage.device)
        # A plain base is rounded to the dtype first, as weights that are not quantised are.
        quantized = type(storage).quantize(values if stored is not None else values.to(dtype))
        _put(storage.parts, low - start, quantized.parts)
        deviation.add(quantized.dequantize(torch.float32), values)
        if storage.device.type == "cpu":
            _give_back()
    return deviation


def _fill_plain(storage: Tensor, base: Values, name: str, start: int, end: int, dtype: torch.dtype) -> Deviation | None:
    deviation: Deviation | None = None
    for low, high in _chunks(start, end, storage):
        values = base.rows(name, low, high)
        rounded = values.to(dtype)
        storage[low - start : high - start].copy_(rounded)
        if torch.promote_types(values.dtype, dtype) != dtype:
            deviation = deviation or Deviation()
            deviation.add(rounded, values)
    return deviation


def _give_back() -> None:
    """Return freed host memory to the system: glibc keeps aligned blocks that it does not reuse, many times what is in use."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _chunks(start: int, end: int, storage: Tensor) -> Iterator[tuple[int, int]]:
    height = max(1, CHUNK_ELEMENTS[storage.device.type] // max(1, storage.shape[1:].numel()))
    return ((low, min(low + height, end)) for low in range(start, end, height))


def _put(parts: tuple[Tensor, ...], at: int, rows: tuple[Tensor, ...]) -> None:
    for part, some in zip(parts, rows, strict=True):
        part[at : at + some.shape[0]].copy_(some)
