"""The loss of distillation: how far a student is from its teacher, at every token of the answers.

The teacher (teachers.py) may be the base, whose adapter is switched off, and may read a context
that the student does not: a long system prompt is learned into the adapter. Of each micro-batch the
teacher's rows are computed first, without gradients; of them only what the head is given stays,
[targets, hidden], from which the head makes both logits a few tokens at a time
(workers/model/head.py), or with top_k its likeliest words. Answers are compared token by token, by
ids.

    micro-batch ─▶ teacher's rows ─▶ hidden states ─▶ student's rows ─▶ divergence

A server may have been asked about the teacher instead: its likeliest words come with the answers.

The loss of a global batch is the mean over its answers' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import DistillationOptions
from workers.data.batches import Batch, make_batch
from workers.data.micro_batches import MicroBatchLimits, Rounds, share_out
from workers.model.divergence import (
    DIVERGENCE_SUMS,
    Divergence,
    Likeliest,
    divergence_sums,
)
from workers.model.head import (
    OtherHead,
    TeacherHidden,
    divergence_in_head,
    hidden_in_head,
    likeliest_in_head,
    works_in_chunks,
)
from workers.model.multimodal import causal_model
from workers.training.step import LossOf, logits_of, target_logits
from workers.training.teachers import Teacher


@dataclass(frozen=True)
class TaughtBatch:
    """A micro-batch as the student reads it, and as its teacher does: with the same targets."""

    student: Batch
    teacher: Batch
    told: Likeliest | None = None
    """What a server's teacher thinks of the targets; None: the ranks compute it."""


@dataclass(frozen=True)
class TaughtSums:
    """Sums over the answers' tokens of a global batch."""

    sums: Sequence[float]
    """In the order of DIVERGENCE_SUMS."""
    targets: int
    of_some_words: bool = False
    """Whether only some words are compared one by one."""

    is_impossible = False
    """A student that is its teacher has no loss."""

    def plus(self, other: TaughtSums) -> TaughtSums:
        """Of both batches together."""
        sums = [one + more for one, more in zip(self.sums, other.sums, strict=True)]
        return TaughtSums(sums, self.targets + other.targets, self.of_some_words)

    @property
    def loss(self) -> float:
        return self.sums[0]

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.targets)

    @property
    def accuracy(self) -> float:
        """Share of the answers' tokens that the student finds likeliest."""
        return self.sums[1] / max(1, self.targets)

    @property
    def more(self) -> dict[str, float]:
        """Means over tokens by their names in DIVERGENCE_SUMS; teacher/gap: by how many nats the
        teacher finds the answers' tokens likelier than the student.
        """
        names = DIVERGENCE_SUMS[2:]
        found = {
            name: value / max(1, self.targets)
            for name, value in zip(names, self.sums[2:], strict=True)
            if name != "teacher/kept" or self.of_some_words
        }
        return {**found, "teacher/gap": found["teacher/logps"] - found["student/logps"]}


