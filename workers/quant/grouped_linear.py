"""Many frozen matrices as one: each row of the input meets the matrix of its group, as opaque operators.

A mixture of experts keeps the matrices of all its experts above each other, [groups · rows, cols], in any storage format. The
input is sorted by group. As in `frozen_linear`, what backward keeps is the storage.

Where the number of rows of each group is known to the host for nothing, on processors, the matrices that some row meets are
dequantised one at a time. GPUs with a grouped product do not wait for those numbers: a bounded number of matrices is
dequantised at a time, whether some row meets them or not, and multiplied by one kernel that reads the numbers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.quant.frozen_linear import dense

PLAIN = ""
"""In place of a format's name: the storage is one plain tensor."""


GROUPED_BYTES = 2**29
"""What is dequantised at a time for a grouped product, at most, if it is more than one matrix."""
GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs for which torch has a grouped product. For others it has a loop that waits."""
MULTIPLE = 8
"""Rows and columns of the matrices of a grouped product: 16 bytes in bf16."""


@torch.library.custom_op("ft_service::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    """x [n, cols], sorted by group → [n, rows], in x's dtype. `counts` int64 [groups]: how many rows of x each group has."""
    if is_grouped(x, rows, cols):
        return grouped_product(x, counts, parts, name, rows, cols, transposed=True)
    y = x.new_empty(x.shape[0], rows)
    for own, weight in _groups(counts, parts, name, rows, cols, x.dtype):
        y[own] = F.linear(x[own], weight)
    return y


@torch.library.custom_op("ft_service::grouped_linear_grad", mutates_args=())
def _grouped_linear_grad(grad: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int) -> Tensor:
    if is_grouped(grad, rows, cols):
        return grouped_product(grad, counts, parts, name, rows, cols, transposed=False)
    x_grad = grad.new_empty(grad.shape[0], cols)
    for own, weight in _groups(counts, parts, name, rows, cols, grad.dtype):
        x_grad[own] = grad[own] @ weight
    return x_grad


def is_grouped(x: Tensor, rows: int, cols: int) -> bool:
    """Whether torch has a kernel for x's rows times matrices [rows, cols] of their groups."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[0] == 0 or rows % MULTIPLE or cols % MULTIPLE:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in GROUPED_CAPABILITIES


def grouped_product(
    x: Tensor, counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int, *, transposed: bool
) -> Tensor:
    """Each row of x times its group's matrix [rows, cols], or `transposed` → [n, cols], or [n, rows]. The host never waits.

    With more groups than are dequantised at a time, each lot takes its rows of x to the front, which costs a copy of x and of
    the result: where they begin is known on the device alone.
    """
    groups, n = counts.shape[0], x.shape[0]
    lot = max(1, GROUPED_BYTES // (rows * cols * x.element_size())) if name != PLAIN else groups
    ends = counts.cumsum(0)
    row = torch.arange(n, device=x.device)
    y = x.new_empty(n, rows if transposed else cols)
    for first in range(0, groups, lot):
        last = min(first + lot, groups)
        weights = _matrices(parts, name, first, last, rows, cols, x.dtype)
        weights = weights.transpose(1, 2) if transposed else weights
        if last - first == groups:
            return F.grouped_mm(x.contiguous(), weights, offs=ends.int())
        start = ends[first] - counts[first]
        at_front = F.grouped_mm(x[(row + start).clamp_(max=n - 1)], weights, offs=(ends[first:last] - start).int())
        own = (row >= start) & (row < ends[last - 1])
        y = torch.where(own.unsqueeze(1), at_front[(row - start).clamp_(min=0)], y)
    return y


def _matrices(parts: list[Tensor], name: str, first: int, last: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """The matrices of groups [first, last), dense: [last - first, rows, cols]."""
    stored = [part[first * rows : last * rows] for part in parts]
    weight = stored[0].to(dtype) if name == PLAIN else dense(stored, name, cols, dtype)
    return weight.contiguous().view(last - first, rows, cols)


def _groups(
    counts: Tensor, parts: list[Tensor], name: str, rows: int, cols: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Each group that has rows: those rows of x, and its matrix [rows, cols]."""
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield slice(start, start + count), _matrices(parts, name, group, group + 1, rows, cols, dtype)[0]
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
