"""Products in FP8: the formula they stand for, in both directions, and when they are chosen. torch
emulates them on CPUs.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import CPU
from workers.model import precision
from workers.model.build import build
from workers.quant import fp8, fp8_products
from workers.quant.fp8_products import why_not
from workers.quant.frozen_linear import Numerics
from workers.quant.weights import FP8Weight

EVERY_LAYER = 2 * 7


def emulated() -> bool:
    """Whether this torch has the product on processors; 2.11 has not."""
    try:
        FP8Weight.quantize(torch.ones(16, 16)).linear_in_fp8(torch.ones(1, 16))
    except RuntimeError:
        return False
    return True


needs_products = pytest.mark.skipif(
    not emulated(), reason="this torch does not emulate products in FP8 on processors"
)


def rounded(factor: Tensor) -> Tensor:
    return fp8.dequantize(fp8.quantize(factor), factor.shape[-1], torch.float32)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected).norm() / expected.norm())


@needs_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_directions_round_one_factor_and_nothing_else(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = FP8Weight.quantize(
        (torch.randn(48, 64, generator=generator) * torch.rand(48, 1, generator=generator)).to(
            dtype
        )
    )
    x = torch.randn(2, 5, 64, generator=generator).to(dtype).requires_grad_()
    y = weight.linear_in_fp8(x)
    y.mul_(1)  # architectures write into what a layer returns
    grad = torch.randn(2, 5, 48, generator=generator).to(dtype)
    y.backward(grad)
    dense = weight.dequantize(torch.float32)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    assert y.dtype == dtype
    assert distance(y, rounded(x.detach().reshape(10, 64)).view(2, 5, 64) @ dense.t()) < tolerance
    assert x.grad is not None
    folded = rounded((grad.float() * weight.scale.t()).to(dtype).reshape(10, 48)).view(2, 5, 48)
    assert distance(x.grad, folded @ weight.codes.float()) < tolerance
    assert 0 < distance(x.grad, grad.float() @ dense) < 0.05, "e4m3 has 3 bits of mantissa"


def layers_of_one_input() -> tuple[list[list[Tensor]], Numerics, Tensor]:
    """Three weights, their arithmetic, and an input of theirs."""
    generator = torch.Generator().manual_seed(1)
    weights = [FP8Weight.quantize(torch.randn(48, 64, generator=generator)) for _ in range(3)]
    return (
        [list(weight.parts) for weight in weights],
        FP8Weight.IN_FP8,
        torch.randn(5, 64, generator=generator),
    )


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of everything that is rounded to FP8 from now on."""
    rows: list[int] = []
    rounded = fp8_products._rounded_by_parts
    monkeypatch.setattr(
        fp8_products, "_rounded_by_parts", lambda x, f: (rows.append(x.shape[0]), rounded(x, f))[1]
    )
    return rows


@needs_products
def test_layers_with_one_input_round_it_once(quantised: list[int]) -> None:
    weights, numerics, x = layers_of_one_input()
    quantised.clear()
    shared = [numerics.linear(x, parts, 64) for parts in weights]
    assert quantised == [5]
    for y, parts in zip(shared, weights, strict=True):
        assert torch.equal(y, numerics.linear(x.clone(), parts, 64))


@needs_products
def test_an_input_that_was_changed_or_replaced_is_rounded_anew(quantised: list[int]) -> None:
    (parts, *_), numerics, x = layers_of_one_input()
    numerics.linear(x, parts, 64)
    x.mul_(2)
    changed = numerics.linear(x, parts, 64)
    assert torch.equal(changed, numerics.linear(x.clone(), parts, 64))
    numerics.linear(x, parts, 64)
    assert fp8_products._last_input.parts is not None
    kept = weakref.ref(fp8_products._last_input.parts.codes)
    assert kept() is not None
    del x
    assert kept() is None, "what was rounded goes with its input"


