"""Sums of a micro-batch of answers with labels, and of mismatched ones, on a model whose
log-probabilities are known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import KtoOptions
from tests.support.training.looked_up import LookedUp, log_of, sample
from workers.data.micro_batches import MicroBatchLimits
from workers.ranks.context_group import ContextGroup
from workers.training import kto
from workers.training.kto import Labelled, LabelledSums, Mismatched

CPU = torch.device("cpu")
OPTIONS = KtoOptions(beta=0.5, loss_type="kto", desirable_weight=2.0, undesirable_weight=4.0)
ANSWERS = TokenSet.of(
    [
        sample([0, 3, 2], 2, True),
        sample([0, 1], 1, False),
        sample([2, 2], 1, True),
        sample([1, 1, 1, 0], 3, False),
    ]
)
LOGS = [log_of(0.4, 0.15), log_of(0.2), log_of(0.45), log_of(0.25, 0.25, 0.5)]
REFERENCE = torch.tensor([-2.0, -2.0, -1.0, -5.0]).double()


def sigma(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).sigmoid())


def objective(**changes: Any) -> Labelled:
    return Labelled(**{"samples": ANSWERS, "reference": REFERENCE, "options": OPTIONS} | changes)


@pytest.mark.parametrize(
    ("baseline", "zero"), [(None, 0.0), ([6.0], 1.5), ([-6.0], 0.0)], ids=["none", "above", "below"]
)
@pytest.mark.parametrize("shared", [None, 0, 1])
def test_sums_are_those_of_losses_rewards_and_answers_by_label(
    baseline: list[float] | None,
    zero: float,
    shared: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of the four answers of a step; the baseline is a sum over all four."""
    own = objective(baseline=None)
    batch = own.micro_batch([3, 0, 1], CPU, None, True)
    assert batch.good.tolist() == [False, True, False]
    model = LookedUp()
    if shared is not None:
        known = kto.answer_log_probabilities(model, batch.answers)
        nobody: Any = None
        batch = batch.part_of(ContextGroup(shared, 2, nobody))
        assert batch.answers.batch.shared is not None
        monkeypatch.setattr(kto, "answer_log_probabilities", lambda *given: known)
    given = None if baseline is None else torch.tensor(baseline).double()
    loss, sums = own.loss_of([0, 1, 2, 3], given)(model, batch, 0.25)
    gains = [log - float(kept) for log, kept in zip(LOGS, REFERENCE, strict=True)]
    losses = [
        2 * sigma(-0.5 * (gains[0] - zero)),
        *(4 * sigma(0.5 * (gains[bad] - zero)) for bad in (1, 3)),
    ]
    assert (loss.dtype, sums.dtype) == (torch.float32, torch.float64)
    assert loss.item() == pytest.approx(0.25 * sum(losses))
    rewards = [0.5 * gains[0], 0.5 * (gains[1] + gains[3])]
    numbers = [sum(losses), 1, *rewards, LOGS[0], LOGS[1] + LOGS[3], zero * 3 / 4]
    assert sums.tolist() == ([0.0] * 7 if shared == 1 else pytest.approx(numbers))
    assert not sums.requires_grad


def test_sums_are_read_with_the_numbers_of_their_items() -> None:
    own = objective(baseline=None)
    found = own.read([6.0, 2.0, 3.0, -4.0, -5.0, -6.0, 0.5], [3, 0, 1])
    assert found == LabelledSums(6.0, 2, (3.0, -4.0), (-5.0, -6.0), 0.5, 1, 2, 2)
    assert (own.divisor([3, 0, 1]), own.lengths([3, 0]), own.members([3, 0])) == (3, [4, 3], [3, 0])
    assert len(own) == 4
    empty = LabelledSums(0.0, 0, (0.0, 0.0), (0.0, 0.0), 0.5, 0, 0, 0)
    assert (empty.mean_loss, empty.accuracy, empty.more) == (0, 0, {"kl": 0.5})
    one = LabelledSums(3.0, 1, (1.0, 0.0), (-1.0, 0.0), 0.5, 1, 0, 1)
    assert (one.mean_loss, one.accuracy) == (3, 1)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_an_objective_has_a_baseline_where_its_loss_takes_one(loss: Any) -> None:
    options = OPTIONS.model_copy(update={"loss_type": loss})
    own = Labelled.without_values(ANSWERS, options, seed=3, max_length=5)
    assert (own.reference.tolist(), own.reference.dtype) == ([0.0] * 4, torch.float64)
    if loss != "kto":
        assert (own.baseline, own.parts) == (None, (own,))
        known = own.with_reference([REFERENCE])
        assert (known.reference is REFERENCE, known.baseline) == (True, None)
        return
    other = own.baseline
    assert other is not None
    assert own.parts == (own, other)
    assert other.answer_begins.tolist() == [1, 1, 1, 1]
    expected = kto.mismatched_partners(ANSWERS, np.ones(4, np.int64), 3)
    assert (other.partners.tolist(), other.max_length) == (expected.tolist(), 5)
    assert (len(other), other.members([2, 0])) == (4, [2, 0])
    known = own.with_reference([REFERENCE, REFERENCE - 1])
    assert known.baseline is not None
    assert (known.reference is REFERENCE, other.reference.tolist()) == (True, [0.0] * 4)
    assert known.baseline.reference.tolist() == (REFERENCE - 1).tolist()


def test_a_mismatched_answer_has_gained_what_its_log_probability_exceeds_its_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins = np.array([1, 1, 1, 1])
    own = Mismatched(ANSWERS, np.array([1, 0, 3, 2]), begins, 3, REFERENCE)
    assert own.sample(2).ids.tolist() == [2, 1, 1], "cut"
    assert own.lengths([2, 0, 3]) == [3, 2, 2]
    shared: list[Any] = []
    limits = MicroBatchLimits(7)
    monkeypatch.setattr(kto, "share_out", lambda *given: shared.append(given) or "!")
    assert own.share_out([2, 0], 2, limits) == "!"
    assert objective(baseline=None).share_out([3, 0], 2, limits) == "!"
    assert shared == [([3, 2], 2, limits), ([4, 3], 2, limits)]
    batch = own.micro_batch([2, 0], CPU, [5, 6], False)
    assert (batch.batch.ids.tolist(), batch.batch.packing) == ([[2, 1, 1], [0, 1, 0]], None)
    assert batch.batch.keys is not None
    loss, sums = own.loss_of([2, 0])(LookedUp(), batch, 0.25)
    gained = log_of(0.25, 0.25) + 1 + log_of(0.2) + 2
    assert (sums.tolist(), sums.dtype) == ([pytest.approx(gained)], torch.float64)
    assert loss.item() == pytest.approx(0.25 * gained)
    labelled = objective(baseline=None).micro_batch([1, 2], CPU, [5, 6], False)
    assert labelled.answers.batch.keys is not None
    assert (labelled.answers.batch.packing, labelled.good.tolist()) == (None, [False, True])
    assert labelled.answers.reference.tolist() == [-2, -1]
