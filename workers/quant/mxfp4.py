"""MXFP4: codes E2M1 with a power of two for every 32 columns of a row (OCP Microscaling Formats
1.0).

A weight [rows, cols] becomes two tensors whose dim 0 is the weight's dim 0, so that any split by
rows is a valid split:

    codes    uint8   [rows, cols' / 2]    see `workers.quant.e2m1`
    scales   uint8   [rows, cols' / 32]   E8M0: the exponent of two, plus 127; 255 is no number

with cols' = cols rounded up to a multiple of the block (32); the padding columns hold zeros. That
is 0.5 + 1/32 bytes a parameter. These are the bytes of a published base; every value is a number of
bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_service.spec import FORMATS
from workers.quant import e2m1

BLOCK = FORMATS["mxfp4"].block
"""Columns that share one scale."""
BIAS = 127
NO_NUMBER = 255


class MXFP4Parts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    scales: Tensor


def empty_parts(rows: int, cols: int, device: torch.device | str) -> MXFP4Parts:
    """Uninitialised storage for a [rows, cols] weight."""
    blocks = -(-cols // BLOCK)
    return MXFP4Parts(
        torch.empty(rows, blocks * BLOCK // 2, dtype=torch.uint8, device=device),
        torch.empty(rows, blocks, dtype=torch.uint8, device=device),
    )


def quantize(weight: Tensor) -> MXFP4Parts:
    """Quantise [rows, cols] of any float dtype.

    A row's parts depend on that row alone; a zero row stays zero.

    Of the two powers of two between which a block's largest magnitude / 6 lies, the one with the
    least squared error is taken: the smaller one, as the specification has it, cuts what is larger
    than six times it.
    """
    rows, cols = weight.shape
    blocks = -(-cols // BLOCK)
    grouped = pad(weight.detach().float(), (0, blocks * BLOCK - cols)).view(rows, blocks, BLOCK)
    # Of the largest magnitude, less 2 as 6 = 1.5 · 2².
    exponent = torch.frexp(grouped.abs().amax(2))[1] - 3
    candidates = [_encoded(grouped, exponent + more) for more in (0, 1)]
    (low, low_scales, low_error), (high, high_scales, high_error) = candidates
    better = high_error < low_error
    codes = torch.where(better[..., None], high, low)
    return MXFP4Parts(codes.flatten(1), torch.where(better, high_scales, low_scales))


def _encoded(grouped: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, blocks, 16] and scales [rows, blocks] of values [rows, blocks, 32], and the
    squared error of each block.
    """
    scales = (exponent + BIAS).clamp(0, NO_NUMBER - 1).to(torch.uint8)
    codes = e2m1.encode((grouped / powers(scales)[..., None]).flatten(1))
    error = (
        e2m1.decode(codes, powers(scales), BLOCK, grouped.shape[1] * BLOCK, torch.float32).view_as(
            grouped
        )
        - grouped
    )
    return codes.unflatten(1, (-1, BLOCK // 2)), scales, error.square().sum(2)


def dequantize(parts: MXFP4Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`."""
    return e2m1.decode(parts.codes, powers(parts.scales), BLOCK, cols, dtype)


def powers(scales: Tensor) -> Tensor:
    """The powers of two, fp32."""
    return scales.view(torch.float8_e8m0fnu).float()
