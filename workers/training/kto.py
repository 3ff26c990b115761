"""The loss on good and bad answers, each with its label: KTO, arXiv 2402.01306.

A good answer is to become likelier than it was for the model that training started from, its
reference (reference_logprobs.py), and a bad one less likely, both measured against z0: how much
likelier the model has made answers as such. z0 is estimated from mismatched answers, those of other
samples, and is the same for all answers of a global batch, so it is computed before the loss, in a
pass of its own without gradients. The loss of a global batch is the mean over its answers.

    step's items ─▶ mismatched answers, all ranks, no gradients ─▶ z0 ─▶ loss of the answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import KtoOptions
from workers.data.batches import BatchOrder
from workers.data.micro_batches import MicroBatchLimits, Rounds, share_out
from workers.data.row_parts import taken_once
from workers.ranks.context_group import ContextGroup
from workers.training.preference import AnswerBatch, answer_log_probabilities, make_answers
from workers.training.step import LossOf


@dataclass(frozen=True)
class LabelledBatch:
    """A micro-batch of answers with labels."""

    answers: AnswerBatch
    good: Tensor
    """bool [samples]: whether the answer is a good one."""

    def part_of(self, own: ContextGroup) -> LabelledBatch:
        """The same answers, of whose tokens this rank has a part."""
        return replace(self, answers=self.answers.part_of(own))


@dataclass(frozen=True)
class LabelledSums:
    """Sums over the answers of a global batch."""

    loss: float
    """Sum over the answers; without unit."""
    correct: int
    """Targets of good answers that were the most likely token."""
    rewards: tuple[float, float]
    """Sums of good answers and of bad ones: beta times by how much an answer's log-probability
    exceeds that of the reference, in nats.
    """
    logps: tuple[float, float]
    """Log-probabilities of whole answers, in nats, likewise."""
    baseline: float
    """z0, in nats."""
    good: int
    bad: int
    targets: int
    """Number of target tokens in good answers."""

    is_impossible = False
    """The loss falls without jumps as the model prefers good answers."""

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.good + self.bad)

    @property
    def accuracy(self) -> float:
        """Share of the good answers' target tokens that were the most likely ones; 0 without good
        answers.
        """
        return self.correct / max(1, self.targets)

    @property
    def more(self) -> dict[str, float]:
        """Means by TRL's names, of labels that the batch has; kl: z0."""
        found = {"kl": self.baseline}
        for name, (good, bad) in (("rewards", self.rewards), ("logps", self.logps)):
            if self.good:
                found[f"{name}/chosen"] = good / self.good
            if self.bad:
                found[f"{name}/rejected"] = bad / self.bad
        if self.good and self.bad:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


def kto_losses(gained: Tensor, good: Tensor, baseline: Tensor, options: KtoOptions) -> Tensor:
    """The loss of every answer, [answers].

    `gained`: [answers], by how much each answer's log-probability exceeds that of the reference;
    `good`: bool [answers]; `baseline`: [], z0, or 0 with apo_zero_unpaired. With r the gain, s the
    logistic function and d, u the weights:

        good  d (1 - s(beta (r - z0)))
        bad   u (1 - s(beta (z0 - r)))

    kto: arXiv 2402.01306; apo_zero_unpaired: arXiv 2408.06266, whose apo_zero takes pairs.
    """
    away = options.beta * (gained - baseline)
    weights = torch.where(
        good,
        away.new_full((), options.desirable_weight),
        away.new_full((), options.undesirable_weight),
    )
    return weights * F.sigmoid(torch.where(good, -away, away))


def _sides(own: LabelledBatch) -> tuple[Tensor, Tensor]:
    """Which answers are good, and which are bad."""
    return own.good, ~own.good


def mismatched_partners(samples: TokenSet, answer_begins: np.ndarray, seed: int) -> np.ndarray:
    """int64 [samples]: the sample whose answer is put behind each one's prompt, to estimate z0.

    It is the next one, with another prompt, in the order in which the first epoch reads all
    samples, drawn from the seed: mostly the neighbour within the step. So a sample has the same
    mismatched answer in all steps, whatever their batch size, ranks and micro-batches, and its
    reference is computed once. If all prompts are the same, it is the next one.

    `answer_begins`: int64 [samples], the place of each answer in its sample.
    """
    count = len(samples)
    if not count:
        return np.empty(0, np.int64)
    order = BatchOrder(count, count, seed).of_step(0)
    prompts = [samples[i].ids[: answer_begins[i]].tobytes() for i in order]
    following = list(range(1, count + 1))
    # Around the circle twice: what follows the last one is known after the first time.
    for place in (*range(count - 1, -1, -1), *range(count - 1, -1, -1)):
        after = (place + 1) % count
        is_same = prompts[after] == prompts[place]
        following[place] = following[after] if is_same else after
    found = np.empty(count, np.int64)
    is_one_prompt = len(set(prompts)) == 1
    for place, sample in enumerate(order):
        partner = (place + 1) % count if is_one_prompt else following[place]
        found[sample] = order[partner]
    return found


