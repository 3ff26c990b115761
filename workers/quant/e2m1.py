"""Codes E2M1: four bits, a sign, two of an exponent and one of a mantissa (OCP Microscaling Formats
1.0), two in a byte.

The earlier column is in the low half, as NVFP4 and MXFP4 are published.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from workers.quant import decoding
from workers.quant.fp8 import in_cache

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; bit 3 is the sign."""
LARGEST = MAGNITUDES[-1]
_LAST_BELOW = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between the magnitudes; each itself belongs to the even code."""
_AS_INTEGER = {2: torch.int32, 4: torch.int64}
"""Bytes of a value → an integer of the size of two, which a table of pairs is read as."""
_CHUNK_CODES = {"cpu": 2**19, "cuda": 2**23}
"""Bytes decoded at a time: their indices take four times as many."""


def encode(values: Tensor) -> Tensor:
    """The nearest codes of fp32 values [rows, even cols] → u8 [rows, cols / 2]; ties to even, and 6
    for what is larger.
    """
    edges = torch.tensor(_LAST_BELOW, device=values.device)
    even_above = torch.arange(len(_LAST_BELOW), device=values.device) % 2 == 1
    edges = torch.where(even_above, torch.nextafter(edges, torch.zeros_like(edges)), edges)
    codes = torch.bucketize(values.abs(), edges).to(torch.uint8) | (
        torch.signbit(values).to(torch.uint8) << 3
    )
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def nearest_(values: Tensor) -> Tensor:
    """What the codes of fp32 values up to 6 stand for, in place: as `decode` of `encode`, by
    arithmetic alone.
    """
    magnitudes = values.abs()
    step = 0.5 + 0.5 * (magnitudes >= 2) + (magnitudes >= 4)
    return values.div_(step).round_().mul_(step)


def decode(codes: Tensor, scales: Tensor, block: int, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype` of codes u8 [rows, cols' / 2] and scales fp32 [rows, cols'
    / block]: their product in fp32, rounded once.
    """
    rows = codes.shape[0]
    width = codes.shape[1] * 2
    weight = decoding.decoded(codes, scales, _values(codes.device), block // 2, cols, dtype)
    if weight is not None:
        return weight
    if dtype.itemsize not in _AS_INTEGER:
        return decode(codes, scales, block, cols, torch.float32).to(dtype)
    pairs = _pairs(dtype, codes.device).view(_AS_INTEGER[dtype.itemsize]).view(-1)
    weight = torch.empty(rows, width, dtype=dtype, device=codes.device)
    height = max(1, _CHUNK_CODES[codes.device.type] // max(1, codes.shape[1]))
    for part, some in zip(weight.split(height), codes.split(height), strict=True):
        decoded = pairs.index_select(0, some.reshape(-1).int())  # reads two values at once
        part.copy_(decoded.view(dtype).view(part.shape))
    for part, its_scales in in_cache(weight, scales):
        part.unflatten(1, (-1, block)).mul_(its_scales[:, :, None])
    return weight if width == cols else weight[:, :cols]


@cache
def _values(device: torch.device) -> Tensor:
    """What the 16 codes stand for, fp32."""
    with torch.inference_mode(mode=False):
        return torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=device)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of every byte: [256, 2]."""
    with torch.inference_mode(mode=False):
        values = _values(device).to(dtype)
        return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
