"""FP8 numerics: the rounding error that e4m3 allows, and that rows are independent."""

from __future__ import annotations

import pytest
import torch

from workers.quant import fp8


def test_error_is_at_most_half_a_step_of_e4m3() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    back = fp8.dequantize(fp8.quantize(weight), 256, torch.float32)
    step = weight.abs() / 16 + weight.abs().amax(dim=1, keepdim=True) / 448 * 2**-10  # 3 bits of mantissa, then subnormals
    assert ((back - weight).abs() <= step).all()
    assert torch.allclose(back.abs().amax(dim=1), weight.abs().amax(dim=1)), "the largest magnitude of a row is kept"


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


def test_zero_and_tiny_rows_stay_finite() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5] = 3.0
    weight[2] = 1e-38
    back = fp8.dequantize(fp8.quantize(weight), 64, torch.float32)
    assert torch.isfinite(back).all()
    assert torch.equal(back[:2], weight[:2])
