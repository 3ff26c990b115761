"""The linear layer on a quantised weight. Its parts are plain tensors; they are saved for backward,
never a dequantised copy.

Under a compiler or a dispatch mode it is a pair of opaque operators. If the compiler saw the
dequantise of
forward and of backward, it would merge the two and keep a bf16 copy of every weight alive between
them; selective checkpointing would keep the product and dequantise again for nothing. Everywhere
else the same arithmetic is called directly: an operator written in Python costs more at each call
than a small product does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from workers.quant.direct_function import DirectFunction, once_differentiable

PLAIN = ""
"""Used in place of a format's name where the weight is one plain tensor."""


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of one storage format: dequantise, then multiply."""

    name: str
    parts: Callable[..., Any]
    """Makes the format's own tuple from its tensors in order."""
    module: ModuleType
    """The format's functions `empty_parts`, `quantize` and `dequantize`."""

    @classmethod
    def register(cls, name: str, parts: Callable[..., Any], module: ModuleType) -> Numerics:
        """Make a format known to `frozen_linear` by its name: operators take no functions."""
        _KNOWN[name] = cls(name, parts, module)
        return _KNOWN[name]

    def dense(self, parts: Sequence[Tensor], cols: int, dtype: torch.dtype) -> Tensor:
        """The weight [rows, cols] that `parts` store, dequantised: once while such weights are kept
        (`DenseWeights`).
        """
        kept = DenseWeights.kept
        if kept is None:
            return self.module.dequantize(self.parts(*parts), cols, dtype)
        key = parts[0].data_ptr(), dtype
        if key not in kept:
            kept[key] = self.module.dequantize(self.parts(*parts), cols, dtype)
        return kept[key]

    def multiplied(self, parts: Sequence[Tensor], cols: int, dtype: torch.dtype) -> Tensor | None:
        """The dense weight [rows, cols] that products are made with; None: they are made with
        none.
        """
        return self.dense(parts, cols, dtype)

    def linear(self, x: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        """x [.., cols] times the transposed weight → [.., rows], in x's dtype."""
        return F.linear(x, self.dense(parts, cols, x.dtype))

    def linear_grad(self, grad: Tensor, parts: list[Tensor], cols: int) -> Tensor:
        """grad [.., rows] times the weight → [.., cols], in grad's dtype."""
        return grad @ self.dense(parts, cols, grad.dtype)


class DenseWeights:
    """Dequantised weights that are kept between `begin` and `end`: those of one layer, while
    several jobs compute it. Meanwhile no weight may be freed or changed.
    """

    kept: ClassVar[dict[tuple[int, torch.dtype], Tensor] | None] = None
    """By the address of the first part. None: nothing is kept."""

    @staticmethod
    def begin() -> None:
        """Keep what is dequantised from now on."""
        DenseWeights.kept = {}

    @staticmethod
    def end() -> None:
        """Free what was kept, and keep nothing. Repeating it does nothing."""
        DenseWeights.kept = None


_KNOWN: dict[str, Numerics] = {}


def dense(parts: list[Tensor], name: str, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] that `parts` store in format `name`, dequantised."""
    return _KNOWN[name].dense(parts, cols, dtype)


def rows_of(parts: Sequence[Tensor], name: str, cols: int, rows: slice) -> Tensor:
    """Rows of a stored weight, also of a plain one, dequantised to fp32."""
    own = [part[rows] for part in parts]
    if name == PLAIN:
        return own[0].float()
    return _KNOWN[name].module.dequantize(_KNOWN[name].parts(*own), cols, torch.float32)


def frozen_linear(x: Tensor, parts: Sequence[Tensor], name: str, cols: int) -> Tensor:
    """x [.., cols] times the transposed weight [rows, cols] that `parts` store in format `name` →
    [.., rows], in x's dtype.
    """
    if watched():
        return _operator(x, list(parts), name, cols)
    return _FrozenLinear.apply(x, name, cols, *parts)  # pyright: ignore[reportReturnType]


def watched() -> bool:
    """Return whether a compiler or a dispatch mode, such as that of selective checkpointing, sees
    the operators.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def reshaped(y: Tensor, *shape: int) -> Tensor:
    """y in another shape, for an autograd function to return.

    Not as a view: PyTorch lets nobody write into a view that such a function returns, and Falcon
    and Gemma 3n write into what a linear layer returns. `y`: not used any more.
    """
    return torch.ops.aten._unsafe_view.default(y, shape)


def product(x: Tensor, parts: Sequence[Tensor], name: str, cols: int) -> Tensor:
    """`frozen_linear` for use inside an autograd function, also on a plain weight."""
    if name == PLAIN:
        return F.linear(x, parts[0])
    return (
        _operator(x, list(parts), name, cols)
        if watched()
        else _KNOWN[name].linear(x, list(parts), cols)
    )


def product_grad(grad: Tensor, parts: Sequence[Tensor], name: str, cols: int) -> Tensor:
    """The gradient of `product`'s input: grad [.., rows] times the weight → [.., cols], in grad's
    dtype, for it alone.
    """
    if name == PLAIN:
        return grad @ parts[0]
    return (
        _grad_operator(grad, list(parts), name, cols)
        if watched()
        else _KNOWN[name].linear_grad(grad, list(parts), cols)
    )


def multiplied(parts: Sequence[Tensor], name: str, cols: int, dtype: torch.dtype) -> Tensor | None:
    """The dense weight [rows, cols] that `product` multiplies with; None: it multiplies
    otherwise.
    """
    return parts[0] if name == PLAIN else _KNOWN[name].multiplied(parts, cols, dtype)


class _FrozenLinear(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, cols: int, *parts: Tensor) -> Tensor:
        ctx.name = name
        ctx.cols = cols
        ctx.save_for_backward(*parts)
        return product(x, parts, name, cols)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = ctx.saved_tensors
        return product_grad(grads[0], parts, ctx.name, ctx.cols), None, None, *[None] * len(parts)


@torch.library.custom_op("ft_service::frozen_linear", mutates_args=())
def _operator(x: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return _KNOWN[name].linear(x, parts, cols)


@torch.library.custom_op("ft_service::frozen_linear_grad", mutates_args=())
def _grad_operator(grad: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return _KNOWN[name].linear_grad(grad, parts, cols)


@_operator.register_fake
def _(x: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], parts[0].shape[0])


@_grad_operator.register_fake
def _(grad: Tensor, parts: list[Tensor], name: str, cols: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, ctx.name, ctx.cols = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return _grad_operator(grad, parts, ctx.name, ctx.cols), [None] * len(parts), None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
