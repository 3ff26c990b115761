"""Reading rows of experts that are published stacked and quantised.

MXFP4   codes of four bits in blocks of 32 along the inputs, with one power of two a block
(gpt-oss): exact in bf16 FP8     e4m3 codes, with one scale a matrix, its rows or its blocks
(Mistral Small 4, Qwen3-VL)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ft_service.spec import WeightFormat
from workers.base.base_tensors import Safetensors
from workers.base.layouts import (
    FP8_STACK_SCALE,
    MXFP4_SCALES,
    FP8Layout,
    as_kept,
    fp8_layout,
    mxfp4_shape,
    of_columns,
    unknown_layout,
)
from workers.quant import mxfp4
from workers.quant.mxfp4 import NO_NUMBER, MXFP4Parts


class Matrix(Protocol):
    """One expert's matrix [rows, cols] (see `workers.base.quantized_rows.StoredWeight`)."""

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
    """Whether the files hold them as [out, in], however the architecture's own parameter is laid
    out.
    """

    def matrix(self, index: int, *, transposed: bool = False) -> Matrix:
        """One of the matrices, `transposed` or as the files hold it."""
        ...


class MXFP4Stack:
    """The matrices [experts, out, in] of one projection: blocks u8 [experts, out, in / 32, 16] and
    scales u8 [experts, out, in / 32].
    """

    layout = "MXFP4"
    format: WeightFormat | None = "mxfp4"
    exact = False
    """A stack is not exact as a whole; its matrices are."""
    by_outputs = True

    def __init__(self, files: Safetensors, name: str) -> None:
        """Raises SpecError for blocks and scales that do not belong together."""
        self._files = files
        self._name = name
        self._scales = name + MXFP4_SCALES
        self.shape: tuple[int, ...] = mxfp4_shape(
            name, files.shape(name), files.shape(self._scales)
        )

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("its matrices have parts")

    def rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError("its matrices have rows")

    def matrix(self, index: int, *, transposed: bool = False) -> MXFP4Matrix:
        assert not transposed, "its blocks lie along the inputs"
        return MXFP4Matrix(self, index)

    def parts_of(self, index: int, start: int, end: int) -> MXFP4Parts:
        """The parts of rows [start, end) of one expert."""
        codes = self._files.rows(self._name, start, end, index).flatten(1)
        return MXFP4Parts(
            codes, usable_exponents(self._name, self._files.rows(self._scales, start, end, index))
        )


class MXFP4Matrix:
    """One expert's matrix [out, in]."""

    layout = MXFP4Stack.layout
    format: WeightFormat | None = "mxfp4"
    exact = True

    def __init__(self, stack: MXFP4Stack, index: int) -> None:
        self._stack = stack
        self._index = index
        self.shape: tuple[int, ...] = stack.shape[1:]

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        return self._stack.parts_of(self._index, start, end)

    def rows(self, start: int, end: int) -> Tensor:
        """bf16, which holds every value."""
        return mxfp4.dequantize(
            self._stack.parts_of(self._index, start, end), self.shape[1], torch.bfloat16
        )


def usable_exponents(name: str, exponents: Tensor) -> Tensor:
    """Scales of MXFP4 as u8.

    Raises SpecError, naming the weight, where one stands for no number.
    """
    exponents = exponents.view(torch.uint8)
    if (exponents == NO_NUMBER).any():
        raise unknown_layout(name, f"MXFP4 with a scale of {NO_NUMBER}, which is no number")
    return exponents


class FP8Stack:
    """Matrices [experts, rows, cols] as the files hold them: codes e4m3 and scales in
    `X_scale_inv`.
    """

    exact = False
    """A stack is not exact as a whole; its matrices may be."""
    by_outputs = False

    def __init__(self, files: Safetensors, name: str, block: tuple[int, int]) -> None:
        """`block`: rows and columns that share a scale, where the scales are those of blocks.

        Raises SpecError for scales that do not belong to the codes.
        """
        self._files = files
        self._name = name
        self._scale = name + FP8_STACK_SCALE
        self.shape: tuple[int, ...] = files.shape(name)
        self._layout = fp8_layout(name, self.shape, files.shape(self._scale), block)
        self.layout = str(self._layout)
        self.format: WeightFormat | None = self._layout.format

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("its matrices have parts")

    def rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError("its matrices have rows")

    def matrix(self, index: int, *, transposed: bool = False) -> FP8Matrix:
        grid = self._grid(index)
        layout = self._layout
        rows, cols = self.shape[1:]
        if transposed:
            return FP8Matrix(
                self,
                index,
                grid.mT,
                replace(layout, height=layout.width, width=layout.height),
                (cols, rows),
                transposed=True,
            )
        return FP8Matrix(self, index, grid, layout, (rows, cols), transposed=False)

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
    """One expert's matrix [rows, cols], whose `grid` of scales is laid out as `layout` says."""

    def __init__(
        self,
        stack: FP8Stack,
        index: int,
        grid: Tensor,
        layout: FP8Layout,
        shape: tuple[int, int],
        *,
        transposed: bool,
    ) -> None:
        self._stack = stack
        self._index = index
        self._grid = grid
        self._layout = layout
        self._transposed = transposed
        self.layout = stack.layout
        self.format = stack.format
        self.shape: tuple[int, ...] = shape
        self.exact = self.format == "fp8_blocks" or (self.format == "fp8" and grid.shape[1] == 1)

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        return self._codes(start, end), as_kept(
            self._scales(start, end), self._layout, self.shape[1]
        )

    def rows(self, start: int, end: int) -> Tensor:
        return self._codes(start, end).float() * of_columns(
            self._scales(start, end), self._layout, self.shape[1]
        )

    def _codes(self, start: int, end: int) -> Tensor:
        return self._stack.codes(self._index, start, end, transposed=self._transposed)

    def _scales(self, start: int, end: int) -> Tensor:
        """Scales of rows [start, end): [end - start, columns of the grid]."""
        return self._grid[torch.arange(start, end) // self._layout.height]