@dataclass(frozen=True, eq=False)
class Taught:
    """The loss of distillation; item i is what the student reads, and what its teacher reads:
    samples 2i and 2i + 1 where the ranks' teacher has a context, else both are sample i.
    """

    samples: TokenSet
    options: DistillationOptions
    teacher: Teacher
    told: Sequence[Likeliest] | None = None
    """Of each item what a server's teacher thinks of its targets, on the CPU; None: the ranks
    compute it.
    """

    baseline = None

    @cached_property
    def _together(self) -> int:
        return 2 if self.options.with_context and self.told is None else 1

    @cached_property
    def _targets(self) -> np.ndarray:
        """int64 [items]: targets of each, those that the cut leaves of both."""
        return self.samples.target_counts.reshape(-1, self._together).min(axis=1)

    def __len__(self) -> int:
        return len(self.samples) // self._together

    def members(self, items: Sequence[int]) -> list[int]:
        count = self._together
        return [count * item + side for item in items for side in range(count)]

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        """By what the teacher reads, the longer of the two."""
        lengths = self.samples.lengths.reshape(-1, self._together).max(axis=1)
        return share_out(lengths[list(items)].tolist(), world, limits)

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> TaughtBatch:
        count = self._together
        both = [
            [
                self._sample(number, self._targets[number // count])
                for number in members[side::count]
            ]
            for side in (0, count - 1)
        ]
        own = None if keys is None else keys[::count]
        told = None
        if self.told is not None:
            told = Likeliest.together([self.told[number] for number in members], self._words)
            told = told.to(device)
        return TaughtBatch(
            make_batch(both[0], device, own, packed=packed),
            make_batch(both[1], device, None, packed=packed),
            told,
        )

    @cached_property
    def _words(self) -> int:
        """Words that a server has told of each target."""
        return self.options.top_k or 0

    def _sample(self, number: int, targets: int) -> Tokens:
        """A sample up to so many targets."""
        sample = self.samples[number]
        places = np.flatnonzero(sample.targets[1:]) + 1
        if len(places) <= targets:
            return sample
        return sample.cut(int(places[targets]))

    def divisor(self, items: Sequence[int]) -> int:
        return int(self._targets[list(items)].sum())

    def loss_of(self, items: Sequence[int], baseline: Tensor | None = None) -> LossOf[TaughtBatch]:
        return distillation_loss(Divergence.of(self.options), self.teacher)

    def read(self, sums: Sequence[float], items: Sequence[int]) -> TaughtSums:
        some = self.options.top_k is not None
        return TaughtSums(tuple(sums), self.divisor(items), some)


def distillation_loss(divergence: Divergence, teacher: Teacher) -> LossOf[TaughtBatch]:
    """The sum of divergences over the targets (`LossOf`); its sums are DIVERGENCE_SUMS."""

    def loss_of(model: nn.Module, own: TaughtBatch, scale: float) -> tuple[Tensor, Tensor]:
        causal = causal_model(model)
        targets = own.student.targets
        words = teacher.words(model)
        in_chunks = works_in_chunks(causal)
        given: TeacherHidden | Likeliest | Tensor
        if own.told is not None:
            given = own.told
        else:
            with teacher.speaking(model) as speaker:
                given = _given(speaker, own.teacher, words, divergence.top_k, in_chunks=in_chunks)
        if isinstance(given, TeacherHidden) and teacher.base is not None:  # which is sharded again
            head = OtherHead.of(teacher.base, given.hidden.dtype)
            given = TeacherHidden(given.hidden, head)
        if in_chunks and not isinstance(given, Tensor):
            with divergence_in_head(
                causal, own.student.places, targets, given, words, divergence, scale
            ) as taken:
                loss = logits_of(model, own.student)
            return loss, taken[0]
        assert not isinstance(given, TeacherHidden), "it is made for a head that works in chunks"
        student = target_logits(model, own.student)[:, :words].log_softmax(dim=-1)
        sums = divergence_sums(student, given, targets, divergence)
        return (sums[0] * scale).float(), sums.detach()

    return loss_of


def _given(
    speaker: nn.Module, batch: Batch, words: int, top_k: int | None, *, in_chunks: bool
) -> TeacherHidden | Likeliest | Tensor:
    """What is kept of a teacher's rows: what its head is given, its likeliest words, or its
    log-probabilities, fp32 [targets, words]. `in_chunks`: whether the student's head takes what a
    head is given.
    """
    taught = causal_model(speaker)
    if not works_in_chunks(taught) or (top_k is None and not in_chunks):
        logs = target_logits(speaker, batch)[:, :words].log_softmax(dim=-1)
        return logs if top_k is None else Likeliest.of(logs, batch.targets, top_k)
    if top_k is not None:
        with likeliest_in_head(taught, batch.places, batch.targets, words, top_k) as taken:
            logits_of(speaker, batch)
        return taken[0]
    with hidden_in_head(taught, batch.places):
        return TeacherHidden(logits_of(speaker, batch))
