"""Losses on pairs: of two answers to the same conversation the preferred one is to gain on the
other.

In direct preference optimisation it counts by how much each answer has become likelier than it was
for the model that training started from, its reference (reference_logprobs.py); in SimPO and ORPO
how likely it is. The loss of a global batch is the mean over its pairs; with `rpo_alpha`, plus that
times the mean cross entropy over the tokens of its preferred answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ft_service.data.tokens.sample import Tokens
from ft_service.spec import DpoOptions, OrpoOptions, PairOptions, SimpoOptions
from workers.data.batches import Batch, make_batch
from workers.data.row_parts import taken_once
from workers.ranks.context_group import ContextGroup
from workers.training.step import LossOf, target_log_probabilities

REWARDS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Means over pairs, in the field's words.

A reward is beta times by how much an answer's log-probability exceeds that of the reference,
without reference beta times the mean log-probability of its tokens;
accuracies: the share of pairs whose preferred answer has the larger one; logps: of whole answers,
in nats.
"""


CERTAIN = -1e-9
"""Highest mean log-probability whose odds are taken."""


@dataclass(frozen=True)
class AnswerBatch:
    """A micro-batch of answers; of pairs, samples 2i and 2i + 1 are the preferred and the other
    answer of pair i.
    """

    batch: Batch
    answers: Tensor
    """int64 [targets]: which sample each target is of."""
    counts: Tensor
    """int64 [samples]: targets of each one."""
    reference: Tensor
    """fp64 [samples]: log-probabilities of the answers by the reference; while these are computed,
    and for losses without reference, zeros.
    """

    def part_of(self, own: ContextGroup) -> AnswerBatch:
        """The same answers, of whose tokens this rank has a part."""
        return replace(self, batch=self.batch.part_of(own))


def make_answers(
    samples: Sequence[Tokens],
    reference: Tensor,
    device: torch.device,
    keys: Sequence[int] | None = None,
    *,
    packed: bool = True,
) -> AnswerBatch:
    """Answers as a micro-batch.

    `samples`: of whole pairs, if they are pairs; `reference`: fp64 [samples], on the CPU; `keys`:
    as in make_batch.
    """
    counts = torch.tensor([sample.target_count for sample in samples], dtype=torch.int64)
    answers = torch.repeat_interleave(torch.arange(len(samples)), counts)
    batch = make_batch(samples, device, keys, packed=packed)
    return AnswerBatch(batch, answers.to(device), counts.to(device), reference.to(device))


@dataclass(frozen=True)
class PairSums:
    """Sums over the pairs of a global batch."""

    loss: float
    """Sum over the pairs, in nats; for ipo, of squares."""
    correct: int
    """Targets of preferred answers that were the most likely token."""
    rewards: tuple[float, ...]
    """Sums in the order of REWARDS."""
    pairs: int
    targets: int
    """Number of target tokens in preferred answers."""

    is_impossible = False
    """The loss of pairs falls without jumps as the model prefers the right answers."""

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.pairs)

    @property
    def accuracy(self) -> float:
        """Share of the preferred answers' target tokens that were the most likely ones."""
        return self.correct / max(1, self.targets)

    @property
    def more(self) -> dict[str, float]:
        """Means, by their names."""
        return {
            name: value / max(1, self.pairs)
            for name, value in zip(REWARDS, self.rewards, strict=True)
        }


