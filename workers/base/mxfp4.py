"""Experts published in MXFP4 (gpt-oss): codes of four bits in blocks of 32 along the inputs, with one power of two a block.

The values of a code and a power of two are exact in bf16, so nothing is lost until they are stored in a narrower format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ft_service.bases.published_layouts import MXFP4_BIAS, MXFP4_SCALES, mxfp4_shape
from ft_service.spec import WeightFormat
from workers.base.source import Safetensors

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 … 7; bit 3 is the sign."""


class MXFP4Stack:
    """The matrices [experts, out, in] of one projection: blocks u8 [experts, out, in / 32, 16] and scales u8 [experts, out,
    in / 32].
    """

    layout = "MXFP4"
    format: WeightFormat | None = None
    """They are stored in the job's format."""
    exact = False

    def __init__(self, files: Safetensors, name: str) -> None:
        """Raises SpecError for blocks and scales that do not belong together."""
        self._files, self._name, self._scales = files, name, name + MXFP4_SCALES
        self.shape: tuple[int, ...] = mxfp4_shape(name, files.shape(name), files.shape(self._scales))

    def parts(self, start: int, end: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("no format here holds them")

    def rows(self, start: int, end: int) -> Tensor:
        raise NotImplementedError("its matrices have rows")

    def matrix(self, index: int) -> MXFP4Matrix:
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