@needs_products
def test_compiled_code_that_uses_a_buffer_again_gets_its_new_values(quantised: list[int]) -> None:
    (parts, *_), numerics, x = layers_of_one_input()
    quantised.clear()
    operator = torch.ops.ft_service.frozen_linear
    with torch.no_grad():
        operator(x, parts, numerics.name, 64)
        # As a kernel of the compiler would: past the tensor's version.
        torch.from_numpy(x.numpy()).mul_(-1)
        y = operator(x, parts, numerics.name, 64)
    assert torch.equal(y, numerics.linear(x.clone(), parts, 64))


@needs_products
@pytest.mark.parametrize("rows", [1, 7, 16, 255, 256, 257])
def test_any_number_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = FP8Weight.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    scales = []
    fast = []
    counts = []
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]

    def watched(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        scales.append(scale_a.untyped_storage().nbytes() // 4)
        fast.append(options["use_fast_accum"])
        counts.append((a.shape[0], scale_a.shape[0]))
        return multiply(a, b, scale_a, scale_b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = weight.linear_in_fp8(x)
    y.sum().backward()
    assert distance(y, rounded(x.detach()) @ weight.dequantize(torch.float32).t()) < 1e-6
    assert [size % 256 for size in scales] == [0, 0], "what kernels read past the last row is ours"
    filled = {1: 1, 7: 8, 16: 16, 255: 256, 256: 256, 257: 512}[rows]
    assert counts == [(filled, filled)] * 2, "kernels are looked for at few numbers of rows"
    assert fast == [True, True]


@needs_products
def test_backward_keeps_the_codes_alone() -> None:
    weight = FP8Weight.quantize(torch.randn(48, 64))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        weight.linear_in_fp8(torch.randn(5, 64, requires_grad=True))
    assert {(t.dtype, t.shape) for t in kept} == {(p.dtype, p.shape) for p in weight.parts}


def test_no_rows_make_no_rows() -> None:
    weight = FP8Weight.quantize(torch.randn(48, 64))
    x = torch.empty(0, 64, requires_grad=True)
    y = weight.linear_in_fp8(x)
    y.sum().backward()
    assert y.shape == (0, 48)
    assert x.grad is not None
    assert x.grad.shape == (0, 64)


def test_a_device_is_chosen_by_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, version, expected in [
        ((8, 0), "2.13.0", "8.0, below 8.9"),
        (
            (8, 9),
            "2.11.0+cu130",
            "PyTorch 2.11.0+cu130 multiplies FP8 wrongly on GPUs of compute capability 8.9",
        ),
        ((8, 9), "2.12.0", None),
        ((8, 9), "2.13.0a0+gitabc", None),
        ((9, 0), "2.11.0+cu130", None),
        ((12, 0), "2.11.0", None),
    ]:
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        monkeypatch.setattr(torch, "__version__", version)
        reason = why_not(torch.bfloat16, gpu)
        assert reason is None if expected is None else expected in (reason or "")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert "AMD" in (why_not(torch.bfloat16, gpu) or "")
    assert "float32" in (why_not(torch.float32, gpu) or "")
    assert why_not(torch.bfloat16, CPU) == "processors do not multiply FP8"


@pytest.mark.parametrize(
    ("options", "can", "says", "in_fp8"),
    [
        (
            {"default": "fp8"},
            False,
            "14 layers stored in fp8 are dequantised to multiply: processors do not",
            0,
        ),
        ({"default": "fp8", "fp8_products": "off"}, True, "precision.fp8_products is off", 0),
        (
            {"default": "fp8"},
            True,
            "10 layers stored in fp8 multiply in FP8 (a GPU); 4 are dequantised",
            EVERY_LAYER - 4,
        ),
        ({"default": "nf4"}, True, None, 0),
    ],
)
def test_a_job_says_how_its_layers_multiply(
    options: dict[str, Any],
    can: bool,
    says: str | None,
    in_fp8: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if can:
        monkeypatch.setattr(precision, "why_not", lambda compute, device: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    base = save_tiny_llama(
        tmp_path / "base",
        head_dim=20,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=112,
    )
    built = build(spec_for(base, precision=options), CPU)
    assert (
        built.arithmetic.products is None
        if says is None
        else says in (built.arithmetic.products or "")
    )
    assert sum(getattr(m, "in_fp8", False) for m in built.peft_model.modules()) == in_fp8
