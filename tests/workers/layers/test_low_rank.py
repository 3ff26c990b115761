"""The kernel that adds an adapter's part, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.triton_programs import run_with_triton
from workers.layers import linear, low_rank
from workers.layers.linear import _Call
from workers.quant.weights import FP8Weight

COMPUTES = """
import torch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from workers.layers import low_rank, low_rank_kernel

low_rank._compare(low_rank_kernel, torch.device("cpu"))
low_rank_kernel.added(torch.empty(0, 8), torch.empty(0, 4), torch.empty(4, 8), 1.0, ())
"""


def test_the_kernel_comes_to_the_sums_of_separate_operations(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def by_parts(y: Tensor, left: Tensor, right: Tensor, scale: float, more: Any) -> None:
    """What the kernel computes."""
    y.copy_(sum((own.float() for own in more), y.float() + scale * (left.float() @ right.float())))


def test_a_kernel_that_comes_to_other_sums_is_not_used() -> None:
    device = torch.device("cpu")
    low_rank._compare(SimpleNamespace(added=by_parts), device)
    forgets = SimpleNamespace(
        added=lambda y, left, right, scale, more: by_parts(y, left, right, scale, more[:1])
    )
    unscaled = SimpleNamespace(
        added=lambda y, left, right, scale, more: by_parts(y, left, right, 1.0, more)
    )
    for wrong in (forgets, unscaled):
        with pytest.raises(AssertionError, match="other sums"):
            low_rank._compare(wrong, device)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_layers_in_fp8_have_the_gradients_of_separate_operations(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, and several of one input, of which the kernel adds as many gradients as it can."""
    generator = torch.Generator().manual_seed(0)
    weights = [FP8Weight.quantize(torch.randn(32, 48, generator=generator)) for _ in range(count)]
    x = torch.randn(5, 48, generator=generator, requires_grad=True)
    factors = [
        torch.randn(shape, generator=generator, requires_grad=True)
        for _ in weights
        for shape in ((4, 48), (32, 4))
    ]
    added: list[int] = []

    def watched(y: Tensor, left: Tensor, right: Tensor, scale: float, more: Any) -> None:
        added.append(len(more))
        by_parts(y, left, right, scale, more)

    def found() -> list[Tensor]:
        layers = [
            (
                _Call("fp8", 48, 0.5, 2, None, 0.0),
                (factors[2 * i], factors[2 * i + 1], None, *weight.parts),
            )
            for i, weight in enumerate(weights)
        ]
        outputs = linear.products(x, layers)
        loss = sum((y * (i + 1)).square().sum() for i, y in enumerate(outputs))
        assert isinstance(loss, Tensor)
        return [*outputs, *torch.autograd.grad(loss, [x, *factors])]

    separate = found()
    assert not added
    monkeypatch.setattr(low_rank, "takes", lambda like, rank: True)
    monkeypatch.setattr(low_rank.KERNEL, "on", lambda device: SimpleNamespace(added=watched))
    together = found()
    assert added == [0] * count + [min(count - 1, low_rank.MOST_MORE)]
    for ours, theirs in zip(together, separate, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_processors_and_high_ranks_go_without_the_kernel() -> None:
    assert not low_rank.takes(torch.ones(2, 2).bfloat16(), 16)
    assert low_rank.KERNEL.fault(torch.device("cpu")) is None
    y = torch.ones(3, 4)
    left = torch.ones(3, 2)
    right = torch.ones(2, 4)
    assert torch.equal(
        low_rank.add(y, left, right, 2.0, [torch.ones(3, 4)]), torch.full((3, 4), 6.0)
    )
