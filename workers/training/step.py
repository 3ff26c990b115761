"""One optimizer step's forward and backward, and one validation pass, over a rank's micro-batches.

The loss of a global batch is the mean over all its target tokens. Each rank knows that number from
the batch itself, so a rank's loss is its sum divided by it, times the number of ranks, which
averaging the gradients takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batches import Batch
from workers.data.row_parts import of_all_targets
from workers.layers.linear import use_keys
from workers.layers.noise import use_noise
from workers.layers.segments import CURRENT
from workers.model.head import (
    Losses,
    log_probabilities_in_head,
    logits_in_head,
    loss_in_head,
    works_in_chunks,
)
from workers.model.multimodal import causal_model
from workers.ranks.sharding import Gradients, reshard

B = TypeVar("B")
"""A micro-batch: of samples (`Batch`), or of pairs of answers."""

LossOf = Callable[[nn.Module, B, float], tuple[Tensor, Tensor]]
"""Function of model, micro-batch and scale: returns the sum of losses times the scale, fp32 for the
backward, and the sums to read, the loss first, fp64.
"""


@dataclass(frozen=True)
class Sums:
    """Sums over all target tokens of a global batch."""

    loss: float
    """Sum of cross entropies in nats."""
    correct: int
    """Targets that were the most likely token."""
    targets: int

    @classmethod
    def read(cls, sums: Tensor, targets: int) -> Sums:
        """The sums that `forward_backward` and `evaluate` return; waits until they are computed."""
        loss, correct = sums.tolist()
        return cls(loss, int(correct), targets)

    @property
    def is_impossible(self) -> bool:
        """Whether no model comes to these numbers.

        A sum of exactly 0 is none where each target is likelier than all other tokens by some 29
        nats: in fp32 its probability is 1 then, as a small batch of labels learned by heart may
        have it.
        """
        return self.loss == 0 and self.correct < self.targets

    @property
    def more(self) -> dict[str, float] | None:
        """None: supervised training has no other metrics (Metrics.more)."""
        return None

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.targets)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.targets)


def cross_entropies(model: nn.Module, batch: Batch, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The loss of supervised training (`LossOf`): the sum of cross entropies, and that and the
    correct targets, fp64 [2].
    """
    causal = causal_model(model)
    if works_in_chunks(causal):
        with loss_in_head(causal, batch.places, batch.targets, scale) as in_head:
            scaled = logits_of(model, batch)
        losses = in_head[0]
    else:
        losses = _of_whole_logits(logits_of(model, batch), batch)
        scaled = losses.loss * scale
    return scaled, torch.stack([losses.loss.detach().double(), losses.correct])


def forward_backward(
    model: nn.Module,
    batches: Iterable[B],
    global_targets: int,
    world: int,
    *,
    loss_of: LossOf[B] = cross_entropies,
    gradients: Gradients | None = None,
) -> Tensor:
    """Add a global batch's gradients to the adapters.

    Returns the sums of all ranks, as `loss_of` makes them: fp64, on the device, for which nothing
    has waited.

    `batches`: this rank's, at least one, each put together while the one before is computed.
    `global_targets`: what the loss is the mean of, over all ranks' micro-batches: targets, or
    pairs. `gradients`: those of the model; None: of one that has its ranks to itself.
    """
    gradients = gradients or Gradients(model, world)
    sums: Tensor | None = None
    for batch, last in _with_last(batches):
        gradients.begin(last)
        loss, losses = loss_of(model, batch, world / global_targets)
        gradients.backward(loss)
        sums = losses if sums is None else sums + losses
    assert sums is not None, "every rank has a micro-batch, if an empty one"
    gradients.reduce()
    return _over_ranks(sums, world)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[B], world: int, loss_of: LossOf[B] = cross_entropies
) -> Tensor:
    """The sums over all ranks' micro-batches, without gradients, as `forward_backward` returns
    them.
    """
    sums = sum(loss_of(model, batch, 1.0)[1] for batch in batches)
    assert isinstance(sums, Tensor), "every rank has a micro-batch, if an empty one"
    reshard(model)  # what a forward leaves gathered, only a backward would free
    return _over_ranks(sums, world)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, length, words], or what the head returns in their place."""
    use_keys(model, batch.keys)
    use_noise(model, batch.keys, batch.lengths)
    images = None if batch.images is None else batch.images.computed()
    part = None if batch.shared is None else batch.shared.part
    if batch.packing is None:
        CURRENT.use(None, lengths=batch.rows, device=batch.ids.device, images=images, part=part)
        if batch.positions is None:
            return model(input_ids=batch.ids).logits
        return model(input_ids=batch.ids, position_ids=batch.positions).logits
    packing = batch.packing
    CURRENT.use(packing.starts, packing.starts_on_device, packing.longest, images=images, part=part)
    return model(input_ids=batch.ids, position_ids=batch.positions).logits


def target_log_probabilities(
    model: nn.Module, batch: Batch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the batch's targets at a temperature, fp32 [targets], and which were the
    most likely token, bool [targets]; of a part those of the whole micro-batch.
    """
    logs, correct = _own_log_probabilities(model, batch, temperature)
    if batch.shared is None:
        return logs, correct
    return of_all_targets(logs, batch.shared), of_all_targets(correct.int(), batch.shared) > 0


