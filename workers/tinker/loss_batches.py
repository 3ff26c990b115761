"""The micro-batches of a call of forward or forward_backward, and its sums over the ranks.

Data are counted from the last optimizer step. `per_device_train_batch_size` of them (usually one)
follow each other in a micro-batch, and micro-batches go round the ranks, so that a call of eight
data computes what two of four do, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ft_service.data.tokens.sample import Tokens
from ft_service.tinker.loss_calls import Datum, LossCall
from workers.data.batches import Batch, make_batch
from workers.tinker.losses import LOSSES, SIZES
from workers.training.step import target_log_probabilities


def share_out(count: int, before: int, world: int, together: int) -> list[list[list[int]]]:
    """The micro-batches of `count` data in rounds, [rounds][ranks][data], as positions in the call.

    Pure.

    `before`: data since the last optimizer step. `together`: most data of a micro-batch. A rank
    without one in a round has an empty one, so that all ranks meet in the collectives.
    """
    of_rank: list[list[list[int]]] = [[] for _ in range(world)]
    previous = -1
    for position in range(count):
        number = (before + position) // together
        own = of_rank[number % world]
        if number != previous:
            own.append([])
        own[-1].append(position)
        previous = number
    rounds = max(len(own) for own in of_rank)
    return [[own[i] if i < len(own) else [] for own in of_rank] for i in range(rounds)]


@dataclass(frozen=True)
class LossBatch:
    """A micro-batch with what its loss is taken of."""

    batch: Batch
    """Its places and targets are those of the data: [targets], of all data one after the other."""
    inputs: Mapping[str, Tensor]
    """fp32 [targets]."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each datum's targets."""


def make_loss_batch(data: Sequence[Datum], device: torch.device, *, packed: bool) -> LossBatch:
    """Data as a micro-batch, packed or padded. Without data: an empty one."""
    samples = [
        Tokens(
            datum.ids.astype(np.int32), np.zeros(len(datum.ids), dtype=bool), images=datum.images
        )
        for datum in data
    ]
    batch = make_batch(samples, device, packed=packed)
    width = int(batch.ids.shape[1])
    begins = (
        np.cumsum([0, *(len(datum.ids) for datum in data)])
        if packed
        else width * np.arange(len(data) + 1)
    )
    places = [
        begin + np.repeat(np.arange(len(datum.ids)), datum.targets.size // len(datum.ids))
        for begin, datum in zip(begins, data, strict=False)
    ]
    names = data[0].inputs.keys() if data else ()
    return LossBatch(
        replace(
            batch,
            places=_moved(places, np.int64, device),
            targets=_moved([d.targets for d in data], np.int64, device),
        ),
        {
            name: _moved([datum.inputs[name] for datum in data], np.float32, device)
            for name in names
        },
        tuple(datum.targets.shape for datum in data),
    )


def loss_and_logprobs(
    model: nn.Module, own: LossBatch, call: LossCall, temperature: float = 1.0
) -> tuple[Tensor, list[float], list[np.ndarray]]:
    """The loss of a micro-batch, fp32 [], for a backward; and of each datum the sum of its losses
    and the log-probabilities of its targets, fp32 of their shape. `temperature`: of the
    log-probabilities, also of those that the call holds.
    """
    logs, _ = target_log_probabilities(model, own.batch, temperature)
    if not own.shapes:
        return logs.sum(), [], []
    sizes = [int(np.prod(shape)) for shape in own.shapes]
    inputs = {**own.inputs, SIZES: torch.tensor(sizes)}
    losses = LOSSES[call.loss_fn](logs, inputs, call.config)
    of_data = zip(
        losses.detach().double().split(sizes),
        logs.detach().float().cpu().split(sizes),
        own.shapes,
        strict=True,
    )
    read = [
        (float(each.sum()), logprobs.numpy().reshape(shape)) for each, logprobs, shape in of_data
    ]
    return losses.sum(), [loss for loss, _ in read], [logprobs for _, logprobs in read]


def _moved(parts: Sequence[np.ndarray], dtype: type, device: torch.device) -> Tensor:
    flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)
    return torch.from_numpy(flat.astype(dtype)).to(device)
