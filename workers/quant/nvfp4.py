"""NVFP4: codes E2M1 with an e4m3 scale for every 16 columns of a row, and a scale of the whole that
every row has a copy of.

A weight [rows, cols] becomes three tensors whose dim 0 is the weight's dim 0, so that any split by
rows is a valid split:

    codes    uint8          [rows, cols' / 2]    see `workers.quant.e2m1`
    scales   float8_e4m3fn  [rows, cols' / 16]
    whole    float32        [rows, 2]            a factor and a divisor of the row's scales, one of
    which is 1

with cols' = cols rounded up to a multiple of the block (16); the padding columns hold zeros. That
is 0.5 + 1/16 + 8/cols bytes a parameter. These are the bytes of a published base: its scale of the
whole multiplies in modelopt's and torchao's files and divides in those of compressed-tensors. Only
with both places are all values those of their own libraries, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_service.spec import FORMATS
from workers.quant import e2m1
from workers.quant.division import divided
from workers.quant.fp8 import LARGEST

BLOCK = FORMATS["nvfp4"].block
"""Columns that share one scale."""

_LEAST = 2.0**-149
"""The smallest positive fp32 number."""


class NVFP4Parts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    scales: Tensor
    whole: Tensor


def empty_parts(rows: int, cols: int, device: torch.device | str) -> NVFP4Parts:
    """Uninitialised storage for a [rows, cols] weight."""
    blocks = -(-cols // BLOCK)
    return NVFP4Parts(
        torch.empty(rows, blocks * BLOCK // 2, dtype=torch.uint8, device=device),
        torch.empty(rows, blocks, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, 2, dtype=torch.float32, device=device),
    )


def quantize(weight: Tensor) -> NVFP4Parts:
    """Quantise [rows, cols] of any float dtype, with a factor for each row by which the scale of
    its largest block is 448.

    A row's parts depend on that row alone; a zero row stays zero.
    """
    rows, cols = weight.shape
    blocks = -(-cols // BLOCK)
    grouped = pad(weight.detach().float(), (0, blocks * BLOCK - cols)).view(rows, blocks, BLOCK)
    largest = grouped.abs().amax(2)
    factor = divided(largest.amax(1, keepdim=True), LARGEST * e2m1.LARGEST).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    scales = (divided(largest, e2m1.LARGEST) / factor).to(torch.float8_e4m3fn)
    each = (scales.float() * factor).clamp(min=torch.finfo(torch.float32).tiny)
    codes = e2m1.encode((grouped / each[..., None]).flatten(1))
    return NVFP4Parts(codes, scales, torch.cat([factor, torch.ones_like(factor)], dim=1))


def dequantize(parts: NVFP4Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`."""
    # rows of padding are zero, and stay so
    factor = parts.whole[:, :1]
    divisor = parts.whole[:, 1:].clamp(min=_LEAST)
    return e2m1.decode(
        parts.codes, parts.scales.float().mul_(factor).div_(divisor), BLOCK, cols, dtype
    )
