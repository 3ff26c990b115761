"""The linear layer on a quantised weight, as a pair of operators that the compiler cannot look into.

They take the parts as plain tensors and save those for backward, never a dequantised copy. Opaque on purpose: if the compiler
saw the dequantise of forward and of backward, it would merge the two and keep a bf16 copy of every weight alive between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of one storage format: dequantise, then multiply.

    `parts`: makes the format's own tuple from its tensors in order.
    """

    name: str
    parts: Callable[..., Any]
    empty_parts: Callable[[int, int, torch.device | str], Any]
    quantize: Callable[[Tensor], Any]
    dequantize: Callable[[Any, int, torch.dtype], Tensor]

    @classmethod
    def register(
        cls,
        name: str,
        parts: Callable[..., Any],
        empty_parts: Callable[[int, int, torch.device | str], Any],
        quantize: Callable[[Tensor], Any],
        dequantize: Callable[[Any, int, torch.dtype], Tensor],
    ) -> Numerics:
        """Make a format known to `frozen_linear` by its name: operators take no functions."""
        _KNOWN[name] = cls(name, parts, empty_parts, quantize, dequantize)
        return _KNOWN[name]

    def linear(self, x: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        """x [.., cols] times the transposed weight → [.., rows], in x's dtype."""
        return F.linear(x, self.dequantize(self.parts(*parts), cols, x.dtype))

    def linear_grad(self, grad: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        """grad [.., rows] times the weight → [.., cols], in grad's dtype."""
        return grad @ self.dequantize(self.parts(*parts), cols, grad.dtype)


_KNOWN: dict[str, Numerics] = {}


def dense(parts: list[Tensor], name: str, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] that `parts` store in format `name`, dequantised."""
    numerics = _KNOWN[name]
    return numerics.dequantize(numerics.parts(*parts), cols, dtype)


@torch.library.custom_op("ft_service::frozen_linear", mutates_args=())
def frozen_linear(x: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    """x [.., cols] times the transposed weight [rows, cols] that `parts` store in format `name` → [.., rows], in x's dtype."""
    return _KNOWN[name].linear(x, parts, cols)


@torch.library.custom_op("ft_service::frozen_linear_grad", mutates_args=())
def _frozen_linear_grad(grad: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return _KNOWN[name].linear_grad(grad, parts, cols)


@frozen_linear.register_fake
def _(x: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], parts[0].shape[0])


@_frozen_linear_grad.register_fake
def _(grad: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, ctx.name, ctx.cols = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return _frozen_linear_grad(grad, parts, ctx.name, ctx.cols), [None] * len(parts), None, None


frozen_linear.register_autograd(_backward, setup_context=_setup_context)
