"""The kernel of the loss without a GPU, computed by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.triton_programs import run_with_triton
from workers.model import head

COMPUTES = """
import torch
from unittest.mock import patch
from tests.support.triton_programs import correct_casts
correct_casts(by_way_of_fp16=False)
from workers.layers import loss_kernel
from workers.model import head

head._compare(loss_kernel, torch.device("cpu"))
generator = torch.Generator().manual_seed(1)

def drawn(*shape):
    return torch.randn(shape, generator=generator).bfloat16()

hidden, weight, bias = drawn(37, 16).requires_grad_(), drawn(9000, 16), drawn(9000)
targets = torch.randint(0, 9000, (37,), generator=generator)
expected = head._HeadLoss.apply(hidden, weight, bias, targets, None, 0.5)
(gradient,) = torch.autograd.grad(expected[0], hidden)
chunk, taken = head._Head._chunk, []

def by_kernel(self, rows, right, factors, *, graded):
    logits = torch.nn.functional.linear(rows, self.weight, self.bias)
    taken.append(len(rows))
    return *loss_kernel.cross_entropy(logits, right, factors, graded=graded), logits if graded else None

with patch.object(head._Head, "_chunk", by_kernel):
    found = head._HeadLoss.apply(hidden, weight, bias, targets, None, 0.5)
assert sum(taken) == 37
for ours, theirs in zip(found, expected):
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
(ours,) = torch.autograd.grad(found[0], hidden)
assert (ours - gradient).norm() <= 1e-3 * gradient.norm()
nothing = loss_kernel.cross_entropy(drawn(0, 9), targets[:0], None, graded=True)
assert [len(part) for part in nothing] == [0, 0]
wrong = torch.full((1, 20), float("nan")).bfloat16()
assert loss_kernel.cross_entropy(wrong, targets[:1] * 0, None, graded=True)[0].isnan().all() and wrong.isnan().all()
"""


def test_the_kernel_computes_what_several_operations_do(tmp_path: Path) -> None:
    run_with_triton(COMPUTES, tmp_path, TRITON_INTERPRET="1")


def by_operations(logits: Any, targets: Any, factors: Any, *, graded: bool) -> tuple[Any, Any]:
    """A stand-in of the kernel."""
    logs = logits.log_softmax(dim=-1, dtype=torch.float64)
    found = logs.gather(1, targets[:, None])[:, 0].float(), logs.argmax(dim=-1) == targets
    if graded:
        logits.copy_(
            head._gradient(logs, targets[:, None]) * (1 if factors is None else factors[:, None])
        )
    return found


def test_a_kernel_that_computes_something_else_is_not_used() -> None:
    device = torch.device("cpu")
    head._compare(SimpleNamespace(cross_entropy=by_operations), device)
    for wrong, said in (
        (
            lambda *own, graded: (
                by_operations(*own, graded=graded)[0] + 1e-3,
                by_operations(*own, graded=False)[1],
            ),
            "log-prob",
        ),
        (
            lambda *own, graded: (
                by_operations(*own, graded=graded)[0],
                torch.ones(6, dtype=torch.bool),
            ),
            "most likely",
        ),
        (
            lambda logits, right, _, graded: by_operations(logits, right, None, graded=graded),
            "its gradient",
        ),
        (lambda *own, graded: by_operations(*own, graded=False), "its gradient"),
    ):
        with pytest.raises(AssertionError, match=said):
            head._compare(SimpleNamespace(cross_entropy=wrong), device)
