"""Sums of a micro-batch of pairs, on a model whose log-probabilities are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import DpoOptions, SimpoOptions
from tests.support.training.looked_up import LookedUp, log_of, sample
from workers.data.batches import make_batch
from workers.data.micro_batches import MicroBatchLimits
from workers.ranks.context_group import ContextGroup
from workers.training import objective, preference
from workers.training.objective import Preference, RankShare
from workers.training.preference import (
    PairSums,
    answer_log_probabilities,
    make_answers,
    preference_loss,
)

CPU = torch.device("cpu")
ANSWERS = [
    *(sample([0, 3, 2], 2), sample([0, 1], 1)),
    *(sample([2, 2], 1), sample([1, 1, 1, 0], 3)),
]
"""Two pairs; of the preferred answers the tokens 3 and 2 are likeliest."""
LOGS = [log_of(0.4, 0.15), log_of(0.2), log_of(0.45), log_of(0.25, 0.25, 0.5)]
REFERENCE = [-2.0, -2.0, -1.0, -2.0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_an_answer_has_the_log_probabilities_of_its_tokens(packed: bool, in_chunks: bool) -> None:
    own = make_answers(ANSWERS, torch.tensor(REFERENCE).double(), CPU, packed=packed)
    assert own.counts.tolist() == [2, 1, 1, 3]
    assert own.answers.tolist() == [0, 0, 1, 2, 3, 3, 3]
    found, correct = answer_log_probabilities(LookedUp(in_chunks=in_chunks), own)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(LOGS)
    assert correct.tolist() == [True, False, False, True, False, False, True]


def test_answers_are_made_of_samples_with_their_keys_and_reference() -> None:
    values = torch.tensor(REFERENCE).double()
    keys = [7, 8, 9, 10]
    own = make_answers(ANSWERS, values, CPU, keys, packed=False)
    expected = make_batch(ANSWERS, CPU, keys, packed=False)
    assert own.batch.keys is not None
    assert expected.keys is not None
    assert torch.equal(own.batch.keys, expected.keys)
    assert (own.batch.packing, own.reference.tolist()) == (None, REFERENCE)
    assert make_answers(ANSWERS, values, CPU).batch.packing is not None
    nobody: Any = None
    part = own.part_of(ContextGroup(1, 2, nobody))
    assert part.batch.shared is not None
    assert (part.counts.tolist(), part.batch.ids.shape) == ([2, 1, 1, 3], (4, 2))


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("shared", [None, 0, 1])
def test_sums_are_those_of_the_losses_rewards_and_answers(
    alpha: float | None, shared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of four pairs with 10 preferred tokens. Ranks that share them report them once."""
    options = DpoOptions(beta=0.5, loss_type="hinge", rpo_alpha=alpha)
    own = make_answers(ANSWERS, torch.tensor(REFERENCE).double(), CPU)
    model = LookedUp()
    if shared is not None:  # each has the whole
        known = answer_log_probabilities(model, own)
        nobody: Any = None
        own = own.part_of(ContextGroup(shared, 2, nobody))
        monkeypatch.setattr(preference, "answer_log_probabilities", lambda *given: known)
    loss, sums = preference_loss(options, 4, 10)(model, own, 0.25)
    gained = [log - kept for log, kept in zip(LOGS, REFERENCE, strict=True)]
    margins = [0.5 * (gained[0] - gained[1]), 0.5 * (gained[2] - gained[3])]
    assert margins[0] < 0 < margins[1] < 1
    expected = sum(max(0.0, 1 - margin) for margin in margins)
    expected -= (alpha or 0) * 4 / 10 * (LOGS[0] + LOGS[2])
    assert (loss.dtype, sums.dtype, sums.requires_grad) == (torch.float32, torch.float64, False)
    assert loss.item() == pytest.approx(0.25 * expected)
    rewards = [0.5 * (gained[0] + gained[2]), 0.5 * (gained[1] + gained[3])]
    logps = [LOGS[0] + LOGS[2], LOGS[1] + LOGS[3]]
    numbers = [expected, 2, *rewards, sum(margins), sum(m > 0 for m in margins), *logps]
    assert sums.tolist() == ([0.0] * 8 if shared == 1 else pytest.approx(numbers))


@pytest.mark.parametrize("targets", [0, 1])
def test_without_preferred_tokens_nothing_is_divided_by_zero(targets: int) -> None:
    options = DpoOptions(beta=0.5, loss_type="sigmoid", rpo_alpha=0.5)
    nothing = make_answers([], torch.zeros(0).double(), CPU)
    loss, sums = preference_loss(options, 1, targets)(LookedUp(), nothing, 1.0)
    assert (loss.item(), sums.tolist()) == (0, [0.0] * 8)


def test_equal_rewards_are_not_accurate_and_an_empty_batch_has_means_of_zero() -> None:
    options = SimpoOptions(beta=2.0, gamma=1.0)
    alike = make_answers([ANSWERS[0], ANSWERS[0]], torch.zeros(2).double(), CPU)
    _, sums = preference_loss(options, 1, 2)(LookedUp(), alike, 1.0)
    assert sums[4:6].tolist() == [0, 0]
    empty = PairSums(0.0, 0, (0.0,) * 6, 0, 0)
    assert (empty.mean_loss, empty.accuracy, set(empty.more.values())) == (0, 0, {0})
    one = PairSums(3.0, 1, (1.0,) * 6, 1, 1)
    assert (one.mean_loss, one.accuracy, set(one.more.values())) == (3, 1, {1})


def test_pairs_are_shared_out_and_made_of_their_own_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = TokenSet.of(ANSWERS)
    options = DpoOptions(beta=0.5, loss_type="hinge")
    own = Preference(samples, torch.tensor(REFERENCE).double(), options)
    shared: list[Any] = []
    monkeypatch.setattr(objective, "share_out_pairs", lambda *given: shared.append(given) or "!")
    limits = MicroBatchLimits(7, packed=False)
    assert own.share_out([1, 0], 2, limits) == "!"
    assert shared == [([(2, 4), (3, 2)], 2, limits)]
    batch = own.micro_batch([2, 3], CPU, [5, 6], False)
    assert (batch.reference.tolist(), batch.batch.ids.shape) == (REFERENCE[2:], (2, 4))
    assert (batch.batch.keys is not None, batch.batch.packing) == (True, None)
    monkeypatch.undo()
    share = RankShare(0, 1, CPU, MicroBatchLimits(100))
    (whole,) = share.batches(own, [0, 1])
    _, sums = own.loss_of([0, 1])(LookedUp(), whole, 1.0)
    read = own.read(sums.tolist(), [0, 1])
    assert (read.correct, read.pairs, read.targets) == (2, 2, 3)
    assert read.more["logps/chosen"] == pytest.approx((LOGS[0] + LOGS[2]) / 2)
