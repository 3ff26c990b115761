"""The data and loss of a job: single samples, or pairs; kto.py has answers with labels.

The loop knows items; an objective knows their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.windows import Rows, are_whole, in_rows
from ft_service.spec import JobSpec, PairOptions
from workers.data.batches import Batch, BatchOrder, TokenCounts, make_batch
from workers.data.micro_batches import MicroBatchLimits, Rounds, share_out, share_out_pairs
from workers.ranks.context_group import ContextGroup
from workers.ranks.runtime import Runtime
from workers.training.preference import AnswerBatch, PairSums, make_answers, preference_loss
from workers.training.step import LossOf, Sums, cross_entropies, evaluate


class BatchSums(Protocol):
    """The sums over a global batch, read."""

    @property
    def loss(self) -> float: ...
    @property
    def targets(self) -> int: ...
    @property
    def mean_loss(self) -> float: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def is_impossible(self) -> bool: ...
    @property
    def more(self) -> dict[str, float] | None: ...


class Shared(Protocol):
    """Items that the ranks share out in micro-batches."""

    def members(self, items: Sequence[int]) -> list[int]:
        """The numbers of the items' samples, in their order."""
        ...

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        """The micro-batches of all ranks, as positions in `items`."""
        ...

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> Any:
        """The samples of whole items as a micro-batch, for the loss; its `part_of` is what a rank
        has of it.

        `keys`: of the samples, for dropout.
        """
        ...


class Baseline(Shared, Protocol):
    """Items of which sums are taken before the loss of the objective's items of these numbers."""

    def loss_of(self, items: Sequence[int]) -> LossOf[Any]: ...


