"""Fused operations between the products of a decoder layer, as few kernels: RMS norms, rotary
positions, gated feed-forwards.

The formulas are those of the layers' classes, which stay what they are;
`workers.patches.fused_layers` finds out which class computes which formula. The kernels are for
bf16 on CUDA. A frozen factor needs no gradient, and none is computed.

    norm         x / rms(x), in fp32, then the factor, in one of the `Form`s
    rotation     x ∘ cos + half-turned(x) ∘ sin
    gating       silu(gate) ∘ up
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant import gpu_kernels
from workers.quant.direct_function import DirectFunction, once_differentiable

WIDEST = 16384
"""Most columns of a norm: a program has a row in its registers."""


class Form(IntEnum):
    """The factor of an RMS norm."""

    ROUNDED = 0
    """x is rounded to its dtype before the factor multiplies it."""
    IN_FP32 = 1
    """The factor multiplies in fp32; the product is rounded."""
    FROM_ONE = 2
    """The same with 1 + factor."""
    NONE = 3
    """There is no factor."""


def norm(x: Tensor, weight: Tensor | None, eps: float, form: Form) -> Tensor:
    """The RMS norm of x [.., cols] over its last dimension, by PyTorch's operations.

    `weight` [cols].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if form is Form.ROUNDED:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + 1.0 if form is Form.FROM_ONE else weight.float())).to(x.dtype)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query and key [rows, heads, length, d] turned by cos and sin [1 or rows, length, d], by
    PyTorch's operations.
    """
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of gate times up, by PyTorch's operations."""
    return F.silu(gate) * up


# With kernels
# ------------------------------------------------------------------------------


def takes_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernel computes this norm, and its gradient if one is wanted."""
    same = weight is None or (weight.dtype == x.dtype and not weight.requires_grad)
    return x.dtype == torch.bfloat16 and same and x.shape[-1] <= WIDEST


def takes_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel turns these."""
    if (
        not (query.dtype == key.dtype == cos.dtype == sin.dtype == torch.bfloat16)
        or query.dim() != 4
        or cos.dim() != 3
    ):
        return False
    rows, _, length, width = query.shape
    fits = (
        cos.shape == sin.shape
        and cos.shape[0] in (1, rows)
        and cos.shape[1:] == (length, width)
        and width % 2 == 0
    )
    return (
        fits
        and key.shape[::2] == query.shape[::2]
        and key.shape[-1] == width
        and not (cos.requires_grad or sin.requires_grad)
    )


def takes_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether the kernel multiplies these."""
    return gate.dtype == up.dtype == torch.bfloat16 and gate.shape == up.shape


class FusedNorm(DirectFunction):
    """`norm` by kernels. Backward keeps x, the factor, and a number a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, form: Form, by: Any
    ) -> Tensor:
        rows = x if x.is_contiguous() else _evenly_spaced(x)
        ctx.form = int(form)
        ctx.by = by
        y, root = by.normed(rows, weight, eps, ctx.form)
        ctx.save_for_backward(rows, weight, root)
        return y if rows is x else y.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (
            ctx.by.normed_grad(grads[0].contiguous(), *ctx.saved_tensors, ctx.form),
            None,
            None,
            None,
            None,
        )


class FusedRotation(DirectFunction):
    """`rotate` by kernels. Backward keeps the angles."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, by: Any
    ) -> tuple[Tensor, Tensor]:
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.by = by
        return by.rotated(_dense(query), _dense(key), cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_query, of_key = grads
        return (
            *ctx.by.rotated(_dense(of_query), _dense(of_key), *ctx.saved_tensors, back=True),
            None,
            None,
            None,
        )


class FusedGate(DirectFunction):
    """`gate` by kernels. Backward keeps both factors, and not the activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, by: Any) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.by = by
        return by.gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.by.gated_grad(grads[0].contiguous(), *ctx.saved_tensors), None


def _evenly_spaced(x: Tensor) -> Tensor:
    """x [.., cols] as [rows, cols], copied if its rows do not lie at one distance."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _dense(x: Tensor) -> Tensor:
    """x [rows, heads, length, d], or a copy: its strides are kept by what is made like it, and its
    channels lie together.
    """
    return (
        x
        if torch.ops.aten.is_non_overlapping_and_dense(x) and x.stride(-1) == 1
        else x.contiguous()
    )


# Compared on a device before they are used
# ------------------------------------------------------------------------------

_MOST_OTHER = 0.02
"""Share of numbers that may differ: by one step of bf16, where a sum or an exponential falls on the
other side of a tie.
"""


def _compare(by: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernels compute something else than PyTorch's operations, forward
    or backward.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()

    for form in Form:
        for cols in (100, 4096):
            x = drawn(5, 3, cols)
            weight = None if form is Form.NONE else drawn(cols).detach()
            _same(
                f"norm {form.name}",
                [x],
                norm(x, weight, 1e-6, form),
                FusedNorm.apply(x, weight, 1e-6, form, by),
                drawn,
            )
    query, key = (drawn(2, 7, heads, 48).transpose(1, 2) for heads in (9, 3))
    angles = drawn(2, 7, 48).detach(), drawn(2, 7, 48).detach()
    for own in (angles, tuple(angle[:1] for angle in angles)):
        stock = rotate(query, key, *own)
        found = FusedRotation.apply(query, key, *own, by)
        for number, tensor in enumerate((query, key)):
            _same("rotation", [tensor], stock[number], found[number], drawn)  # pyright: ignore[reportIndexIssue]
    factors = [drawn(37, 100), drawn(37, 100)]
    _same("gating", factors, gate(*factors), FusedGate.apply(*factors, by), drawn)


def _same(what: str, inputs: list[Tensor], stock: Tensor, found: Any, drawn: Any) -> None:
    grad = drawn(*stock.shape).detach()
    pairs = [(stock, found)]
    pairs += zip(
        *(torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (stock, found)),
        strict=True,
    )
    for place, (expected, own) in enumerate(pairs):
        direction = "forward" if place == 0 else "backward"
        other = float((own != expected).float().mean())
        near = torch.allclose(
            own.float(),
            expected.float(),
            rtol=2**-7,
            atol=2**-12 * float(expected.detach().abs().max()),
        )
        assert own.stride() == expected.stride(), f"{what}, {direction}: other strides"
        same = near and other <= _MOST_OTHER
        assert same, f"{what}, {direction}: {other:.1%} of the numbers are others"


KERNEL = gpu_kernels.CheckedKernel("workers.layers.fused_kernels", _compare)
