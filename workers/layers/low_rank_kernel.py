"""Adding a product of low rank to what is there as one kernel for CUDA in Triton; import it only
there, as `mask_kernel`.

It reads and writes the sum once, and is bound by memory. On an H200 it takes 0.054 ms for 8,192
rows of 4,096 and 0.150 for rows of 14,336, the library's product with so short a sum 0.055 to 0.068
and 0.199 to 0.221; with one tensor more, 0.071 instead of 0.125 for 4,096. `low_rank` uses it only
on a GPU where it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ft_service.kernel_limits import next_power
from workers.quant.gpu_kernels import KernelLauncher

_HEIGHT = 64
_WIDTH = 64
"""Of a program's part of the sum."""
_LEAST_RANK = 16
"""Of a product on tensor cores; what is missing is zeros."""


@triton.jit(do_not_specialize=["rows"])
def _added(
    y,
    one,
    two,
    left,
    right,
    rows,
    cols,
    rank,
    left_stride,
    right_stride,
    column_stride,
    scale,
    more: tl.constexpr,
    depth: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
):
    row = (tl.program_id(1) * height + tl.arange(0, height)).to(tl.int64)[:, None]
    column = (tl.program_id(0) * width + tl.arange(0, width))[None, :]
    step = tl.arange(0, depth)
    at = row * cols + column
    there = (row < rows) & (column < cols)
    # What is added is asked for before the product is computed: the product does not wait for it,
    # but it for memory.
    own = tl.load(y + at, mask=there, other=0)
    first = own
    second = own
    if more > 0:
        first = tl.load(one + at, mask=there, other=0)
    if more > 1:
        second = tl.load(two + at, mask=there, other=0)
    factor = tl.load(
        left + row * left_stride + step[None, :],
        mask=(row < rows) & (step < rank)[None, :],
        other=0,
    )
    other = right + step[:, None] * right_stride + column * column_stride
    total = (
        tl.dot(factor, tl.load(other, mask=(step < rank)[:, None] & (column < cols), other=0))
        * scale
    )
    total += own.to(tl.float32)
    if more > 0:
        total += first.to(tl.float32)
    if more > 1:
        total += second.to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=there)


_add = KernelLauncher(_added)


def added(y: Tensor, left: Tensor, right: Tensor, scale: float, more: Sequence[Tensor]) -> None:
    """Add left [rows, r] times right [r, cols] · scale, and up to two tensors more, to y [rows,
    cols], rounded once.

    y and the two: contiguous; the rows of `left` too; `right` or its transpose.
    """
    rows, cols = y.shape
    if not y.numel():
        return
    grid = -(-cols // _WIDTH), -(-rows // _HEIGHT), 1
    one, two = (*more, y, y)[:2]
    sizes = (
        rows,
        cols,
        right.shape[0],
        left.stride(0),
        right.stride(0),
        right.stride(1),
        float(scale),
    )
    depth = max(_LEAST_RANK, next_power(right.shape[0]))
    _add(grid, (y, one, two, left, right), sizes, len(more), depth, _HEIGHT, _WIDTH)
