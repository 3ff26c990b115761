"""What only a GPU can show: CUDA kernels agree with the CPU's, and a whole attempt trains, stops
and resumes there.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service import kernel_limits
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Result
from tests.support.training.attempts import adapter, supervise
from tests.support.training.models import save_chat_base, save_chats, spec_for
from workers.layers import (
    cudnn_attention,
    dropout,
    expert_rows,
    fused,
    low_rank,
    packed_attention,
)
from workers.layers.scored_attention import AttentionPattern
from workers.layers.segments import Bounds
from workers.model import head
from workers.quant import decoding, fp8, fp8_products, grouped_linear, nf4
from workers.quant.fp8_products import why_not
from workers.quant.weights import FP8Weight, NF4Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_quantises_and_dequantises_as_the_cpu_does(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    here = nf4.quantize(weight)
    there = nf4.quantize(weight.cuda())
    assert torch.equal(here.scales, there.scales.cpu())
    assert torch.equal(here.row_max, there.row_max.cpu())
    differing = (here.codes != there.codes.cpu()).float().mean()
    assert differing < 1e-3, "only values between two codes may round differently"
    moved = nf4.NF4Parts(*(part.cuda() for part in here))
    assert torch.allclose(
        nf4.dequantize(moved, 1000, dtype).cpu(),
        nf4.dequantize(here, 1000, dtype),
        rtol=1e-2,
        atol=1e-6,
    )


@pytest.mark.parametrize("channels", [1, 100, 1024, 5000])
def test_dropout_s_kernel_gives_the_masks_of_the_cpu(channels: int) -> None:
    tokens = torch.randint(-(2**31), 2**31 - 1, (33,), dtype=torch.int32)
    module = torch.tensor(-77, dtype=torch.int32)
    assert dropout.KERNEL.fault(torch.device("cuda", 0)) is None
    for rate in (0.0, 0.05, 0.999):
        found = dropout.kept_mask(tokens.cuda(), module.cuda(), channels, rate)
        assert torch.equal(found.cpu(), dropout.kept_mask(tokens, module, channels, rate))


@pytest.mark.parametrize(
    "kernels",
    [fused, packed_attention, head, expert_rows, decoding],
    ids=["layers", "attention", "loss", "experts", "codes"],
)
def test_kernels_compute_what_they_are_compared_with(kernels: Any) -> None:
    assert kernels.KERNEL.fault(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 8, 128), (8, 8, 96), (14, 2, 64)])
def test_attention_by_cudnn_is_that_of_pytorch_s_kernel_and_repeats(
    heads: int, groups: int, width: int
) -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != cudnn_attention.CAPABILITY:
        pytest.skip("not on this GPU")
    pytest.importorskip("cudnn")
    assert cudnn_attention.KERNEL.fault(device) is None
    starts = torch.tensor([0, 700, 701, 2900, 7100, 7300], dtype=torch.int32)
    bounds = Bounds(starts, starts.cuda(), 8192)
    pattern = AttentionPattern(width**-0.5, sinks=torch.linspace(-2, 4, heads, device=device))
    drawn = (
        torch.randn(1, n, 7300, width, device=device, dtype=torch.bfloat16)
        for n in (heads, groups, groups)
    )
    query, key, value = (tensor.requires_grad_() for tensor in drawn)
    inputs = query, key, value
    grad = torch.randn(1, 7300, heads, width, device=device, dtype=torch.bfloat16)
    assert cudnn_attention.takes(*inputs, bounds, pattern)
    assert bounds.on_device is not None
    starts = bounds.on_device

    def both(attend: Any) -> list[torch.Tensor]:
        out = attend()
        return [out, *torch.autograd.grad(out, inputs, grad)]

    found = both(lambda: cudnn_attention.attend_packed(*inputs, bounds, pattern))
    other = both(lambda: packed_attention.attend_packed(*inputs, starts, bounds.longest, pattern))
    assert [distance(one, right) < 0.01 for one, right in zip(found, other, strict=True)] == [
        True
    ] * 4
    for _ in range(3):
        again = both(lambda: cudnn_attention.attend_packed(*inputs, bounds, pattern))
        assert all(torch.equal(one, own) for one, own in zip(found, again, strict=True))


def test_adapters_parts_are_added_as_by_separate_operations() -> None:
    low_rank.assert_same_sums(
        importlib.import_module("workers.layers.low_rank_kernel"), torch.device("cuda", 0)
    )


def test_linear_forward_and_backward_on_cuda() -> None:
    weight = NF4Weight.quantize(torch.randn(96, 100).cuda())
    x = torch.randn(4, 100, device="cuda", requires_grad=True)
    y = weight.linear(x)
    expected = x @ weight.dequantize().t()
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * expected @ weight.dequantize(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("rows", [7, 256, 333])
def test_products_in_fp8_are_those_of_the_formula(rows: int) -> None:
    reason = why_not(torch.bfloat16, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    assert fp8_products.KERNEL.fault(torch.device("cuda", 0)) is None
    weight = FP8Weight.quantize(torch.randn(96, 160).cuda().bfloat16())
    x = torch.randn(rows, 160, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = weight.linear_in_fp8(x)
    dense = weight.dequantize(torch.float32)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert x.grad is not None
    assert distance(y, rounded(x) @ dense.t()) < 0.01
    assert (
        distance(
            x.grad, rounded((grad.float() * weight.scale.t()).bfloat16()) @ weight.codes.float()
        )
        < 0.01
    )


def test_fp8_is_rounded_on_cuda_as_on_the_cpu() -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    here = fp8.quantize(weight)
    there = fp8.quantize(weight.cuda())
    assert torch.equal(here.scale, there.scale.cpu())
    assert torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))
    moved = fp8.FP8Parts(*(part.cuda() for part in here))
    assert torch.equal(
        fp8.dequantize(moved, 1000, torch.bfloat16).cpu(),
        fp8.dequantize(here, 1000, torch.bfloat16),
    )


@pytest.mark.parametrize("lot", [2, 5])
def test_experts_as_a_grouped_product_without_waiting(
    lot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] not in grouped_linear.GROUPED_CAPABILITIES:
        pytest.skip("torch has no grouped product for this GPU")
    rows = 96
    cols = 160
    counts = torch.tensor([30, 0, 70, 1, 99], device="cuda")
    monkeypatch.setattr(kernel_limits, "GROUPED_BYTES", lot * rows * cols * 2)
    weight = FP8Weight.quantize(torch.randn(5 * rows, cols).bfloat16().cuda())
    x = torch.randn(200, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(200, rows, device="cuda", dtype=torch.bfloat16)
    with never_waiting():
        y = grouped_linear.grouped_linear(x, counts, list(weight.parts), "fp8", rows, cols)
        y.backward(grad)
    dense = weight.dequantize(torch.float32).view(5, rows, cols)[
        torch.arange(5, device="cuda").repeat_interleave(counts)
    ]
    assert x.grad is not None
    assert distance(y, torch.einsum("nc,nrc->nr", x.detach().float(), dense)) < 0.01
    assert distance(x.grad, torch.einsum("nr,nrc->nc", grad.float(), dense)) < 0.01


@contextmanager
def never_waiting() -> Iterator[None]:
    """A block in which the host must not wait for the GPU; RuntimeError where it does."""
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rounded(factor: torch.Tensor) -> torch.Tensor:
    return fp8.dequantize(fp8.quantize(factor), factor.shape[1], torch.float32)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    found = found.detach().float()
    expected = expected.detach().float()
    return float((found - expected).norm() / expected.norm())


def test_an_attempt_that_stops_and_resumes_ends_with_the_bits_of_one_that_does_not(
    tmp_path: Path,
) -> None:
    spec = spec_for(
        save_chat_base(tmp_path / "base"),
        save_chats(tmp_path / "train.jsonl", 32),
        precision={"default": "nf4"},
        training={"max_steps": 12, "batch_size": 8, "learning_rate": 1e-2},
        checkpoint={"save_steps": 4},
    )
    run = RunDir(tmp_path / "run")
    run.write("spec.json", spec)
    run.put("attempts/1/stop.json", b'{"reason": "the test asks for it"}')
    assert supervise(run, 1, None) == 75
    assert supervise(run, 2, "step-1-a1") == 0
    result = run.read("result.json", Result)
    assert result is not None
    assert result.steps == 12
    whole = RunDir(tmp_path / "whole")
    whole.write("spec.json", spec)
    assert supervise(whole, 1, None) == 0
    resumed = adapter(run)
    uninterrupted = adapter(whole)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
