"""FP8 with a scale for every 128 columns of a row: the format for bases published in FP8 by blocks,
which keeps every value.

A weight [rows, cols] becomes two tensors whose dim 0 is the weight's dim 0, so that any split by
rows is a valid split:

    codes   float8_e4m3fn  [rows, cols]               weight / scale
    scales  float32        [rows, ceil(cols / 128)]   those of the row's blocks of columns

That is 1 + 4/128 bytes a parameter. Bases are published with one scale for 128 rows as well
(DeepSeek, Qwen, GLM, MiniMax); here each row has its own copy of it, 3 % of the bytes, since ranks
split rows wherever they fall, inside a block too, and gather what they hold. Scales are published
in bf16 or fp32: fp32 holds both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_service.spec import FORMATS
from workers.quant import decoding, fp8

BLOCK = FORMATS["fp8_blocks"].block
"""Columns that share one scale; the last ones of a row may be fewer."""


class FP8BlocksParts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    scales: Tensor


def blocks_of(cols: int) -> int:
    """Scales of a row of `cols` columns."""
    return -(-cols // BLOCK)


def empty_parts(rows: int, cols: int, device: torch.device | str) -> FP8BlocksParts:
    """Uninitialised storage for a [rows, cols] weight."""
    return FP8BlocksParts(
        torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, blocks_of(cols), dtype=torch.float32, device=device),
    )


def quantize(weight: Tensor) -> FP8BlocksParts:
    """Quantise [rows, cols] of any float dtype, each 128 columns of a row as `workers.quant.fp8`
    does a row.

    A row's parts depend on that row alone, unlike those of a published block; a zero row stays
    zero.
    """
    rows, cols = weight.shape
    blocks = blocks_of(cols)
    padded = pad(weight.detach(), (0, blocks * BLOCK - cols)).reshape(rows * blocks, BLOCK)
    codes, scale = fp8.quantize(padded)
    return FP8BlocksParts(
        codes.view(rows, blocks * BLOCK)[:, :cols].contiguous(), scale.view(rows, blocks)
    )


def dequantize(parts: FP8BlocksParts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`: the product with the scales in fp32, rounded once."""
    values = decoding.e4m3_values(parts.codes.device)
    made = decoding.decoded(*parts, values, BLOCK, cols, dtype)
    if made is not None:
        return made
    weight = parts.codes.to(dtype)  # exact: every code is a number of any of these dtypes
    whole = cols - cols % BLOCK
    for part, scales in fp8.in_cache(weight, parts.scales):
        if whole:
            part[:, :whole].unflatten(1, (-1, BLOCK)).mul_(scales[:, : whole // BLOCK, None])
        if whole < cols:
            part[:, whole:].mul_(scales[:, -1:])
    return weight
