"""Dequantising codes of four or eight bits as one kernel for CUDA in Triton; import it only there,
as `mask_kernel`.

PyTorch's operations look codes up, write what they stand for, and read it again to multiply it by
its scale.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ft_service.kernel_limits import next_power
from workers.quant.gpu_kernels import KernelLauncher

_BYTES = 1024
"""Bytes of codes that a program has."""


@triton.jit(do_not_specialize=["rows"])
def _decoded(
    codes,
    scales,
    values,
    weight,
    rows,
    width,
    blocks,
    cols,
    in_block,
    paired: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)[:, None]
    at = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    there = (row < rows) & (at < width)
    code = tl.load(codes + row * width + at, mask=there, other=0).to(tl.int32)
    scale = tl.load(scales + row * blocks + at // in_block, mask=there, other=0)
    if paired:
        first = (tl.load(values + (code & 15)) * scale).to(weight.dtype.element_ty)
        second = (tl.load(values + (code >> 4)) * scale).to(weight.dtype.element_ty)
        found = tl.interleave(first, second)
        column = tl.program_id(1) * (2 * block) + tl.arange(0, 2 * block)[None, :]
    else:
        found = (tl.load(values + code) * scale).to(weight.dtype.element_ty)
        column = at
    tl.store(weight + row * cols + column, found, mask=(row < rows) & (column < cols))


_decode = KernelLauncher(_decoded)


def decoded(
    codes: Tensor, scales: Tensor, values: Tensor, in_block: int, cols: int, dtype: torch.dtype
) -> Tensor:
    """The weight [rows, cols]: what codes stand for times their scale in fp32, rounded once.

    `codes` u8 [rows, width]: one a byte, or two, the earlier column in the low half; `scales` fp32
    [rows, blocks], one for `in_block` bytes; `values` fp32: what the 16 or 256 codes stand for.
    """
    rows, width = codes.shape
    weight = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if rows:
        block = min(_BYTES, next_power(width))
        height = _BYTES // block
        sizes = rows, width, scales.shape[1], cols, in_block
        tensors = codes.contiguous(), scales.contiguous(), values, weight
        grid = -(-rows // height), -(-width // block), 1
        _decode(grid, tensors, sizes, len(values) == 16, height, block)
    return weight
