"""Adding an adapter's part, a product of low rank, to a frozen product that is there: products in
FP8 cannot be added to it.

On GPUs it is a kernel of our own (`low_rank_kernel`) where it is faster than the library's product;
it also adds up the gradients of layers with one input, which are else added before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.quant import gpu_kernels

MOST_RANK = 64
"""The highest rank of the kernel: a higher one is no longer bound by memory."""
MOST_MORE = 2
"""Tensors that the kernel adds besides the product."""
_TIMED = 8192, 14_336, 16
"""Rows, columns and rank of what is timed: with 4,096 columns the library takes as long on an H200,
and more with others.
"""


def takes(like: Tensor, rank: int) -> bool:
    """Whether the kernel adds products of this rank to tensors such as `like`."""
    fits = like.is_cuda and like.dtype == torch.bfloat16 and rank <= MOST_RANK
    return fits and KERNEL.on(like.device) is not None


def add(
    y: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, more: Sequence[Tensor] = ()
) -> Tensor:
    """Add left [rows, r] times right [r, cols] · scale, and up to `MOST_MORE` tensors like y, to y
    [rows, cols], in place, and return y. All are of one dtype; the kernel takes bf16.
    """
    if not takes(y, right.shape[0]) or not y.is_contiguous() or left.stride(1) != 1:
        for tensor in more:
            y.add_(tensor)
        return y.addmm_(left, right, alpha=scale)
    KERNEL.on(y.device).added(y, left, right, scale, [tensor.contiguous() for tensor in more])
    return y


def _compare(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernel comes to other sums, or is slower than the library on an
    input of a large layer.
    """
    assert_same_sums(kernels, device)
    if device.type == "cuda":
        rows, cols, rank = _TIMED
        shapes = (rows, cols), (rows, rank), (cols, rank)
        y, left, right = (
            torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes
        )
        by_kernel = functools.partial(kernels.added, y, left, right.t(), 1.0, ())
        gpu_kernels.assert_faster(by_kernel, functools.partial(y.addmm_, left, right.t()), device)


def assert_same_sums(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernel comes to other sums than separate operations."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    for rows, cols, rank, count in ((130, 300, 16, 0), (65, 64, 48, 1), (3, 520, 4, 2)):
        y = drawn(rows, cols)
        left = drawn(rows, rank + 8)[:, :rank]
        more = [drawn(rows, cols) for _ in range(count)]
        for right in (drawn(rank, cols), drawn(cols, rank).t()):
            expected = sum(
                (own.float() for own in more), y.float() + 0.5 * (left.float() @ right.float())
            )
            found = y.clone()
            kernels.added(found, left, right, 0.5, more)
            apart = (found.float() - expected).abs() - 2**-8 * expected.abs()
            assert float(apart.max()) < 1e-3, (
                f"it comes to other sums ({rows} x {cols}, rank {rank})"
            )


KERNEL = gpu_kernels.CheckedKernel("workers.layers.low_rank_kernel", _compare)
