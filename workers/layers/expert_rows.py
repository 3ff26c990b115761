"""What happens to the rows of a mixture of experts around their products: they are taken from
tokens, gated, and added up to one row a token.

A row is one choice of a token; there are tokens · k of them, sorted by expert. Each end knows where
the rows of a token are, so that its gradient is gathered and added up there. The gradient of
PyTorch's indexing adds rows up at places that it meets several times, for which it sorts them first
on a GPU, and took a fifth of a step on a processor. The kernels are for bf16 on CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant import gpu_kernels
from workers.quant.direct_function import DirectFunction, once_differentiable


class Route(NamedTuple):
    """Where rows are, sorted by expert. All int64."""

    choices: Tensor
    """[rows]: the choice of each row, token · k + its place among the token's choices."""
    tokens: Tensor
    """[rows]: the token of each row."""
    rows: Tensor
    """[tokens, k]: the row of each choice."""
    counts: Tensor
    """[experts]: the number of rows of each expert."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Route:
        """`chosen` [tokens, k]: numbers of the experts that each token meets."""
        flat = chosen.reshape(-1)
        choices = torch.argsort(flat, stable=True)
        places = torch.arange(len(choices), device=flat.device)
        rows = torch.empty_like(choices).scatter_(0, choices, places)
        counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
        return cls(choices, choices // chosen.shape[-1], rows.view_as(chosen), counts)


def kernels_for(x: Tensor) -> Any:
    """The kernels for x; None: PyTorch's operations compute it."""
    return KERNEL.on(x.device) if x.dtype == torch.bfloat16 else None


def rows_of_tokens(x: Tensor, route: Route, by: Any = None) -> Tensor:
    """x [tokens, h] → [rows, h]: the token of each row.

    `by`: kernels, or None, here and below.
    """
    if torch.compiler.is_compiling():
        return x[route.tokens]
    return _RowsOfTokens.apply(x, route, by)  # pyright: ignore[reportReturnType]


def gated_halves(both: Tensor, by: Any = None) -> Tensor:
    """both [rows, 2 · width] → [rows, width]: SiLU of the first half times the second."""
    if torch.compiler.is_compiling():
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _GatedHalves.apply(both, by)  # pyright: ignore[reportReturnType]


def sums_by_token(
    y: Tensor, shares: Tensor | None, route: Route, dtype: torch.dtype, by: Any = None
) -> Tensor:
    """y [rows, h] → [tokens, h] in `dtype`: the rows of each token, each times its share, added up
    in fp32 and rounded once.

    `shares` [tokens, k]; None: all are 1.
    """
    if torch.compiler.is_compiling():
        terms = y if shares is None else y * shares.reshape(-1)[route.choices].unsqueeze(1)
        return terms[route.rows].sum(dim=1).to(dtype)
    return _SumsByToken.apply(y, shares, route, dtype, by)  # pyright: ignore[reportReturnType]


class _RowsOfTokens(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, by: Any) -> Tensor:
        ctx.rows = route.rows
        ctx.by = by
        return x.index_select(0, route.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grads[0], None, ctx.rows, grads[0].dtype, ctx.by), None, None


class _GatedHalves(DirectFunction):
    """Backward keeps both halves, and not the activation."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, by: Any) -> Tensor:
        ctx.save_for_backward(both)
        ctx.by = by
        if by is not None:
            return by.gated_halves(both.contiguous())
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        (both,) = ctx.saved_tensors
        if ctx.by is not None:
            return ctx.by.gated_halves_grad(grad.contiguous(), both.contiguous()), None
        gate, up = both.chunk(2, dim=-1)
        of_both = torch.empty_like(both)
        of_gate, of_up = of_both.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(grad)
        torch.mul(grad, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_both, None


class _SumsByToken(DirectFunction):
    """Backward keeps the rows and their shares."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, shares: Tensor | None, route: Route, dtype: torch.dtype, by: Any
    ) -> Tensor:
        ctx.save_for_backward(*(() if shares is None else (y, shares)))
        ctx.route = route
        ctx.of_y = y.dtype
        ctx.by = by
        return _summed(y, shares, route.rows, dtype, by)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        route: Route = ctx.route
        kept = ctx.saved_tensors
        if not kept:
            of_y, of_shares = grad.index_select(0, route.tokens).to(ctx.of_y), None
        elif ctx.by is not None:
            of_y, of_shares = ctx.by.sums_grad(grad.contiguous(), *kept, route.choices)
        else:
            y, shares = kept
            of_y, of_shares = _sums_grad(grad, y, shares, route)
        return of_y, of_shares, None, None, None


