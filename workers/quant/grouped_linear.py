"""Products of rows with the matrix of their group, as opaque operators: frozen matrices in any
storage format, and adapters.

A mixture of experts keeps the matrices of all its experts above each other, [groups · rows, cols].
The input is sorted by group. Backward keeps the storage, as in `frozen_linear`.

On the CPU the host knows how many rows each group has: the matrices of the groups that have rows
are dequantised one at a time. GPUs with a grouped product do not wait for these counts: a bounded
number of matrices is dequantised at a time, whether their groups have rows or not, and one kernel
multiplies them and reads the counts itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ft_service.kernel_limits import (
    GROUPED_MULTIPLE,
    filled_group,
    grouped_fits,
    matrices_at_a_time,
)
from workers.quant import frozen_linear
from workers.quant.direct_function import DirectFunction, once_differentiable
from workers.quant.frozen_linear import PLAIN, dense

GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs for which torch has a grouped product.

On others torch runs a loop that waits.
"""


@dataclass(frozen=True)
class GroupedWeight:
    """The frozen matrices [rows, cols] of all groups, one above the other, stored as `parts` in
    format `name`.
    """

    parts: Sequence[Tensor]
    name: str
    rows: int
    cols: int

    def matrices(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """The matrices of groups [first, last), dense: [last - first, rows, cols]."""
        stored = [part[first * self.rows : last * self.rows] for part in self.parts]
        weight = (
            stored[0].to(dtype)
            if self.name == PLAIN
            else dense(stored, self.name, self.cols, dtype)
        )
        return weight.contiguous().view(last - first, self.rows, self.cols)


def grouped_linear(
    x: Tensor, counts: Tensor, parts: Sequence[Tensor], name: str, rows: int, cols: int
) -> Tensor:
    """x [n, cols], sorted by group → [n, rows], in x's dtype.

    `counts` int64 [groups]: number of rows of x in each group.
    """
    if frozen_linear.watched():
        return _operator(x, counts, list(parts), name, rows, cols)
    return _GroupedLinear.apply(x, counts, name, rows, cols, *parts)  # pyright: ignore[reportReturnType]


class _GroupedLinear(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Tensor, name: str, rows: int, cols: int, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(counts, *parts)
        ctx.name = name
        ctx.rows = rows
        ctx.cols = cols
        return _product(x, counts, GroupedWeight(parts, name, rows, cols))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        counts, *parts = ctx.saved_tensors
        weight = GroupedWeight(parts, ctx.name, ctx.rows, ctx.cols)
        return _product_grad(grads[0], counts, weight), *[None] * (4 + len(parts))


def _product(x: Tensor, counts: Tensor, weight: GroupedWeight) -> Tensor:
    if is_grouped(x, weight.rows, weight.cols):
        return grouped_product(x, counts, weight, transposed=True)
    y = x.new_empty(x.shape[0], weight.rows)
    for group, own in _groups(counts, filled=x.dtype == torch.bfloat16):
        torch.mm(x[own], weight.matrices(group, group + 1, x.dtype)[0].t(), out=y[own])
    return y


def _product_grad(grad: Tensor, counts: Tensor, weight: GroupedWeight) -> Tensor:
    if is_grouped(grad, weight.rows, weight.cols):
        return grouped_product(grad, counts, weight, transposed=False)
    x_grad = grad.new_empty(grad.shape[0], weight.cols)
    for group, own in _groups(counts, filled=grad.dtype == torch.bfloat16):
        torch.mm(grad[own], weight.matrices(group, group + 1, grad.dtype)[0], out=x_grad[own])
    return x_grad


@torch.library.custom_op("ft_service::grouped_linear", mutates_args=())
def _operator(
    x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int
) -> Tensor:
    return _product(x, counts, GroupedWeight(parts, name, rows, cols))


@torch.library.custom_op("ft_service::grouped_linear_grad", mutates_args=())
def _grad_operator(
    grad: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int
) -> Tensor:
    return _product_grad(grad, counts, GroupedWeight(parts, name, rows, cols))


def is_grouped(x: Tensor, rows: int, cols: int) -> bool:
    """Return whether torch has a kernel for x's rows times matrices [rows, cols] of their
    groups.
    """
    if (
        not x.is_cuda
        or x.dtype != torch.bfloat16
        or x.shape[0] == 0
        or not grouped_fits(rows, cols)
    ):
        return False
    return torch.cuda.get_device_capability(x.device)[0] in GROUPED_CAPABILITIES


def grouped_product(
    x: Tensor, counts: Tensor, weight: GroupedWeight, *, transposed: bool
) -> Tensor:
    """Multiply each row of x by its group's matrix → [n, cols], or `transposed` → [n, rows].

    The host never waits.

    With more groups than are dequantised at a time, each lot takes its rows of x to the front,
    which costs a copy of x and two of the result, one after the other: only the device knows where
    they begin. `copied_by_lots` counts the bytes.
    """
    groups = counts.shape[0]
    n = x.shape[0]
    lot = (
        groups
        if weight.name == PLAIN
        else matrices_at_a_time(weight.rows * weight.cols * x.element_size())
    )
    ends = counts.cumsum(0)

    def product(rows: Tensor, first: int, last: int, offs: Tensor) -> Tensor:
        """Rows that begin with those of group `first`, times the matrices of their groups, which
        are freed again.
        """
        matrices = weight.matrices(first, last, x.dtype)
        return F.grouped_mm(
            rows, matrices.transpose(1, 2) if transposed else matrices, offs=offs.int()
        )

    if lot >= groups:
        return product(x.contiguous(), 0, groups, ends)
    row = torch.arange(n, device=x.device)
    y = x.new_empty(n, weight.rows if transposed else weight.cols)
    for first in range(0, groups, lot):
        last = min(first + lot, groups)
        start = ends[first] - counts[first]
        own = (row >= start) & (row < ends[last - 1])
        at_front = product(
            x[(row + start).clamp_(max=n - 1)], first, last, ends[first:last] - start
        )
        torch.where(own.unsqueeze(1), at_front[(row - start).clamp_(min=0)], y, out=y)
        del at_front  # before the next lot's
    return y


def _groups(counts: Tensor, *, filled: bool = False) -> Iterator[tuple[int, slice]]:
    """Number and rows of each group that has rows, in their order. `filled`: with some rows of the
    next groups, which come to their own results later, so that products have few numbers of rows
    (`filled_group`).
    """
    numbers = counts.tolist()
    rows = sum(numbers)
    start = 0
    for group, count in enumerate(numbers):
        if count:
            wanted = filled_group(count) if filled else count
            yield group, slice(start, start + (wanted if start + wanted <= rows else count))
        start += count


@_operator.register_fake
def _(x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    return x.new_empty(x.shape[0], rows)


@_grad_operator.register_fake
def _(grad: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    return grad.new_empty(grad.shape[0], cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, counts, parts, ctx.name, ctx.rows, ctx.cols = inputs
    ctx.save_for_backward(counts, *parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    counts, *parts = ctx.saved_tensors
    x_grad = _grad_operator(grad, counts, parts, ctx.name, ctx.rows, ctx.cols)
    return x_grad, None, [None] * len(parts), None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


# Adapters: small matrices, which have gradients
# ------------------------------------------------------------------------------


def grouped_matrices(
    x: Tensor, matrices: Tensor, counts: Tensor, onto: Tensor | None = None
) -> Tensor:
    """x [n, in], sorted by group, times its group's matrix of [groups, out, in] → [n, out] in x's
    dtype, differentiable.

    `onto` [n, out]: what it is added to, in place, and returned.

    Where the kernel wants larger matrices, as for r = 4, zeros are added: they change no sum, and
    without them a loop would wait for the number of rows of every group.
    """
    rows, cols = matrices.shape[1:]
    more_rows = -rows % GROUPED_MULTIPLE
    more_cols = -cols % GROUPED_MULTIPLE
    if is_grouped(x, rows + more_rows, cols + more_cols):
        if more_cols:
            x = F.pad(x, (0, more_cols))
        if more_rows or more_cols:
            matrices = F.pad(matrices, (0, more_cols, 0, more_rows))
        y = F.grouped_mm(x.contiguous(), matrices.transpose(1, 2), offs=counts.cumsum(0).int())
        y = y[:, :rows] if more_rows else y
    elif frozen_linear.watched():
        y = _adapter_product(x, matrices, counts)
    else:
        return _GroupedMatrices.apply(x, matrices, counts, onto)  # pyright: ignore[reportReturnType]
    return y if onto is None else onto.add_(y)


class _GroupedMatrices(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrices: Tensor, counts: Tensor, onto: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, matrices, counts)
        if onto is None:
            return _adapter_product_of(x, matrices, counts)
        ctx.mark_dirty(onto)
        for group, own in _groups(counts):
            onto[own].addmm_(x[own], matrices[group].t())
        return onto

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_onto = grads[0] if ctx.needs_input_grad[3] else None
        return *_adapter_grads_of(grads[0], *ctx.saved_tensors), None, of_onto


def _adapter_product_of(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], matrices.shape[1])
    for group, own in _groups(counts):
        torch.mm(x[own], matrices[group].t(), out=y[own])
    return y


def _adapter_grads_of(
    grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    x_grad = torch.empty_like(x)
    matrices_grad = torch.zeros_like(matrices)
    for group, own in _groups(counts):
        torch.mm(grad[own], matrices[group], out=x_grad[own])
        torch.mm(grad[own].t(), x[own], out=matrices_grad[group])
    return x_grad, matrices_grad


@torch.library.custom_op("ft_service::grouped_matrices", mutates_args=())
def _adapter_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    return _adapter_product_of(x, matrices, counts)


@torch.library.custom_op("ft_service::grouped_matrices_grad", mutates_args=())
def _adapter_grad(
    grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    return _adapter_grads_of(grad, x, matrices, counts)


@_adapter_product.register_fake
def _(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[1])


@_adapter_grad.register_fake
def _(grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(matrices)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _adapter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_adapter_grad(grad.contiguous(), *ctx.saved_tensors), None


_adapter_product.register_autograd(_adapter_backward, setup_context=_save_inputs)
