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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ft_service.kernel_limits import GROUPED_MULTIPLE, grouped_fits, matrices_at_a_time
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

    parts: list[Tensor]
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


@torch.library.custom_op("ft_service::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int
) -> Tensor:
    """x [n, cols], sorted by group → [n, rows], in x's dtype.

    `counts` int64 [groups]: number of rows of x in each group.
    """
    weight = GroupedWeight(parts, name, rows, cols)
    if is_grouped(x, rows, cols):
        return grouped_product(x, counts, weight, transposed=True)
    y = x.new_empty(x.shape[0], rows)
    for group, own in _groups(counts):
        y[own] = F.linear(x[own], weight.matrices(group, group + 1, x.dtype)[0])
    return y


@torch.library.custom_op("ft_service::grouped_linear_grad", mutates_args=())
def _grouped_linear_grad(
    grad: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int
) -> Tensor:
    weight = GroupedWeight(parts, name, rows, cols)
    if is_grouped(grad, rows, cols):
        return grouped_product(grad, counts, weight, transposed=False)
    x_grad = grad.new_empty(grad.shape[0], cols)
    for group, own in _groups(counts):
        x_grad[own] = grad[own] @ weight.matrices(group, group + 1, grad.dtype)[0]
    return x_grad


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


def _groups(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Number and rows of each group that has rows."""
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield group, slice(start, start + count)
        start += count


@grouped_linear.register_fake
def _(x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    return x.new_empty(x.shape[0], rows)


@_grouped_linear_grad.register_fake
def _(grad: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    return grad.new_empty(grad.shape[0], cols)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, counts, parts, ctx.name, ctx.rows, ctx.cols = inputs
    ctx.save_for_backward(counts, *parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    counts, *parts = ctx.saved_tensors
    x_grad = _grouped_linear_grad(grad, counts, parts, ctx.name, ctx.rows, ctx.cols)
    return x_grad, None, [None] * len(parts), None, None, None


grouped_linear.register_autograd(_backward, setup_context=_setup_context)


# Adapters: small matrices, which have gradients
# ------------------------------------------------------------------------------


def grouped_matrices(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """x [n, in], sorted by group, times its group's matrix of [groups, out, in] → [n, out] in x's
    dtype, differentiable.

    Where the kernel wants larger matrices, as for r = 4, zeros are added: they change no sum, and
    without them a loop would wait for the number of rows of every group.
    """
    rows, cols = matrices.shape[1:]
    more_rows = -rows % GROUPED_MULTIPLE
    more_cols = -cols % GROUPED_MULTIPLE
    if not is_grouped(x, rows + more_rows, cols + more_cols):
        return _adapter_product(x, matrices, counts)
    if more_cols:
        x = F.pad(x, (0, more_cols))
    if more_rows or more_cols:
        matrices = F.pad(matrices, (0, more_cols, 0, more_rows))
    y = F.grouped_mm(x.contiguous(), matrices.transpose(1, 2), offs=counts.cumsum(0).int())
    return y[:, :rows] if more_rows else y


@torch.library.custom_op("ft_service::grouped_matrices", mutates_args=())
def _adapter_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], matrices.shape[1])
    for group, own in _groups(counts):
        y[own] = x[own] @ matrices[group].t()
    return y


@torch.library.custom_op("ft_service::grouped_matrices_grad", mutates_args=())
def _adapter_grad(
    grad: Tensor, x: Tensor, matrices: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    x_grad = torch.empty_like(x)
    matrices_grad = torch.zeros_like(matrices)
    for group, own in _groups(counts):
        x_grad[own] = grad[own] @ matrices[group]
        matrices_grad[group] = grad[own].t() @ x[own]
    return x_grad, matrices_grad


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
