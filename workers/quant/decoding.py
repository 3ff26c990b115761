"""What codes stand for, times their scales, by one kernel on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workers.quant import gpu_kernels


def decoded(
    codes: Tensor, scales: Tensor, values: Tensor, in_block: int, cols: int, dtype: torch.dtype
) -> Tensor | None:
    """The weight [rows, cols] in `dtype`: the product of what codes stand for and their scale in
    fp32, rounded once. None: there is no kernel for it.

    `codes` [rows, width] of one byte each; `scales` fp32 [rows, blocks], one for `in_block` bytes;
    `values` fp32: what each byte stands for [256], or each half of a byte [16], of which the low
    one is the earlier column.
    """
    kernels = KERNEL.on(codes.device)
    if kernels is None:
        return None
    return kernels.decoded(codes.view(torch.uint8), scales, values, in_block, cols, dtype)


@functools.cache
def e4m3_values(device: torch.device) -> Tensor:
    """What the 256 codes of FP8 stand for, fp32."""
    with torch.inference_mode(mode=False):
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        return codes.view(torch.float8_e4m3fn).float()


def _compare(kernels: Any, device: torch.device) -> None:
    """Raise AssertionError if the kernel comes to other bits than PyTorch's operations, or is
    slower on a matrix of 4096 x 4096.
    """
    generator = torch.Generator().manual_seed(0)
    halves = torch.linspace(-6, 6, 16).to(device)
    for rows, width, in_block, paired in ((5, 50, 16, True), (33, 100, 100, False)):
        codes, scales = _drawn(rows, width, in_block, generator, device)
        values = halves if paired else e4m3_values(device)
        found = kernels.decoded(
            codes, scales, values, in_block, width * (1 + paired), torch.bfloat16
        )
        each = codes.long()
        each = torch.stack([each & 15, each >> 4], dim=2).flatten(1) if paired else each
        by_column = scales.repeat_interleave(in_block * (1 + paired), dim=1)[:, : each.shape[1]]
        expected = (values[each] * by_column).bfloat16()
        same = (found == expected) | (found.isnan() & expected.isnan())
        assert bool(same.all()), "it gives other weights"
    if device.type == "cuda":
        codes, scales = _drawn(4096, 4096, 4096, generator, device)
        given = codes, scales, e4m3_values(device), 4096, 4096, torch.bfloat16
        in_two = functools.partial(_in_two, codes.view(torch.float8_e4m3fn), scales)
        gpu_kernels.assert_faster(functools.partial(kernels.decoded, *given), in_two, device)


def _drawn(
    rows: int, width: int, in_block: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    codes = torch.randint(256, (rows, width), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, -(-width // in_block), generator=generator)
    return codes.to(device), scales.to(device)


def _in_two(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.bfloat16().mul_(scales)


KERNEL = gpu_kernels.CheckedKernel("workers.quant.code_kernels", _compare)
