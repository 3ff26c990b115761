"""FP8 with one scale a row: plain functions on plain tensors, no subclass, no distribution.

A weight [rows, cols] becomes two tensors whose dim 0 is the weight's dim 0, so that any split by rows is a valid split:

    codes    float8_e4m3fn  [rows, cols]   weight / scale
    scale    float32        [rows, 1]      largest magnitude of the row / 448, the largest e4m3 number

That is 1 + 4/cols bytes a parameter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""


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
    """Quantise [rows, cols] of any float dtype. A row's parts depend on that row alone; a zero row stays zero."""
    weight = weight.detach()
    if weight.shape[0] == 0:
        return empty_parts(0, weight.shape[1], weight.device)
    largest = torch.linalg.vector_norm(weight, ord=math.inf, dim=1, keepdim=True).float()  # one pass, in the weight's dtype
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return FP8Parts((weight / scale).to(torch.float8_e4m3fn), scale)


def dequantize(parts: FP8Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`."""
    return (parts.codes.float() * parts.scale).to(dtype)
