"""The LoRA layer of a job that is trained for the form in which it is served
(`precision.served_as`): it multiplies by Q(W + scale · B A), with Q the rounding of
`workers.quant.served_forms`, and learns as if nothing were rounded (straight through).

With g the gradient of its output: ∂B = scale · gᵀ (x Aᵀ), ∂A = scale · (g B)ᵀ x, and ∂x = g Q(·).
No gradient is as large as a weight. Backward keeps x, A, B and the storage of W, and rounds again.
In a form that rounds inputs, x is the rounded one in all three, and ∂x passes its rounding too.
Under FSDP2 all of these are whole, and so is what is rounded, on every rank alike.

The product and its gradients are opaque operators everywhere: next to rounding a weight, calling
one costs nothing. See `workers.quant.frozen_linear` for why a compiler and selective checkpointing
need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ft_service.spec import PrecisionOptions, ServedAs
from workers.layers.linear import FrozenLinear, LoraLinear, stored_parts
from workers.quant.served_forms import AdapterFactors, served_inputs, served_weight


class ServedLinear(LoraLinear):
    """PEFT's LoRA layer on the weight that is served: base and adapter, rounded together."""

    served_as: ServedAs
    """Set once PEFT has made it."""
    waits = False
    """Whether it multiplies by base and adapter as they are, as before
    precision.served_from_step.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[.., in_features] → [.., out_features], in the dtype of the input."""
        if self.waits:
            return super().forward(x, *args, **kwargs)
        base: Any = self.base_layer
        assert type(base) in (nn.Linear, FrozenLinear), "all-linear has no others"
        name = self._adapter
        parts, stored_as = stored_parts(base.weight)
        y = _operator(
            x,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            list(parts),
            stored_as,
            self.scaling[name],
            self.served_as,
        )
        return y if base.bias is None else y + base.bias


def first_rounded_step(precision: PrecisionOptions, total_steps: int) -> int:
    """The first training step, counted from 0, that rounds; 0 of a job that rounds none."""
    return 0 if precision.served_as is None else int(precision.served_from_step * total_steps)


@contextmanager
def unrounded(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Let layers multiply by base and adapter as they are meanwhile, forward and backward, if it is
    `wanted`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ServedLinear) and wanted]
    for layer in layers:
        layer.waits = True
    try:
        yield
    finally:
        for layer in layers:
            layer.waits = False


def _weight(
    like: Tensor, a: Tensor, b: Tensor, parts: list[Tensor], stored_as: str, scale: float, form: Any
) -> Tensor:
    """The weight in the dtype of `like`. A and B are rounded to that dtype before they are
    multiplied, as FSDP2 rounds them where it gathers them.
    """
    adapter = AdapterFactors(a.to(like.dtype), b.to(like.dtype), scale)
    return served_weight(parts, stored_as, adapter, form, like.dtype)


@torch.library.custom_op("ft_service::served_linear", mutates_args=())
def _operator(
    x: Tensor, a: Tensor, b: Tensor, parts: list[Tensor], stored_as: str, scale: float, form: str
) -> Tensor:
    weight = _weight(x, a, b, parts, stored_as, scale, form)
    return F.linear(served_inputs(x, cast(ServedAs, form)), weight)


@torch.library.custom_op("ft_service::served_linear_grad", mutates_args=())
def _grad_operator(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parts: list[Tensor],
    stored_as: str,
    scale: float,
    form: str,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, flat = served_inputs(x, cast(ServedAs, form)).flatten(0, -2), grad.flatten(0, -2)
    down = rows @ a.to(x.dtype).t()
    of_b = flat.new_empty(b.shape).addmm_(flat.t(), down, beta=0, alpha=scale)
    of_down = torch.empty_like(down).addmm_(flat, b.to(x.dtype), beta=0, alpha=scale)
    of_a = of_down.t() @ rows
    of_x = (
        grad @ _weight(grad, a, b, parts, stored_as, scale, form)
        if needs_input
        else x.new_empty(0, *x.shape[1:])  # an operator returns tensors
    )
    return of_x, of_a.to(a.dtype), of_b.to(b.dtype)


@_operator.register_fake
def _(
    x: Tensor, a: Tensor, b: Tensor, parts: list[Tensor], stored_as: str, scale: float, form: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], b.shape[0])


@_grad_operator.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    parts: list[Tensor],
    stored_as: str,
    scale: float,
    form: str,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = torch.empty_like(x) if needs_input else x.new_empty(0, *x.shape[1:])
    return of_x, torch.empty_like(a), torch.empty_like(b)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, a, b, parts, *ctx.how = inputs
    ctx.save_for_backward(x, a, b, *parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, a, b, *parts = ctx.saved_tensors
    needs_input = ctx.needs_input_grad[0]
    of_x, of_a, of_b = _grad_operator(grad, x, a, b, parts, *ctx.how, needs_input)
    return of_x if needs_input else None, of_a, of_b, [None] * len(parts), None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
