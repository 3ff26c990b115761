"""NF4 as a weight: the parts of `nf4` in a `RowQuantized`, and the linear layer on them as opaque operators.

The operators take the parts as plain tensors. Opaque to the compiler on purpose: if it saw the dequantise of forward and of
backward, it would merge the two and keep a bf16 copy of every weight alive between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant import nf4
from workers.quant.rowwise import RowQuantized


class NF4Weight(RowQuantized):
    """A frozen weight [rows, cols] in NF4 (see `workers.quant.nf4` for the parts)."""

    PARTS = ("codes", "scales", "row_max")
    codes: Tensor
    scales: Tensor
    row_max: Tensor

    @classmethod
    def quantize(cls, weight: Tensor) -> Self:
        return cls(nf4.quantize(weight), weight.shape, weight.dtype)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Self:
        return cls(nf4.empty_parts(shape[0], shape[1], device), shape, dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return nf4.dequantize(nf4.NF4Parts(*self.parts), self.shape[1], dtype or self.dtype)[: self.shape[0]]

    def linear(self, x: Tensor) -> Tensor:
        return _nf4_linear(x, self.codes, self.scales, self.row_max, self.shape[1])


@torch.library.custom_op("ft_service::nf4_linear", mutates_args=())
def _nf4_linear(x: Tensor, codes: Tensor, scales: Tensor, row_max: Tensor, cols: int) -> Tensor:
    return F.linear(x, nf4.dequantize(nf4.NF4Parts(codes, scales, row_max), cols, x.dtype))


@torch.library.custom_op("ft_service::nf4_linear_grad", mutates_args=())
def _nf4_linear_grad(grad: Tensor, codes: Tensor, scales: Tensor, row_max: Tensor, cols: int) -> Tensor:
    return grad @ nf4.dequantize(nf4.NF4Parts(codes, scales, row_max), cols, grad.dtype)


@_nf4_linear.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, row_max: Tensor, cols: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@_nf4_linear_grad.register_fake
def _(grad: Tensor, codes: Tensor, scales: Tensor, row_max: Tensor, cols: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, row_max, cols = inputs
    ctx.save_for_backward(codes, scales, row_max)
    ctx.cols = cols


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, row_max = ctx.saved_tensors
    return _nf4_linear_grad(grad, codes, scales, row_max, ctx.cols), None, None, None, None


_nf4_linear.register_autograd(_backward, setup_context=_setup_context)
