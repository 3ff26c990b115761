"""NF4 with fp32 block scales: what bitsandbytes itself makes, and that rows are independent."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from workers.quant import nf4_fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_bitsandbytes_with_plain_statistics(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = nf4_fp32.dequantize(nf4_fp32.quantize(weight), 256, dtype)
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    assert torch.equal(ours, bnb.dequantize_4bit(codes, state))


def test_bytes_a_parameter() -> None:
    parts = nf4_fp32.quantize(torch.randn(8, 4096))
    assert sum(part.nbytes for part in parts) == 8 * 4096 * 0.5625


@pytest.mark.parametrize("cols", [64, 100, 3])
def test_quantising_rows_is_taking_rows_of_the_quantised(cols: int) -> None:
    weight = torch.randn(13, cols, generator=torch.Generator().manual_seed(1))
    whole = nf4_fp32.quantize(weight)
    assert nf4_fp32.dequantize(whole, cols, torch.float32).shape == weight.shape
    for start, end in [(0, 5), (5, 10), (10, 13), (4, 4)]:
        for part, rows in zip(nf4_fp32.quantize(weight[start:end]), whole, strict=True):
            assert torch.equal(part, rows[start:end])
