"""Experts that are published stacked and quantised: how the rows of any of their matrices are read.

MXFP4   codes of four bits in blocks of 32 along the inputs, with one power of two a block (gpt-oss): exact in bf16
FP8     e4m3 codes, with one scale a matrix, its rows or its blocks (Mistral Small 4, Qwen3-VL)
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ft_service.bases.published_layouts import FP8_STACK_SCALE, MXFP4_BIAS, MXFP4_SCALES, fp8_grid, mxfp4_shape
from ft_service.spec import WeightFormat
from workers.base.source import Safetensors

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 … 7; bit 3 is the sign."""


class Matrix(Protocol):
    """One expert's matrix [rows, cols] (see `workers.base.stored.StoredWeight`)."""

    layout: str
    shape: tuple[int, ...]
    format: WeightFormat | None
    exact: bool

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]: ...

    def rows(self, start: int, end: int) -> Tensor: ...


@runtime_checkable
class Stack(Protocol):
    """The matrices [experts, ..] of one projection."""

    layout: str
    shape: tuple[int, ...]
    by_outputs: bool
    """Whether they lie there [out, in], whatever the architecture's own parameter does."""

    def matrix(self, index: int, *, transposed: bool = False) -> Matrix:
        """One of them. `transposed`: the other way round than it lies there."""
        ...


class MXFP4Stack:
    """The matrices [experts, out, in] of one projection: blocks u8 [experts, out, in / 32, 16] and scales u8 [experts, out,
    in / 32].
    """

    layout = "MXFP4"
    format: WeightFormat | None = None
    """They are stored in the job's format."""
    exact = False
    by_outputs = True

    def __init__(self, files: Safetensors, name: str) -> None:
        """Raises SpecError for blocks and scales that do not belong together."""
        self._files, self._name, self._scales = files, name, name + MXFP4_SCALES
        self.shape: tuple[int, ...] = mxfp4_shape(name, files.shape(name), files.shape(self._scales))

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("no format here holds them")

    def rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError("its matrices have rows")

    def matrix(self, index: int, *, transposed: bool = False) -> MXFP4Matrix:
        assert not transposed, "its blocks lie along the inputs"
        return MXFP4Matrix(self, index)

    def rows_of(self, index: int, start: int, end: int) -> Tensor:
        """Rows [start, end) of one expert, bf16 [end - start, in]."""
        codes = self._files.rows(self._name, start, end, index)
        scales = self._files.rows(self._scales, start, end, index)
        return dequantize(codes, scales)


class MXFP4Matrix:
    """One expert's matrix [out, in]."""

    layout = MXFP4Stack.layout
    format: WeightFormat | None = None
    exact = False

    def __init__(self, stack: MXFP4Stack, index: int) -> None:
        self._stack, self._index = stack, index
        self.shape: tuple[int, ...] = stack.shape[1:]

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        return self._stack.parts(start, end)

    def rows(self, start: int, end: int) -> Tensor:
        return self._stack.rows_of(self._index, start, end)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """codes u8 [rows, blocks, 16], the first of two values in the low bits, and scales u8 [rows, blocks] → bf16 [rows, in]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    pairs = torch.stack([codes & 0x0F, codes >> 4], dim=-1).flatten(-2)
    powers = scales.int().unsqueeze(-1) - MXFP4_BIAS
    return torch.ldexp(values[pairs.long()], powers).to(torch.bfloat16).flatten(-2)


class FP8Stack:
    """Matrices [experts, rows, cols] as they lie in the files: codes e4m3 and scales in `X_scale_inv`."""

    format: WeightFormat | None = "fp8"
    exact = False
    """As a whole: its matrices may be."""
    by_outputs = False

    def __init__(self, files: Safetensors, name: str, block: tuple[int, int]) -> None:
        """`block`: rows and columns that share a scale, where the scales are those of blocks. Raises SpecError for scales that
        do not belong to the codes.
        """
        self._files, self._name, self._scale = files, name, name + FP8_STACK_SCALE
        self.shape: tuple[int, ...] = files.shape(name)
        self._block = fp8_grid(name, self.shape, files.shape(self._scale), block)
        height, width = self._block
        by = "tensors" if width == self.shape[2] and height > 1 else "rows"
        self.layout = f"FP8 by {by}" if width == self.shape[2] else f"FP8 by blocks of {height} x {width}"

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("its matrices have parts")

    def rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError("its matrices have rows")

    def matrix(self, index: int, *, transposed: bool = False) -> FP8Matrix:
        grid = self._grid(index)
        height, width = self._block
        rows, cols = self.shape[1:]
        if transposed:
            return FP8Matrix(self, index, grid.mT, (width, height), (cols, rows), transposed=True)
        return FP8Matrix(self, index, grid, (height, width), (rows, cols), transposed=False)

    def codes(self, index: int, start: int, end: int, *, transposed: bool) -> Tensor:
        return self._files.rows(self._name, start, end, index, transposed=transposed)

    def _grid(self, index: int) -> Tensor:
        """Scales of one matrix, fp32 [rows / height, cols / width]."""
        scales = self._files.shape(self._scale)
        if len(scales) == 3:
            return self._files.rows(self._scale, 0, scales[1], index).float()
        held = self._files.whole(self._scale).float()
        own = held if scales in ((), (1,)) else held[index]
        return own.reshape(-1, 1)


class FP8Matrix:
    """One expert's matrix [rows, cols], each of whose `grid` of scales covers `block`."""

    format: WeightFormat | None = "fp8"

    def __init__(
        self, stack: FP8Stack, index: int, grid: Tensor, block: tuple[int, int], shape: tuple[int, int], *, transposed: bool
    ) -> None:
        self._stack, self._index, self._grid, self._block, self._transposed = stack, index, grid, block, transposed
        self.layout = stack.layout
        self.shape: tuple[int, ...] = shape
        self.exact = grid.shape[1] == 1

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        return self._codes(start, end), self._scales(start, end)

    def rows(self, start: int, end: int) -> Tensor:
        scales = self._scales(start, end)
        if not self.exact:
            scales = scales.repeat_interleave(self._block[1], dim=1)[:, : self.shape[1]]
        return self._codes(start, end).float() * scales

    def _codes(self, start: int, end: int) -> Tensor:
        return self._stack.codes(self._index, start, end, transposed=self._transposed)

    def _scales(self, start: int, end: int) -> Tensor:
        """Of rows [start, end), [end - start, columns of the grid]."""
        return self._grid[torch.arange(start, end) // self._block[0]]