class Answers(Shared, Protocol):
    """Items of answers whose log-probabilities by the reference are computed: `micro_batch` makes
    an AnswerBatch, or what has one as `answers`.
    """

    def __len__(self) -> int: ...

    def lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of each item."""
        ...


class Objective(Shared, Protocol):
    """The data of a job, as items, with the loss that is taken of them."""

    @property
    def samples(self) -> TokenSet: ...

    def __len__(self) -> int:
        """Items."""
        ...

    def divisor(self, items: Sequence[int]) -> int:
        """What the loss of a global batch of these is the mean over: targets, pairs, or answers."""
        ...

    @property
    def baseline(self) -> Baseline | None:
        """What is computed of the items of a global batch before their loss, without gradients.

        None: nothing.
        """
        ...

    def loss_of(self, items: Sequence[int], baseline: Tensor | None = None) -> LossOf[Any]:
        """`baseline`: the sums of `self.baseline` over all micro-batches, on the device."""
        ...

    def read(self, sums: Sequence[float], items: Sequence[int]) -> BatchSums:
        """What `loss_of` summed up over all micro-batches of a global batch."""
        ...


@dataclass(frozen=True)
class Supervised:
    """Cross entropy; an item is a sample."""

    samples: TokenSet

    baseline = None

    def __len__(self) -> int:
        return len(self.samples)

    def members(self, items: Sequence[int]) -> list[int]:
        return list(items)

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        return share_out(self.samples.lengths[items].tolist(), world, limits)

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> Batch:
        return make_batch([self.samples[i] for i in members], device, keys, packed=packed)

    def divisor(self, items: Sequence[int]) -> int:
        return int(self.samples.target_counts[items].sum())

    def loss_of(self, items: Sequence[int], baseline: Tensor | None = None) -> LossOf[Batch]:
        return cross_entropies

    def read(self, sums: Sequence[float], items: Sequence[int]) -> Sums:
        loss, correct = sums
        return Sums(loss, int(correct), self.divisor(items))


@dataclass(frozen=True)
class WholeRows(Supervised):
    """Cross entropy of what is learned whole; an item is a row of concatenated samples, which do
    not see each other.
    """

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def members(self, items: Sequence[int]) -> list[int]:
        return [sample for item in items for sample in self.rows[item]]

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        lengths = self.samples.lengths
        return share_out([int(lengths[self.rows[item]].sum()) for item in items], world, limits)

    def divisor(self, items: Sequence[int]) -> int:
        return int(self.samples.target_counts[self.members(items)].sum())


def supervised(samples: TokenSet, spec: JobSpec, *, packed: bool) -> Supervised:
    """The objective of supervised training: full rows of what is learned whole if it is packed,
    else samples.
    """
    if not (packed and are_whole(samples)):
        return Supervised(samples)
    return WholeRows(samples, in_rows(samples.lengths.tolist(), spec.training.max_length))


@dataclass(frozen=True)
class Preference:
    """A loss on pairs of answers; item i is the pair of samples 2i and 2i + 1."""

    samples: TokenSet
    reference: Tensor
    """fp64 [samples], on the CPU: the answers' log-probabilities where training started
    (reference_logprobs.py); zeros for losses without reference.
    """
    options: PairOptions

    baseline = None

    @classmethod
    def without_reference(cls, samples: TokenSet, options: PairOptions) -> Preference:
        """The objective of a loss that does not compare with the model that training starts
        from.
        """
        return cls(samples, torch.zeros(len(samples), dtype=torch.float64), options)

    def __len__(self) -> int:
        return len(self.samples) // 2

    def members(self, items: Sequence[int]) -> list[int]:
        return [2 * i + side for i in items for side in (0, 1)]

    def lengths(self, items: Sequence[int]) -> list[int]:
        """Tokens of each item."""
        of_pairs = self.samples.lengths.reshape(-1, 2).sum(axis=1)
        return of_pairs[np.asarray(items, dtype=np.int64)].tolist()

    def share_out(self, items: Sequence[int], world: int, limits: MicroBatchLimits) -> Rounds:
        lengths = self.samples.lengths.reshape(-1, 2)[np.asarray(items, dtype=np.int64)].tolist()
        return share_out_pairs([(one, other) for one, other in lengths], world, limits)

    def micro_batch(
        self, members: Sequence[int], device: torch.device, keys: Sequence[int] | None, packed: bool
    ) -> AnswerBatch:
        reference = self.reference[torch.tensor(members, dtype=torch.int64)]
        return make_answers(
            [self.samples[i] for i in members], reference, device, keys, packed=packed
        )

    def divisor(self, items: Sequence[int]) -> int:
        return len(items)

    def loss_of(self, items: Sequence[int], baseline: Tensor | None = None) -> LossOf[AnswerBatch]:
        return preference_loss(self.options, len(items), self._targets(items))

    def read(self, sums: Sequence[float], items: Sequence[int]) -> PairSums:
        loss, correct, *rewards = sums
        return PairSums(loss, int(correct), tuple(rewards), len(items), self._targets(items))

    @property
    def parts(self) -> Sequence[Preference]:
        """What has a reference."""
        return (self,)

    def with_reference(self, values: Sequence[Tensor]) -> Preference:
        """`values`: of each part, fp64 [samples]."""
        return replace(self, reference=values[0])

    def _targets(self, items: Sequence[int]) -> int:
        """Number of target tokens in the preferred answers."""
        return int(self.samples.target_counts[[2 * i for i in items]].sum())


def batch_order(data: Objective, spec: JobSpec) -> BatchOrder:
    """Which items of the training data each step trains on."""
    lengths = None
    if spec.training.group_by_length:
        together = len(data.members([0]))
        # Of several samples that of the longest, to which the others are padded.
        lengths = TokenCounts(data.samples.lengths.reshape(-1, together).max(axis=1))
    return BatchOrder(len(data), spec.training.batch, spec.seed, lengths)


@dataclass(frozen=True)
class RankShare:
    """What decides which micro-batches of a global batch a rank computes, and which part of
    them.
    """

    rank: int
    world: int
    device: torch.device
    limits: MicroBatchLimits
    context: ContextGroup | None = None
    """The ranks that share every row with this one; None: it has whole rows."""

    @classmethod
    def of(cls, runtime: Runtime, limits: MicroBatchLimits) -> RankShare:
        return cls(runtime.rank, runtime.world, runtime.device, limits, runtime.context)

    def members(self, objective: Shared, items: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the samples in each micro-batch."""
        ranks = 1 if self.context is None else self.context.ranks
        limits = replace(self.limits, tokens=ranks * self.limits.tokens)
        for micro in objective.share_out(items, self.world // ranks, limits):
            yield objective.members([items[i] for i in micro[self.rank // ranks]])

    def batches(
        self, objective: Shared, items: Sequence[int], key: Callable[[int], int] | None = None
    ) -> Iterator[Any]:
        """The micro-batches. `key` returns a sample's key for dropout and noise; None: nothing is
        random.
        """
        for own in self.members(objective, items):
            keys = None if key is None else [key(i) for i in own]
            batch = objective.micro_batch(own, self.device, keys, self.limits.packed)
            yield batch if self.context is None else batch.part_of(self.context)


def loss_with_baseline(
    model: nn.Module,
    objective: Objective,
    items: Sequence[int],
    world: int,
    batches: Callable[[Shared, Sequence[int]], Iterator[Any]],
) -> LossOf[Any]:
    """The loss of a global batch, whose baseline is computed first. Called by all ranks together.

    `batches`: this rank's micro-batches of items, without keys. The model is as it was afterwards.
    """
    baseline = objective.baseline
    if baseline is None:
        return objective.loss_of(items)
    training = model.training
    model.eval()  # so that the same weights make the same baseline, as the reference was computed
    sums = evaluate(model, batches(baseline, items), world, baseline.loss_of(items))
    model.train(training)
    return objective.loss_of(items, sums)
