"""One optimizer step's forward and backward, and one validation pass, over a rank's micro-batches.

The loss of a global batch is the mean over all its target tokens. Each rank knows that number from the batch itself, so a
rank's loss is its sum divided by it, times the number of ranks, which averaging the gradients takes back.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.batches import IGNORED, Batch
from workers.model.linear import use_keys
from workers.parallel import average_unsharded_gradients, reshard, set_last_micro_batch


@dataclass(frozen=True)
class Sums:
    """Over all target tokens of a global batch."""

    loss: float
    """Sum of cross entropies in nats."""
    correct: int
    """Targets that were the most likely token."""
    targets: int

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.targets)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.targets)


def forward_backward(
    model: nn.Module, batches: Sequence[Batch], global_targets: int, world: int, *, keep_unsharded: bool = False
) -> Sums:
    """Add a global batch's gradients to the adapters; the sums of all ranks. `global_targets`: of all ranks' micro-batches.

    `keep_unsharded`: what was gathered for one micro-batch stays for the next.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0].ids.device)
    for i, batch in enumerate(batches):
        set_last_micro_batch(model, i == len(batches) - 1, keep_unsharded)
        use_keys(model, batch.keys)
        loss, counts = _losses(model, batch)
        (loss * (world / global_targets)).backward()
        sums += torch.stack([loss.detach().double(), *counts])
    average_unsharded_gradients(model, world)
    return _over_ranks(sums, world)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], world: int) -> Sums:
    """The sums over all ranks' micro-batches, without gradients."""
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0].ids.device)
    for batch in batches:
        loss, counts = _losses(model, batch)
        sums += torch.stack([loss.double(), *counts])
    reshard(model)  # what a forward leaves gathered, only a backward would free
    return _over_ranks(sums, world)


def _losses(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Sum of cross entropies (fp32 scalar), and the numbers of correct and of all targets (fp64 scalars)."""
    next_labels = batch.labels[:, 1:]
    # Logits only where some sample has a target: a prompt's positions need none, and the vocabulary is the widest dimension.
    kept = (next_labels != IGNORED).any(dim=0).nonzero().squeeze(1)
    if not len(kept):
        kept = torch.zeros(1, dtype=torch.int64, device=batch.ids.device)
    if _can_choose_logits(type(_causal_model(model))):
        logits = model(input_ids=batch.ids, logits_to_keep=kept).logits
    else:
        logits = model(input_ids=batch.ids).logits[:, kept]
    logits = logits.flatten(0, 1).float()
    labels = next_labels[:, kept].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    is_target = labels != IGNORED
    correct = (logits.detach().argmax(dim=-1) == labels) & is_target
    return loss, [correct.sum().double(), is_target.sum().double()]


def _causal_model(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@lru_cache
def _can_choose_logits(architecture: type[nn.Module]) -> bool:
    """Whether it takes `logits_to_keep`; one that does not would swallow it and return all logits."""
    return "logits_to_keep" in inspect.signature(architecture.forward).parameters


def _over_ranks(sums: Tensor, world: int) -> Sums:
    if world > 1:
        dist.all_reduce(sums)
    loss, correct, targets = sums.tolist()
    return Sums(loss, int(correct), int(targets))
