"""Dynamic 8-bit codes (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021), with
a scale for every 128 columns of a row.

A matrix [rows, cols] becomes two tensors whose dim 0 is the matrix's dim 0, so that any split by
rows is a valid split:

    codes    uint8     [rows, cols]
    scales   float32   [rows, blocks]    the largest magnitude of each block

The 256 values are those of bitsandbytes' `create_dynamic_map`, signed or not: between 1e-7 and 1, a
decade at a time, with more values to a decade the larger they are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_service.kernel_limits import MOMENT_BLOCK

_DECADES = 7


def blocks_of(cols: int) -> int:
    """Scales of a row of so many columns."""
    return -(-cols // MOMENT_BLOCK)


@cache
def table(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes, ascending: fp32 [256]."""
    values = [0.0, 1.0]
    for i in range(_DECADES):
        borders = torch.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1)
        middle = (borders[:-1] + borders[1:]) / 2
        decade = (10 ** (i - _DECADES + 1) * middle).tolist()
        values += [*decade, *(-value for value in decade)] if signed else decade
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    """Halfway between neighbours: fp32 [255]."""
    values = table(signed, device)
    return (values[:-1] + values[1:]) / 2


def zero_code(signed: bool) -> int:
    """The code of 0."""
    return int((table(signed, torch.device("cpu")) == 0).nonzero()[0, 0])


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 values [rows, cols]. A row's depend on that row alone."""
    rows, cols = values.shape
    blocks = blocks_of(cols)
    grouped = pad(values, (0, blocks * MOMENT_BLOCK - cols)).view(rows, blocks, MOMENT_BLOCK)
    scales = grouped.abs().amax(2)
    shares = grouped / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    codes = torch.bucketize(shares, _borders(signed, values.device), out_int32=True)
    return codes.view(rows, -1)[:, :cols].to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values [rows, cols] fp32."""
    values = table(signed, codes.device)[codes.int()]
    return values.mul_(scales.repeat_interleave(MOMENT_BLOCK, 1)[:, : codes.shape[1]])
