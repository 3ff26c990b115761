"""Kernels for CUDA in Triton of what products in FP8 need besides the products; import it only
there, as `mask_kernel`.

    quantise_rows     rounds bf16 rows to FP8, times a scale a column if there is one: reads 2 bytes
    an element, writes 1 transposed        turns a weight's codes, byte by byte, in tiles: PyTorch's
    copy reaches a tenth of the bandwidth

The arithmetic is that of `fp8_products._rounded_by_parts` on a processor, bit for bit: divisions
are rounded to the nearest, and a row in which there is no number becomes none. The cast to FP8
exists from compute capability 8.9 on, as the products do.
"""

from __future__ import annotations

import functools

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ft_service.kernel_limits import next_power
from workers.quant.gpu_kernels import KernelLauncher

_BLOCK = 16384
"""Most elements of a row that a program has at a time: it reads wider rows twice."""
_A_THREAD = 16
"""Elements of a row that a thread has at a time, at most.

On an H200 8,192 rows of 4,096 are rounded in 0.043 ms, with 32 in 0.059; of 14,336 in 0.094 either
way, and times factors in 0.114 and 0.123.
"""
_TILE = 64
"""Rows and columns of a tile that a program turns."""
_FINITE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float8_e4m3fn).max
"""The smallest scale, and the largest code."""
_CASTS_AT_ONCE = (9, 0)
"""The lowest compute capability for which Triton casts fp32 to FP8 in one step."""


@triton.jit
def _representable(value):
    """The nearest number that FP8 has, of two the even one, so that any cast is exact."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & ~0xFFFFF  # three bits of mantissa
    # Below 2^-6 the numbers are multiples of 2^-9, which are the steps of fp32 at this sum.
    small = ((magnitude.to(tl.float32, bitcast=True) + 24576.0) - 24576.0).to(
        tl.int32, bitcast=True
    )
    rounded = tl.where(magnitude < 0x3C800000, small, normal)
    found = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(value == value, found, value)


@triton.jit(do_not_specialize=["rows"])
def _quantised(
    x,
    factors,
    codes,
    scales,
    rows,
    width,
    stride,
    tiny,
    largest_code,
    scaled: tl.constexpr,
    twice: tl.constexpr,
    steps: tl.constexpr,
    block: tl.constexpr,
):  # Triton takes other annotations for types of its own
    row = tl.program_id(0).to(tl.int64)
    if row >= rows:
        tl.store(scales + row, 0.0)
        return
    x += row * stride
    codes += row * width
    column = tl.arange(0, block)
    # Magnitudes are compared as whole numbers, which they are in order of: NaN is above all of
    # them, and stays.
    value = _scaled(x, factors, column, width, scaled)
    highest = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for step in tl.static_range(1, steps):
        value = _scaled(x, factors, step * block + column, width, scaled)
        highest = tl.maximum(highest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(highest, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, largest_code).to(tl.bfloat16).to(tl.float32)
    scale = tl.where(scale < tiny, tiny, scale)
    tl.store(scales + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for step in tl.static_range(steps):
        at = step * block + column
        if steps > 1:  # read again, out of the cache; a row that is one block is still there
            value = _scaled(x, factors, at, width, scaled)
        made = value * inverse
        tl.store(
            codes + at, (_representable(made) if twice else made).to(tl.float8e4nv), mask=at < width
        )


@triton.jit
def _scaled(x, factors, at, width, scaled: tl.constexpr):
    """Numbers of a row, fp32, each times its column's factor and rounded to bf16, if `scaled`."""
    value = tl.load(x + at, mask=at < width, other=0, eviction_policy="evict_first").to(tl.float32)
    if scaled:  # by all rows the same, which are to stay in the cache
        factor = tl.load(factors + at, mask=at < width, other=0, eviction_policy="evict_last")
        value = (value * factor).to(tl.bfloat16).to(tl.float32)
    return value


@triton.jit
def _turned(codes, turned, rows, cols, tile: tl.constexpr):
    row = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    there = (row < rows)[:, None] & (column < cols)[None, :]
    part = tl.load(codes + row.to(tl.int64)[:, None] * cols + column[None, :], mask=there, other=0)
    tl.store(
        turned + column.to(tl.int64)[:, None] * rows + row[None, :],
        tl.trans(part),
        mask=tl.trans(there),
    )


_quantise = KernelLauncher(_quantised)
_turn = KernelLauncher(_turned)


@functools.cache
def casts_twice(device: torch.device) -> bool:
    """Whether a GPU casts to FP8 by way of fp16, and so would round twice."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < _CASTS_AT_ONCE


def quantise_rows(x: Tensor, factors: Tensor | None, codes: Tensor, scales: Tensor) -> None:
    """Put bf16 [rows, cols] into `codes`, float8_e4m3fn of rows or more, whose others are left, and
    the rows' scales into `scales`, fp32 of rows or more, with zeros behind them.

    `factors`: fp32, one a column, by which x is multiplied before; rounded to bf16.
    """
    rows, cols = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.numel():
        block = min(_BLOCK, next_power(cols))
        tensors = x, x if factors is None else factors.contiguous(), codes, scales
        constants = factors is not None, casts_twice(x.device), -(-cols // block), block
        warps = max(4, block // (32 * _A_THREAD))
        _quantise(
            (scales.shape[0], 1, 1),
            tensors,
            (rows, cols, x.stride(0), *_FINITE),
            *constants,
            num_warps=warps,
        )


def transposed(codes: Tensor) -> Tensor:
    """[rows, cols] of one byte an element → [cols, rows], contiguous."""
    rows, cols = codes.shape
    turned = torch.empty(cols, rows, dtype=codes.dtype, device=codes.device)
    if codes.numel():
        tensors = codes.contiguous().view(torch.uint8), turned.view(torch.uint8)
        _turn((-(-cols // _TILE), -(-rows // _TILE), 1), tensors, (rows, cols), _TILE)
    return turned
