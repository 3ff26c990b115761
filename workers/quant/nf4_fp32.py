"""NF4 with fp32 block scales: the format for bases quantised by bitsandbytes, which keeps every
value.

A weight [rows, cols] becomes two tensors whose dim 0 is the weight's dim 0:

    codes      uint8    [rows, cols' / 2]    as in `workers.quant.nf4`
    block_max  float32  [rows, cols' / 64]   largest magnitude of each block

with cols' = cols rounded up to a multiple of the block (64). That is 0.5 + 4/64 bytes a parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.quant.nf4 import BLOCK, dequantize_blocks, padded_columns, quantize_blocks


class NF4FP32Parts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    block_max: Tensor


def empty_parts(rows: int, cols: int, device: torch.device | str) -> NF4FP32Parts:
    """Uninitialised storage for a [rows, cols] weight."""
    width = padded_columns(cols)
    return NF4FP32Parts(
        torch.empty(rows, width // 2, dtype=torch.uint8, device=device),
        torch.empty(rows, width // BLOCK, dtype=torch.float32, device=device),
    )


def quantize(weight: Tensor) -> NF4FP32Parts:
    """Quantise [rows, cols] of any float dtype.

    A row's parts depend on that row alone; a zero row stays zero.
    """
    if weight.shape[0] == 0:
        return empty_parts(0, weight.shape[1], weight.device)
    codes, block_max = quantize_blocks(weight)
    return NF4FP32Parts(codes, block_max.float())


def dequantize(parts: NF4FP32Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`: bit for bit what bitsandbytes makes of the same codes and
    scales.
    """
    return dequantize_blocks(parts.codes, parts.block_max, cols, dtype)
