"""The loss inside the head against the loss on whole logits: values, gradients, and what is never
made.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.model import head
from workers.model.head import log_probabilities_in_head, loss_in_head

WORDS = 50
HIDDEN = 16


class Model(nn.Module):
    """As much of a causal model as stands behind its last layer."""

    def __init__(self, bias: bool, cap: float | None) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=bias).requires_grad_(False)
        self.config = SimpleNamespace(final_logit_softcapping=cap)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def drawn(share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [3, 7, HIDDEN], places with a target, and the targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, generator=generator)
    places = (torch.rand(21, generator=generator) < share).nonzero().squeeze(1)
    return hidden, places, torch.randint(0, WORDS, (len(places),), generator=generator)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (False, 0.7)])
def test_loss_and_gradient_are_those_on_whole_logits(
    rows: int, bias: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda words: rows)
    model, (hidden, *wanted) = Model(bias, cap), drawn(0.6)
    ours = hidden.clone().requires_grad_()
    theirs = hidden.clone().requires_grad_()
    with loss_in_head(cast("Any", model), wanted[0], wanted[1], 0.25) as found:
        scaled = model(ours)
    scaled.backward()
    logits = model(theirs).flatten(0, 1)
    places, targets = wanted
    expected = F.cross_entropy(logits[places], targets, reduction="sum")
    (expected * 0.25).backward()
    [losses] = found
    assert torch.allclose(losses.loss, expected.detach(), rtol=1e-6)
    assert torch.allclose(scaled.detach(), expected.detach() * 0.25, rtol=1e-6)
    assert losses.correct == (logits[places].argmax(-1) == targets).sum()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_log_probabilities_at_a_temperature_are_those_of_divided_logits(
    cap: float | None, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda words: 4)
    model, (hidden, places, targets) = Model(True, cap), drawn(0.6)
    model.lm_head.requires_grad_(trained)
    factors = torch.linspace(-1, 2, len(targets))
    ours = hidden.clone().requires_grad_()
    theirs = hidden.clone().requires_grad_()
    with log_probabilities_in_head(cast("Any", model), places, targets, 0.6):
        logs = model(ours)
    (logs * factors).sum().backward()
    of_head = [parameter.grad for parameter in model.lm_head.parameters()]
    model.zero_grad()
    expected = (
        (model(theirs).flatten(0, 1)[places] / 0.6)
        .log_softmax(-1)
        .gather(1, targets[:, None])[:, 0]
    )
    (expected * factors).sum().backward()
    assert torch.allclose(logs, expected, rtol=1e-5)
    for one, other in zip(
        [ours.grad, *of_head],
        [theirs.grad, *(p.grad for p in model.lm_head.parameters())],
        strict=True,
    ):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, cast("Tensor", other), rtol=1e-4, atol=1e-6)


def test_without_targets_there_is_a_loss_of_zero_to_go_backward_from() -> None:
    model, (hidden, *wanted) = Model(False, None), drawn(0.0)
    hidden.requires_grad_()
    with loss_in_head(cast("Any", model), wanted[0], wanted[1], 1.0) as found:
        model(hidden).backward()
    assert found[0].loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_what_stays_for_the_backward_is_no_wider_than_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "chunk_rows", lambda words: 4)
    model, (hidden, *wanted) = Model(False, None), drawn(0.6)
    hidden.requires_grad_()
    kept: list[torch.Size] = []
    widest = 0
    linear = F.linear

    def watched(x: Tensor, *others: Any) -> Tensor:
        nonlocal widest
        widest = max(widest, len(x))
        return linear(x, *others)

    monkeypatch.setattr(head.F, "linear", watched)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t),
        loss_in_head(cast("Any", model), wanted[0], wanted[1], 1.0),
    ):
        model(hidden)
    assert widest == 4
    assert WORDS not in {size for shape in kept for size in shape}


def test_the_model_is_as_it_was_afterwards() -> None:
    model, (hidden, *wanted) = Model(False, 0.7), drawn(0.6)
    before = model(hidden)
    with (
        pytest.raises(ZeroDivisionError),
        loss_in_head(cast("Any", model), wanted[0], wanted[1], 1.0),
    ):
        raise ZeroDivisionError
    assert torch.equal(model(hidden), before)