def _own_log_probabilities(
    model: nn.Module, batch: Batch, temperature: float
) -> tuple[Tensor, Tensor]:
    causal = causal_model(model)
    if works_in_chunks(causal):
        with log_probabilities_in_head(
            causal, batch.places, batch.targets, temperature
        ) as likeliest:
            return logits_of(model, batch), likeliest[0]
    logs = _own_logits(logits_of(model, batch), batch).div_(temperature).log_softmax(dim=-1)
    return logs.gather(1, batch.targets[:, None]).squeeze(1), logs.detach().argmax(
        dim=-1
    ) == batch.targets


def target_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits before each target, fp32 [targets, words], and where the head allows it no
    others.
    """
    causal = causal_model(model)
    if works_in_chunks(causal):
        with logits_in_head(causal, batch.places):
            return logits_of(model, batch).float()
    return _own_logits(logits_of(model, batch), batch)


def last_logits(model: nn.Module, batch: Batch, lengths: Sequence[int]) -> Tensor:
    """The logits behind each sample's last token, [samples, words], and where the head allows it no
    others. `lengths`: of the samples.
    """
    row = int(batch.ids.shape[1])
    begins = (
        [0, *accumulate(lengths)]
        if batch.packing is not None
        else [row * i for i in range(len(lengths))]
    )
    last = [begin + length - 1 for begin, length in zip(begins, lengths, strict=False)]
    places = torch.tensor(last, dtype=torch.int64, device=batch.ids.device)
    causal = causal_model(model)
    if works_in_chunks(causal):
        with logits_in_head(causal, places):
            return logits_of(model, batch)
    return logits_of(model, batch).flatten(0, 1).index_select(0, places)


def _of_whole_logits(logits: Tensor, batch: Batch) -> Losses:
    """Losses of logits [rows, length, words]."""
    own = _own_logits(logits, batch)
    correct = (own.detach().argmax(dim=-1) == batch.targets).sum().double()
    return Losses(F.cross_entropy(own, batch.targets, reduction="sum"), correct)


def _own_logits(logits: Tensor, batch: Batch) -> Tensor:
    """The logits before each target, fp32 [targets, words], of logits [rows, length, words]."""
    return logits.flatten(0, 1).index_select(0, batch.places).float()


def _over_ranks(sums: Tensor, world: int) -> Tensor:
    if world > 1:
        dist.all_reduce(sums)
    return sums


def _with_last(batches: Iterable[B]) -> Iterator[tuple[B, bool]]:
    """Each, and whether it is the last. The next is made before this one is given away."""
    ahead = iter(batches)
    batch = next(ahead, None)
    while batch is not None:
        following = next(ahead, None)
        yield batch, following is None
        batch = following
