"""FP8 numerics: the rounding error that e4m3 allows, and that rows are independent."""

from __future__ import annotations

import pytest
import torch

from tests.support.training.allocations import Allocations
from workers.quant import fp8


def test_error_is_at_most_half_a_step_of_e4m3() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    back = fp8.dequantize(fp8.quantize(weight), 256, torch.float32)
    # 3 bits of mantissa, then subnormals.
    step = weight.abs() / 16 + weight.abs().amax(dim=1, keepdim=True) / 448 * 2**-10
    assert ((back - weight).abs() <= step).all()
    assert torch.allclose(back.abs().amax(dim=1), weight.abs().amax(dim=1)), (
        "the largest magnitude of a row is kept"
    )


def test_bytes_a_parameter() -> None:
    parts = fp8.quantize(torch.randn(8, 4096))
    assert sum(part.nbytes for part in parts) == 8 * (4096 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_rows_is_taking_rows_of_the_quantised(dtype: torch.dtype) -> None:
    weight = torch.randn(13, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = fp8.quantize(weight)
    for start, end in [(0, 5), (5, 10), (10, 13), (4, 4)]:
        part = fp8.quantize(weight[start:end])
        assert torch.equal(part.codes.view(torch.uint8), whole.codes[start:end].view(torch.uint8))
        assert torch.equal(part.scale, whole.scale[start:end])


def of_every_kind(dtype: torch.dtype) -> torch.Tensor:
    """Rows of every magnitude, with a heavy tail, in more chunks than one."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(700, 192, generator=generator).pow(3) * torch.logspace(-8, 4, 700)[:, None]
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_torchaos(dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    common = pytest.importorskip("torchao.quantization.quantize_.common")
    weight = of_every_kind(dtype)
    theirs = quantization.Float8Tensor.from_hp(
        weight,
        torch.float8_e4m3fn,
        quantization.PerRow(),
        kernel_preference=common.KernelPreference.TORCH,
    )
    ours = fp8.quantize(weight)
    assert torch.equal(ours.scale, theirs.scale)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(fp8.dequantize(ours, 192, dtype), theirs.dequantize())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantising_rounds_the_exact_product_once(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    codes, scale = fp8.quantize(of_every_kind(stored))
    exact = (codes.double() * scale.double()).float()
    assert torch.equal(fp8.dequantize(fp8.FP8Parts(codes, scale), 192, dtype), exact.to(dtype))


def test_no_fp32_copy_is_made_in_either_direction() -> None:
    weight = of_every_kind(torch.bfloat16)
    with Allocations() as seen:
        fp8.dequantize(fp8.quantize(weight), 192, torch.bfloat16)
    assert seen.made == {torch.float8_e4m3fn, torch.bfloat16}


def test_zero_and_tiny_rows_stay_finite() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5] = 3.0
    weight[2] = 1e-38
    back = fp8.dequantize(fp8.quantize(weight), 64, torch.float32)
    assert torch.isfinite(back).all()
    assert torch.equal(back[:2], weight[:2])


def test_fp16_has_the_scales_of_its_values_in_fp32() -> None:
    """Its exponents are too few for the scales of small rows."""
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) * 1e-4).half()
    weight[3] *= 2.0**-9
    ours, wide = fp8.quantize(weight), fp8.quantize(weight.float())
    assert torch.equal(ours.scale, wide.scale)
    assert torch.equal(ours.codes.view(torch.uint8), wide.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_without_rows_has_parts_without_rows(dtype: torch.dtype) -> None:
    codes, scale = fp8.quantize(torch.empty(0, 64, dtype=dtype))
    assert (codes.shape, scale.shape) == ((0, 64), (0, 1))
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert fp8.dequantize(fp8.FP8Parts(codes, scale), 64, dtype).shape == (0, 64)
