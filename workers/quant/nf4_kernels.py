"""Dequantising NF4 as one kernel for CUDA in Triton, which reads the 8-bit scales itself; import it
only there.

bitsandbytes' kernel wants fp32 scales, which three operations have to make before. The arithmetic
is that of `workers.quant.nf4` with its kernel, bit for bit.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from workers.quant.gpu_kernels import KernelLauncher

_BYTES = 1024
"""Bytes of codes that a program has."""


@triton.jit
def _dequantised(
    codes, scales, row_max, values, weight, width, blocks, cols, largest, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    there = at < width
    pair = tl.load(codes + row * width + at, mask=there, other=0).to(tl.int32)
    share = tl.div_rn(
        tl.load(scales + row * blocks + at // 32, mask=there, other=0).to(tl.float32), largest
    )
    scale = share * share * tl.load(row_max + row)
    first = (tl.load(values + (pair >> 4)) * scale).to(weight.dtype.element_ty)
    second = (tl.load(values + (pair & 15)) * scale).to(weight.dtype.element_ty)
    column = tl.program_id(1) * (2 * block) + tl.arange(0, 2 * block)
    tl.store(weight + row * cols + column, tl.interleave(first, second), mask=column < cols)


_dequantise = KernelLauncher(_dequantised)


def dequantised(
    codes: Tensor, scales: Tensor, row_max: Tensor, values: Tensor, cols: int, dtype: torch.dtype
) -> Tensor:
    """The weight [rows, cols].

    `codes` u8 [rows, width], `scales` u8 [rows, width / 32], `row_max` fp32 [rows, 1]; `values`:
    what the 16 codes stand for, fp32.
    """
    rows, width = codes.shape
    weight = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if rows:
        tensors = codes.contiguous(), scales.contiguous(), row_max.contiguous(), values, weight
        _dequantise(
            (rows, -(-width // _BYTES), 1), tensors, (width, scales.shape[1], cols, 255.0), _BYTES
        )
    return weight
