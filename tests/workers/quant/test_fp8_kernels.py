"""The kernels of products in FP8 without a GPU, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.triton_programs import run_with_triton
from workers.quant import fp8_products
from workers.quant.weights import FP8Weight

COMPUTES = """
import sys
import torch
from tests.support.triton_programs import correct_casts
from workers.quant import fp8_kernels, fp8_products

twice = bool(int(sys.argv[1]))
correct_casts(by_way_of_fp16=twice)
own, capability_of = fp8_kernels.casts_twice.__wrapped__, torch.cuda.get_device_capability
for capability, expected in ((8, 0), True), ((8, 9), True), ((9, 0), False):
    torch.cuda.get_device_capability = lambda device: capability
    assert own(torch.device("cuda")) is expected, capability
torch.cuda.get_device_capability = capability_of
assert own(torch.device("cpu")) is False
fp8_kernels.casts_twice = lambda device: twice
fp8_products._compare(fp8_kernels, torch.device("cpu"))
generator = torch.Generator().manual_seed(0)

def same(x, factors):
    expected = fp8_products._rounded_by_parts(x, factors)
    found = fp8_products._rounded_by_kernel(fp8_kernels, x, factors)
    assert torch.equal(found.scale.view(torch.int32), expected.scale.view(torch.int32)), (x.shape, factors is None)
    assert not found.scale[len(x):].any() and found.codes.shape == expected.codes.shape, (x.shape, factors is None)
    found, expected = (parts.codes[: len(x)].view(torch.uint8) for parts in (found, expected))
    assert torch.equal(found, expected), (x.shape, factors is None)

for rows, cols in ((1, 16), (3, 100), (5, 4096), (4, 5000), (1, 20000), (0, 16)):
    spread = torch.logspace(-30, 30, max(1, rows))[:rows, None]
    x = (torch.randn(rows, cols, generator=generator).pow(3) * spread).bfloat16()
    same(x, None)
    same(x, torch.rand(cols, 1, generator=generator) + 0.01)
    same(x.t().contiguous().t(), None)
    same(torch.cat((x, x), 1)[:, :cols], None)
# Every bf16 number, in rows of one exponent, and what is at the ends: zero rows, the smallest numbers, infinity and none.
numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(512, 128)
same(numbers[numbers.isfinite().all(dim=1)], None)
same(torch.zeros(2, 64, dtype=torch.bfloat16), torch.full((64, 1), -1.0))
ends = torch.ones(3, 64, dtype=torch.bfloat16)
ends[0, 3], ends[1, 5], ends[2, 7] = float("inf"), float("nan"), float("-inf")
found, expected = fp8_products._rounded_by_kernel(fp8_kernels, ends, None), fp8_products._rounded_by_parts(ends, None)
for ours, theirs in zip(found, expected, strict=True):
    ours, theirs = ours[:3].float(), theirs[:3].float()
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())

codes = torch.randint(0, 256, (200, 130), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
for rows, cols in ((200, 130), (64, 64), (1, 130), (65, 1), (0, 16)):
    turned = fp8_kernels.transposed(codes[:rows, :cols])
    assert turned.is_contiguous() and torch.equal(turned.view(torch.uint8), codes[:rows, :cols].view(torch.uint8).t())
"""


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernels_of_fp8_round_as_the_processor_does(tmp_path: Path, twice: bool) -> None:
    """Also where a GPU casts by way of fp16, which would round some numbers twice."""
    run_with_triton(COMPUTES, tmp_path, str(int(twice)), TRITON_INTERPRET="1")


def kernels_of_the_processor(called: list[str]) -> Any:
    """In place of the kernels' module, with PyTorch's operations."""

    def quantise_rows(x: Tensor, factors: Tensor | None, codes: Tensor, scales: Tensor) -> None:
        called.append("rounded" if factors is None else "scaled and rounded")
        own = fp8_products._rounded_by_parts(x, factors)
        codes[: len(x)].copy_(own.codes[: len(x)])
        scales.zero_()[: len(x)].copy_(own.scale[: len(x)])

    def transposed(codes: Tensor) -> Tensor:
        called.append("turned")
        return codes.t().contiguous()

    return SimpleNamespace(quantise_rows=quantise_rows, transposed=transposed)


def test_products_are_the_same_with_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = FP8Weight.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    codes, scale = weight.parts
    x = torch.randn(5, 64).bfloat16()
    grad = torch.randn(5, 48).bfloat16()
    called: list[str] = []
    kernels: ModuleType = kernels_of_the_processor(called)
    products: list[Any] = []
    monkeypatch.setattr(
        fp8_products,
        "_product",
        lambda x, codes, scale, *_, **__: products.append((*x, codes, scale)),
    )
    numerics = FP8Weight.IN_FP8
    for device in ("cpu", "cuda"):
        if device == "cuda":
            monkeypatch.setattr(
                fp8_products,
                "_rounded",
                lambda x, f=None: fp8_products._rounded_by_kernel(kernels, x, f),
            )
            monkeypatch.setattr(fp8_products, "_transposed", kernels.transposed)
        numerics.linear(x.clone(), [codes, scale], 64)
        numerics.linear_grad(grad, [codes, scale], 64)
    assert called == ["rounded", "scaled and rounded", "turned"]
    for without, with_kernels in zip(products[:2], products[2:], strict=True):
        for number, (ours, theirs) in enumerate(zip(without, with_kernels, strict=True)):
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
            filled = number < 2  # codes and scales of five rows in eight
            ours, theirs = (one.float()[:5] if filled else one.float() for one in (ours, theirs))
            assert torch.equal(ours, theirs)


def test_kernels_that_compute_something_else_are_not_used() -> None:
    good = kernels_of_the_processor([])
    fp8_products._compare(good, torch.device("cpu"))
    wrong: Any = SimpleNamespace(
        quantise_rows=good.quantise_rows, transposed=lambda codes: codes.view(-1, codes.shape[0])
    )
    with pytest.raises(AssertionError, match="turns codes otherwise"):
        fp8_products._compare(wrong, torch.device("cpu"))
    wrong = SimpleNamespace(
        quantise_rows=lambda x, _, *made: good.quantise_rows(x, None, *made),
        transposed=good.transposed,
    )
    with pytest.raises(AssertionError, match="other scales"):
        fp8_products._compare(wrong, torch.device("cpu"))