@dataclass(frozen=True, eq=False)
class Mismatched:
    """Answers of other samples behind the prompts of these: what z0 is estimated from; item i is
    sample i's prompt with another one's answer.
    """

    samples: TokenSet
    partners: np.ndarray
    """int64 [samples]: whose answer it is (mismatched_partners)."""
    answer_begins: np.ndarray
    """int64 [samples]: the place of each sample's first target."""
    max_length: int
    """Tokens that are kept of prompt and answer together."""
    reference: Tensor
    """fp64 [samples], on the CPU: log-probabilities where training started."""

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, item: int) -> Tokens:
        """The tokens of an item, at most `max_length`."""
        own = self.samples[item]
        other = self.samples[int(self.partners[item])]
        begin = int(self.answer_begins[item])
        answer = slice(int(self.answer_begins[self.partners[item]]), None)
        return Tokens(
            np.concatenate([own.ids[:begin], other.ids[answer]]),
            np.concatenate([np.zeros(begin, np.bool_), other.targets[answer]]),
            images=tuple(use for use in own.images if use.end <= begin),
        ).cut(self.max_length)

    def lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of each item."""
        partners = self.partners[items]
        answers = self.samples.lengths[partners] - self.answer_begins[partners]
        return np.minimum(self.answer_begins[items] + answers, self.max_length).tolist()

    def members(self, items: Sequence[int]) -> list[int]:
        return list(items)

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        return share_out(self.lengths(items), world, limits)

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> AnswerBatch:
        reference = self.reference[torch.tensor(members, dtype=torch.int64)]
        return make_answers(
            [self.sample(i) for i in members], reference, device, keys, packed=packed
        )

    def loss_of(self, items: Sequence[int]) -> LossOf[AnswerBatch]:
        """No loss: the sum of what the answers have gained, fp64 [1], in nats."""

        def gained_of(model: nn.Module, own: AnswerBatch, scale: float) -> tuple[Tensor, Tensor]:
            logs, _ = answer_log_probabilities(model, own)
            gained = (logs - own.reference).sum()
            return gained * scale, taken_once(gained[None], own.batch.shared)

        return gained_of

    def with_reference(self, values: Tensor) -> Mismatched:
        return replace(self, reference=values)


@dataclass(frozen=True, eq=False)
class Labelled:
    """The loss on good and bad answers; item i is sample i."""

    samples: TokenSet
    reference: Tensor
    """fp64 [samples], on the CPU: the answers' log-probabilities where training started."""
    options: KtoOptions
    baseline: Mismatched | None
    """What z0 is estimated from; None: the loss takes 0."""

    @classmethod
    def without_values(
        cls, samples: TokenSet, options: KtoOptions, *, seed: int, max_length: int
    ) -> Labelled:
        """The objective before its reference is known."""
        nothing = torch.zeros(len(samples), dtype=torch.float64)
        if options.loss_type != "kto":
            return cls(samples, nothing, options, None)
        begins = np.array(
            [1 + int(np.argmax(sample.targets[1:])) for sample in samples], dtype=np.int64
        )
        partners = mismatched_partners(samples, begins, seed)
        mismatched = Mismatched(samples, partners, begins, max_length, nothing)
        return cls(samples, nothing, options, mismatched)

    def __len__(self) -> int:
        return len(self.samples)

    def lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of each item."""
        return self.samples.lengths[items].tolist()

    def members(self, items: Sequence[int]) -> list[int]:
        return list(items)

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        return share_out(self.lengths(items), world, limits)

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> LabelledBatch:
        reference = self.reference[torch.tensor(members, dtype=torch.int64)]
        answers = make_answers(
            [self.samples[i] for i in members], reference, device, keys, packed=packed
        )
        good = torch.from_numpy(self._good[members])
        return LabelledBatch(answers, good.to(device))

    def divisor(self, items: Sequence[int]) -> int:
        return len(items)

    def loss_of(
        self, items: Sequence[int], baseline: Tensor | None = None
    ) -> LossOf[LabelledBatch]:
        """`baseline`: the sums of the mismatched answers of these items, on the device; None:
        there are none. The loss's sums are those of a `LabelledSums`, fp64 [7].
        """
        count = len(items)

        def loss_of(model: nn.Module, own: LabelledBatch, scale: float) -> tuple[Tensor, Tensor]:
            logs, correct = answer_log_probabilities(model, own.answers)
            gained = logs - own.answers.reference
            gain = gained.new_zeros(()) if baseline is None else baseline[0] / count
            zero = gain.clamp(min=0)
            loss = kto_losses(gained, own.good, zero, self.options).sum()
            rewards = self.options.beta * gained.detach()
            logs = logs.detach()
            sums = [
                loss.detach(),
                (correct & own.good[own.answers.answers]).sum().double(),
                *((values * which).sum() for values in (rewards, logs) for which in _sides(own)),
                zero * len(own.good) / count,
            ]
            shared = own.answers.batch.shared
            return (loss * scale).float(), taken_once(torch.stack(sums), shared)

        return loss_of

    def read(self, sums: Sequence[float], items: Sequence[int]) -> LabelledSums:
        loss, correct, reward, bad_reward, logp, bad_logp, baseline = sums
        good = self._good[items]
        targets = int(self.samples.target_counts[items][good].sum())
        own = int(np.count_nonzero(good))
        return LabelledSums(
            loss,
            int(correct),
            (reward, bad_reward),
            (logp, bad_logp),
            baseline,
            own,
            len(items) - own,
            targets,
        )

    @property
    def parts(self) -> Sequence[Labelled | Mismatched]:
        """What has a reference."""
        return (self,) if self.baseline is None else (self, self.baseline)

    def with_reference(self, values: Sequence[Tensor]) -> Labelled:
        """`values`: of each part, fp64 [samples]."""
        own, *others = values
        baseline = self.baseline
        if baseline is not None:
            baseline = baseline.with_reference(others[0])
        return replace(self, reference=own, baseline=baseline)

    @cached_property
    def _good(self) -> np.ndarray:
        """bool [samples]."""
        assert self.samples.labels is not None, "its file has labels"
        return np.asarray(self.samples.labels)