def answer_log_probabilities(model: nn.Module, own: AnswerBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answers, fp64 [samples], and which targets were the most likely
    token, bool [targets].
    """
    logs, correct = target_log_probabilities(model, own.batch)
    # In a row for each answer and then summed: adding up in place takes another order each time on
    # a GPU.
    counts = own.counts
    firsts = counts.cumsum(0) - counts
    places = torch.arange(len(logs), device=logs.device) - firsts.index_select(0, own.answers)
    batch = own.batch
    longest = batch.row_length if batch.packing is None else batch.packing.longest
    rows = logs.new_zeros(len(counts), longest, dtype=torch.float64)
    rows = rows.index_put((own.answers, places), logs.double())
    return rows.sum(dim=1), correct


def dpo_losses(gained: Tensor, counts: Tensor, options: DpoOptions) -> Tensor:
    """The loss of every pair, [pairs].

    `gained`: [pairs, 2], preferred answers first, by how much each answer's log-probability exceeds
    that of the reference; `counts`: their tokens. With w the gain of the preferred answer, l that
    of the other, h = w - l, s the logistic function and e = label_smoothing:

        sigmoid       -(1 - e) log s(beta h) - e log s(-beta h)
                      DPO, arXiv 2305.18290; with e conservative DPO
        sigmoid_norm  -log s(beta h), gains divided by their answers' tokens; arXiv 2411.15124
        ipo           (h - 1 / (2 beta))^2, gains likewise; arXiv 2310.12036
        hinge         max(0, 1 - beta h); arXiv 2305.10425
        robust        (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e); arXiv 2403.00409
        apo_zero      1 - s(beta w) + s(beta l); arXiv 2408.06266
        apo_down      s(beta w) + 1 - s(beta h); arXiv 2408.06266
    """
    if options.loss_type in ("ipo", "sigmoid_norm"):
        gained = gained / counts.clamp(min=1)
    beta = options.beta
    wrong = options.label_smoothing
    scaled = beta * (gained[:, 0] - gained[:, 1])
    match options.loss_type:
        case "sigmoid":
            return -(1 - wrong) * F.logsigmoid(scaled) - wrong * F.logsigmoid(-scaled)
        case "sigmoid_norm":
            return -F.logsigmoid(scaled)
        case "ipo":
            return (gained[:, 0] - gained[:, 1] - 1 / (2 * beta)).square()
        case "hinge":
            return F.relu(1 - scaled)
        case "robust":
            right = -(1 - wrong) * F.logsigmoid(scaled)
            return (right + wrong * F.logsigmoid(-scaled)) / (1 - 2 * wrong)
        case "apo_zero":
            return F.sigmoid(-beta * gained[:, 0]) + F.sigmoid(beta * gained[:, 1])
        case "apo_down":
            return F.sigmoid(beta * gained[:, 0]) + F.sigmoid(-scaled)


def simpo_losses(means: Tensor, options: SimpoOptions) -> Tensor:
    """The loss of every pair, [pairs]: -log s(beta (w - l) - gamma); arXiv 2405.14734.

    `means`: [pairs, 2], w and l, mean log-probabilities of the answers' tokens, preferred first.
    """
    return -F.logsigmoid(options.beta * (means[:, 0] - means[:, 1]) - options.gamma)


def orpo_losses(means: Tensor, options: OrpoOptions) -> Tensor:
    """The loss of every pair, [pairs]: -w - beta log s(log(odds(w) / odds(l))), where odds(x) =
    exp(x) / (1 - exp(x)); arXiv 2403.07691.

    `means`: as in `simpo_losses`. A mean of 0, of an answer that is certain, counts as CERTAIN.
    """
    below = means.clamp(max=CERTAIN)
    log_odds = below - torch.log(-torch.expm1(below))
    return -means[:, 0] - options.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def pair_losses(
    logs: Tensor, reference: Tensor, counts: Tensor, options: PairOptions
) -> tuple[Tensor, Tensor]:
    """The loss of every pair, [pairs], and the rewards of its answers, [pairs, 2].

    All of [pairs, 2], preferred answers first.

    `logs`, `reference`: log-probabilities of the answers; `counts`: their tokens. SimPO and ORPO
    do not read `reference`.
    """
    if isinstance(options, DpoOptions):
        gained = logs - reference
        return dpo_losses(gained, counts, options), options.beta * gained.detach()
    means = logs / counts.clamp(min=1)
    rewards = options.beta * means.detach()
    if isinstance(options, SimpoOptions):
        return simpo_losses(means, options), rewards
    return orpo_losses(means, options), rewards


def preference_loss(options: PairOptions, pairs: int, targets: int) -> LossOf[AnswerBatch]:
    """The loss of a global batch of so many pairs and target tokens of preferred answers
    (`LossOf`): the sums are those of a `PairSums`, fp64 [8].
    """
    weight = (options.rpo_alpha or 0.0) if isinstance(options, DpoOptions) else 0.0
    of_words = weight * pairs / max(1, targets)

    def loss_of(model: nn.Module, own: AnswerBatch, scale: float) -> tuple[Tensor, Tensor]:
        of_answers, correct = answer_log_probabilities(model, own)
        logs = of_answers.view(-1, 2)
        losses, rewards = pair_losses(
            logs, own.reference.view(-1, 2), own.counts.view(-1, 2), options
        )
        loss = losses.sum() - of_words * logs[:, 0].sum()
        right = (correct & (own.answers % 2 == 0)).sum()
        margins = rewards[:, 0] - rewards[:, 1]
        of_pairs = [
            rewards.sum(0),
            margins.sum()[None],
            (margins > 0).sum()[None],
            logs.detach().sum(0),
        ]
        sums = torch.cat(
            [loss.detach()[None], right.double()[None], *(part.double() for part in of_pairs)]
        )
        return (loss * scale).float(), taken_once(sums, own.batch.shared)

    return loss_of
