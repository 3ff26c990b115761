"""What is taken of a teacher, by heads that work in chunks or do not, on models whose chances are
known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import DistillationOptions
from tests.support.training.looked_up import CHANCES, LookedUp, sample
from workers.data.micro_batches import MicroBatchLimits
from workers.model.divergence import Divergence, Likeliest
from workers.model.head import TeacherHidden
from workers.training import distillation
from workers.training.distillation import Taught, TaughtBatch, distillation_loss
from workers.training.teachers import Teacher

CPU = torch.device("cpu")
SAMPLES = TokenSet.of([sample([0, 3, 2], 2), sample([2, 1, 3, 2], 2), sample([2, 2], 1)])
PLACES = [0, 3, 1, 3, 2]
"""Tokens before the targets 3, 2, 3, 2 and 2."""
TARGETS = [3, 2, 3, 2, 2]
WIDER = torch.cat([CHANCES.flip(0) * 0.8, torch.full((4, 2), 0.1)], dim=1)
"""A teacher with two words more, which are left out."""


def options(**given: Any) -> DistillationOptions:
    return DistillationOptions(
        **{"loss_type": "forward_kl", "beta": 0.5, "with_context": ""} | given
    )


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("in_chunks", [True, False], ids=["student", "student whole"])
@pytest.mark.parametrize("taught", [True, False], ids=["teacher", "teacher whole"])
@pytest.mark.parametrize("told", [False, True])
def test_the_divergence_is_that_of_the_chances(
    top_k: int | None, in_chunks: bool, taught: bool, told: bool
) -> None:
    if told and top_k is None:
        return
    student, base = LookedUp(in_chunks=in_chunks), LookedUp(WIDER, in_chunks=taught)
    own = Taught(SAMPLES, options(top_k=top_k), Teacher())
    batch = own.micro_batch([0, 1, 2], CPU, None, True)
    t = CHANCES.flip(0)[PLACES]
    if told:
        assert top_k is not None
        likeliest = Likeliest.of(t.log(), torch.tensor(TARGETS), top_k)
        batch = TaughtBatch(batch.student, batch.teacher, likeliest)
    loss_of = distillation_loss(Divergence.of(own.options), Teacher(base=base))
    loss, sums = loss_of(student, batch, 0.25)
    assert len(base.given) == (0 if told else 1)
    loss.backward()
    s = CHANCES[PLACES]
    logs = (t[range(5), TARGETS].log().sum().item(), s[range(5), TARGETS].log().sum().item())
    kept = 5.0 if top_k is None else t.topk(2).values.sum().item()
    agreed = float((t.argmax(1) == s.argmax(1)).sum())
    if top_k is not None:
        words = t.topk(2).indices
        s, t = (
            torch.cat([p.gather(1, words), 1 - p.gather(1, words).sum(1, True)], 1) for p in (s, t)
        )
    forward = (t * (t / s).log()).sum().item()
    reverse = (s * (s / t).log()).sum().item()
    expected = [forward, 2, forward, reverse, agreed, *logs, kept]
    assert sums.tolist() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(0.25 * forward, rel=1e-5)
    assert (loss.dtype, sums.dtype, sums.requires_grad) == (torch.float32, torch.float64, False)
    assert student.table.grad is not None
    assert base.table.grad is None
    if top_k is None:
        behind_2 = 0.25 * (CHANCES[2] - CHANCES.flip(0)[2])
        torch.testing.assert_close(student.table.grad[2], behind_2)


@pytest.mark.parametrize(
    ("in_chunks", "taught", "top_k", "kind"),
    [
        (True, True, None, TeacherHidden),
        (True, True, 2, Likeliest),
        (True, False, None, torch.Tensor),
        (True, False, 2, Likeliest),
        (False, True, None, torch.Tensor),
        (False, True, 2, Likeliest),
        (False, False, None, torch.Tensor),
        (False, False, 2, Likeliest),
    ],
)
def test_of_a_teacher_is_kept_what_the_students_head_takes(
    in_chunks: bool, taught: bool, top_k: int | None, kind: type
) -> None:
    speaker = LookedUp(WIDER, in_chunks=taught)
    batch = Taught(SAMPLES, options(), Teacher()).micro_batch([1], CPU, None, True).teacher
    found = distillation._given(speaker, batch, 4, top_k, in_chunks=in_chunks)
    assert isinstance(found, kind)
    chances = CHANCES.flip(0)[[1, 3]]
    if isinstance(found, TeacherHidden):
        assert torch.equal(found.hidden, speaker.table[[1, 3]])
        assert found.head is None
    elif isinstance(found, Likeliest):
        assert found.words.tolist() == chances.topk(2).indices.tolist()
        torch.testing.assert_close(found.targets, chances[[0, 1], [3, 2]].log())
    else:
        torch.testing.assert_close(found, chances.log())


def told_of(count: int, k: int, first: float) -> Likeliest:
    words = torch.arange(k).expand(count, -1)
    logs = -torch.arange(k + 1.0).expand(count, -1) + first
    return Likeliest(words, logs, torch.full((count,), first))


def test_what_a_server_told_comes_with_its_items() -> None:
    told = [told_of(2, 2, -1.0), told_of(2, 2, -2.0), told_of(1, 2, -3.0)]
    own = Taught(SAMPLES, options(top_k=2, with_context="be brief"), Teacher(), told)
    assert (len(own), own.members([2, 0]), own.divisor([2, 0])) == (3, [2, 0], 3)
    batch = own.micro_batch([2, 0], CPU, [8, 9], False)
    assert batch.told is not None
    assert batch.told.targets.tolist() == [-3, -1, -1]
    assert batch.student.ids.tolist() == batch.teacher.ids.tolist() == [[2, 2, 0], [0, 3, 2]]
    assert (batch.student.keys is not None, batch.teacher.keys) == (True, None)
    assert (batch.student.packing, batch.teacher.packing) == (None, None)
    empty = own.micro_batch([], CPU, [], True)
    assert empty.told is not None
    assert empty.told.logs.shape == (0, 3)
    assert own.read([1.0] * 8, [0]).of_some_words


def test_an_answer_is_cut_to_what_both_have_of_it() -> None:
    samples = TokenSet.of(
        [*(sample([0, 3, 2, 1], 3), sample([1, 1, 3, 2], 2)), *(sample([2, 1], 1),) * 2]
    )
    own = Taught(samples, options(with_context="be brief"), Teacher())
    assert (own._targets.tolist(), own.divisor([0]), len(own)) == ([2, 1], 2, 2)
    assert own._sample(0, 2).ids.tolist() == [0, 3, 2]
    assert own._sample(1, 2).ids.tolist() == [1, 1, 3, 2]
    assert own._sample(0, 0).ids.tolist() == [0]
    learned = samples[0]
    learned.targets[0] = True  # the first token is no target
    whole = Taught(TokenSet.of([learned, samples[1]]), own.options, Teacher())
    assert whole._sample(0, 3).ids.tolist() == [0, 3, 2, 1]
    batch = own.micro_batch([0, 1, 2, 3], CPU, [5, 6, 7, 8], True)
    assert batch.student.ids.tolist() == [[0, 3, 2, 2, 1]]
    assert batch.teacher.ids.tolist() == [[1, 1, 3, 2, 2, 1]]
    alone = Taught(samples, options(), Teacher())
    expected = alone.micro_batch([0, 2], CPU, [5, 7], True).student.keys
    assert batch.student.keys is not None
    assert expected is not None
    assert batch.student.keys[0, 3:].tolist() == expected[0, 4:].tolist()


@pytest.mark.parametrize(("context", "lengths"), [("be brief", [4, 2]), ("", [2, 4])])
def test_items_are_shared_out_by_the_longer_of_both(
    context: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = TokenSet.of(
        [*(sample([2, 1], 1),) * 2, *(sample([0, 3, 2], 1), sample([1, 1, 3, 2], 2))]
    )
    shared: list[Any] = []
    monkeypatch.setattr(distillation, "share_out", lambda *given: shared.append(given) or "!")
    own = Taught(samples, options(with_context=context), Teacher())
    limits = MicroBatchLimits(8)
    assert own.share_out([1, 0] if context else [1, 3], 2, limits) == "!"
    assert shared == [(lengths, 2, limits)]
