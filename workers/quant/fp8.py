"""FP8 with one scale a row: plain functions on plain tensors, no subclass, no distribution.

A weight [rows, cols] becomes two tensors whose dim 0 is the weight's dim 0, so that any split by
rows is a valid split:

    codes    float8_e4m3fn  [rows, cols]   weight / scale
    scale    float32        [rows, 1]      largest magnitude of the row / 448, the largest e4m3
    number, in the weight's dtype

That is 1 + 4/cols bytes a parameter. The arithmetic is torchao's, bit for bit, without torchao,
which no worker depends on: its import takes two seconds and begins CUDA
(`workers/patches/absent_torchao.py`), and what is used of it are the three lines of `quantize`. A
test compares the two where it is installed; a base that torchao has quantised is read as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workers.quant import decoding
from workers.quant.division import divided

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""

_CHUNK_ELEMENTS = 2**16


class FP8Parts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    scale: Tensor


def empty_parts(rows: int, cols: int, device: torch.device | str) -> FP8Parts:
    """Uninitialised storage for a [rows, cols] weight."""
    return FP8Parts(
        torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, 1, dtype=torch.float32, device=device),
    )


def quantize(weight: Tensor) -> FP8Parts:
    """Quantise [rows, cols] of any float dtype.

    A row's parts depend on that row alone; a zero row stays zero.

    Bit for bit what torchao's own arithmetic (`Float8Tensor.from_hp` by rows) makes of fp32 and
    bf16: the scale is rounded to the weight's dtype. In bf16 that is 0.2 % of the scale at most, so
    that the largest magnitude still rounds to 448.
    """
    weight = weight.detach()
    rows, cols = weight.shape
    if rows == 0:
        return empty_parts(0, cols, weight.device)
    if weight.dtype == torch.float16:
        weight = weight.float()  # its exponents are too few for the scales
    scale = scales_of(weight)
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=weight.device)
    for part, some, its_scale in in_cache(codes, weight, scale):
        torch.div(some, its_scale, out=part)  # in fp32, rounded once: no fp32 copy is made
    return FP8Parts(codes, scale)


def scales_of(rows: Tensor) -> Tensor:
    """The scale of each row of [rows, cols], fp32 [rows, 1]."""
    # One pass, in the rows' dtype.
    largest = torch.linalg.vector_norm(rows, ord=math.inf, dim=1, keepdim=True)
    return divided(largest, LARGEST).float().clamp_(min=torch.finfo(torch.float32).tiny)


def dequantize(parts: FP8Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`: the product with the scale in fp32, rounded once.

    Every code is exact in any of these dtypes, so that no fp32 copy is needed.
    """
    values = decoding.e4m3_values(parts.codes.device)
    made = decoding.decoded(*parts, values, max(1, cols), cols, dtype)
    if made is not None:
        return made
    weight = parts.codes.to(dtype)
    for part, scale in in_cache(weight, parts.scale):
        part.mul_(scale)
    return weight


def in_cache(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, [rows, ..], by equal numbers of rows: processors make fp32 copies of both
    factors, GPUs do not.
    """
    rows, cols = tensors[0].shape
    height = rows if tensors[0].is_cuda else max(1, _CHUNK_ELEMENTS // max(1, cols))
    return zip(*(tensor.split(max(1, height)) for tensor in tensors), strict=True)
