"""NF4 numerics: how good, how small, and that rows are independent, which sharding rests on."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from workers.quant import nf4


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(256, 1024, generator=generator)
    heavy = normal / torch.rand(256, 1024, generator=generator).clamp(min=1e-3).sqrt()
    spread = normal * torch.logspace(-3, 1, 256).unsqueeze(1)
    return {"normal": normal, "heavy-tailed": heavy, "rows of very different size": spread}


@pytest.mark.parametrize("kind", weights())
def test_error_is_that_of_bitsandbytes_nested_statistics(kind: str) -> None:
    weight = weights()[kind]
    ours = nf4.dequantize(nf4.quantize(weight), weight.shape[1], torch.float32)
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    theirs = bnb.dequantize_4bit(codes, state)
    assert (ours - weight).norm() <= 1.01 * (theirs - weight).norm()


def test_bits_a_parameter() -> None:
    parts = nf4.quantize(torch.randn(8, 4096))
    assert sum(part.nbytes for part in parts) * 8 / (8 * 4096) <= 4.16


@pytest.mark.parametrize("cols", [64, 100, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_rows_is_taking_rows_of_the_quantised(cols: int, dtype: torch.dtype) -> None:
    weight = torch.randn(13, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = nf4.quantize(weight)
    for start, end in [(0, 5), (5, 10), (10, 13), (4, 4)]:
        for part, rows in zip(nf4.quantize(weight[start:end]), whole, strict=True):
            assert torch.equal(part, rows[start:end])


@pytest.mark.parametrize("cols", [64, 100, 3])
def test_dequantised_has_the_shape_dtype_and_values_of_the_codebook(cols: int) -> None:
    weight = torch.randn(6, cols, generator=torch.Generator().manual_seed(2))
    parts = nf4.quantize(weight)
    low = nf4.dequantize(parts, cols, torch.bfloat16)
    high = nf4.dequantize(parts, cols, torch.float32)
    assert low.shape == high.shape == weight.shape
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), high, rtol=1 / 128)
    row_max = high.abs().amax(dim=1)
    assert torch.allclose(row_max, weight.abs().amax(dim=1)), (
        "the largest magnitude of a row is kept exactly"
    )


def test_a_zero_row_stays_zero() -> None:
    weight = torch.zeros(2, 128)
    weight[1, 5] = 3.0
    assert torch.equal(nf4.dequantize(nf4.quantize(weight), 128, torch.float32), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_maxima_are_squares_of_shares_of_the_row_s_bit_for_bit(dtype: torch.dtype) -> None:
    scales = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    codes = torch.full((4, 64 * 32), 0xF7, dtype=torch.uint8)  # of the codebook 1 and 0, in turns
    row_max = torch.tensor([[1e-30], [0.3], [7.0], [3e38]])
    expected = ((scales.float() / 255) ** 2 * row_max).to(dtype)
    found = nf4.dequantize(nf4.NF4Parts(codes, scales, row_max), 64 * 64, dtype)
    assert torch.equal(found[:, ::64], expected)
    assert not found[:, 1::2].any()