def _summed(y: Tensor, shares: Tensor | None, rows: Tensor, dtype: torch.dtype, by: Any) -> Tensor:
    """`sums_by_token`, of rows [tokens, k]."""
    if by is not None:
        return by.summed(y.contiguous(), shares, rows, dtype)
    if shares is None or shares.dtype == y.dtype:
        return F.embedding_bag(rows, y, mode="sum", per_sample_weights=shares).to(dtype)
    # One place at a time: all rows at once in another dtype would take twice their bytes.
    total = torch.zeros(len(rows), y.shape[1], dtype=shares.dtype, device=y.device)
    for place, own in enumerate(rows.unbind(1)):
        total.add_(y.index_select(0, own) * shares[:, place, None])
    return total.to(dtype)


def _sums_grad(grad: Tensor, y: Tensor, shares: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """The gradients of y and of its shares."""
    of_y = torch.empty_like(y)
    of_shares = torch.empty_like(shares)
    wide = torch.promote_types(y.dtype, torch.float32)
    for place, rows in enumerate(route.rows.unbind(1)):
        of_shares[:, place] = y.index_select(0, rows).to(wide).mul_(grad).sum(1)
        of_y.index_copy_(0, rows, (grad * shares[:, place, None]).to(y.dtype))
    return of_y, of_shares


# Compared on a device before they are used
# ------------------------------------------------------------------------------


def _compare(by: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernels compute something else than PyTorch's operations, forward
    or backward.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    for rows, width in ((37, 100), (300, 768)):
        both, grad = drawn(rows, 2 * width), drawn(rows, width)
        _same("gating", (both,), grad, lambda x, used: gated_halves(x, used), by)
    for tokens, k, width, shares_in in ((33, 3, 100, torch.float32), (40, 8, 2048, torch.bfloat16)):
        chosen = torch.rand(tokens, 11, generator=generator).topk(k).indices.to(device)
        route = Route.of(chosen, 11)
        shares = torch.rand(tokens, k, generator=generator).to(device, shares_in)
        x, y = drawn(tokens, width), drawn(tokens * k, width)

        def taken(x: Tensor, used: Any, route: Route = route) -> Tensor:
            return rows_of_tokens(x, route, used)

        def summed(y: Tensor, own: Tensor, used: Any, route: Route = route) -> Tensor:
            return sums_by_token(y, own, route, torch.bfloat16, used)

        _same("rows", (x,), drawn(tokens * k, width), taken, by)
        _same("sums", (y, shares), drawn(tokens, width), summed, by)


def _same(what: str, inputs: tuple[Tensor, ...], grad: Tensor, act: Any, by: Any) -> None:
    found, expected = (_both(inputs, grad, act, used) for used in (by, None))
    for place, (own, right) in enumerate(zip(found, expected, strict=True)):
        direction = "forward" if place == 0 else "backward"
        near = 2**-7 * right.float().abs() + 2**-9 * float(right.float().abs().max())
        apart = (own.float() - right.float()).abs()
        same_kind = (own.shape, own.dtype) == (right.shape, right.dtype)
        assert same_kind, f"{what}, {direction}: another shape or dtype"
        assert bool((apart <= near).all()), f"{what}, {direction}: other numbers"


def _both(inputs: tuple[Tensor, ...], grad: Tensor, act: Any, by: Any) -> list[Tensor]:
    """What is made of the inputs, and their gradients."""
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    made = act(*own, by)
    return [made.detach(), *torch.autograd.grad(made, own, grad)]


KERNEL = gpu_kernels.CheckedKernel("workers.layers.expert_rows_kernels", _compare)
