"""The samples of each step, and how ranks share them: pure functions of (seed, step); a resume
needs only the step.

An epoch is a permutation of all samples, cut into batches; the last batch of an epoch may be
smaller. A step's batch is the same list whatever the world size; `workers.data.micro_batches`
shares it out between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ft_service.data.tokens.sample import Tokens
from ft_service.kernel_limits import filled_row
from workers.data.row_parts import SharedRows
from workers.images.features import CURRENT_IMAGES
from workers.layers.dropout import keys_from
from workers.layers.segments import ImageInputs
from workers.ranks.context_group import ContextGroup


@dataclass(frozen=True)
class Batch:
    """A micro-batch: rows of one padded sample each, or one row of packed ones."""

    ids: Tensor
    """int64 [rows, length]."""
    places: Tensor
    """int64 [targets]: the positions, counted through all rows, whose next token is a target."""
    targets: Tensor
    """int64 [targets]: these next tokens."""
    packing: Packing | None = None
    """None: a row is one sample, padded at the end."""
    rows: tuple[int, ...] = ()
    """Tokens of each padded row's sample."""
    keys: Tensor | None = None
    """int32 [rows, length]: the key of every token, from which follows what is random about it.

    None: nothing is.
    """
    lengths: Tensor | None = None
    """fp32 [rows, length]: tokens of every token's sample, for noise. None without keys."""
    positions: Tensor | None = None
    """int64 [rows, length], or [axes, rows, length] of bases that give pictures several axes: of
    every token in its own sample. None: tokens of padded rows are numbered from 0.
    """
    images: ImageInputs | None = None
    """None: the samples have no pictures."""
    shared: SharedRows | None = None
    """What of its rows this rank has; samples and packing are those of whole rows. None: all."""

    @property
    def row_length(self) -> int:
        """Tokens of a row, of which the rank may have a part."""
        return int(self.ids.shape[1]) if self.shared is None else self.shared.length

    def part_of(self, own: ContextGroup) -> Batch:
        """This rank's part of a micro-batch that all ranks of its group have made, without
        pictures.
        """
        assert self.images is None, "a row with pictures is not shared"
        shared = SharedRows.of(own, self.row_length, self.places)
        packing = self.packing
        return replace(
            self,
            ids=shared.cut(self.ids),
            places=shared.places,
            targets=self.targets.index_select(0, shared.kept),
            packing=None if packing is None else packing.filled_by(shared.filled),
            keys=None if self.keys is None else shared.cut(self.keys),
            lengths=None if self.lengths is None else shared.cut(self.lengths, 1.0),
            positions=shared.positions(self.positions, len(self.ids), self.ids.device),
            shared=shared,
        )


@dataclass(frozen=True)
class Packing:
    """Where the samples of a packed row are."""

    starts: Tensor
    """int32 [samples + 1], on the CPU: the first token of each sample, and the row's length."""
    starts_on_device: Tensor
    longest: int
    """Tokens of the longest sample."""

    def filled_by(self, tokens: int) -> Packing:
        """The same with so many tokens more, in a sample of their own."""
        if not tokens:
            return self
        starts, on_device = (
            torch.cat([own, own[-1:] + tokens]) for own in (self.starts, self.starts_on_device)
        )
        return Packing(starts, on_device, max(self.longest, tokens))


BATCHES_SORTED = 50
"""So many batches are sorted by length together: more, and an epoch's long samples would all stand
in few of them.
"""


def total_steps(samples: int, batch_size: int, n_epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of a job."""
    return max_steps if max_steps is not None else n_epochs * steps_per_epoch(samples, batch_size)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    return -(-samples // batch_size)


def batch_of_step(
    step: int, samples: int, batch_size: int, seed: int, lengths: TokenCounts | None = None
) -> list[int]:
    """The sample numbers that optimizer step `step` (from 0) trains on, in an order that only the
    seed decides, or with `lengths` these as well: a batch's samples are then of like length.
    """
    epoch, position = divmod(step, steps_per_epoch(samples, batch_size))
    by_length = lengths is not None
    order = (
        _order_by_length(lengths, batch_size, seed, epoch)
        if by_length
        else _epoch_order(samples, seed, epoch)
    )
    return order[position * batch_size : (position + 1) * batch_size]


@lru_cache(maxsize=2)
def _epoch_order(samples: int, seed: int, epoch: int) -> list[int]:
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(samples, generator=generator).tolist()


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Tokens of every sample, int64 [samples]."""

    tokens: np.ndarray


@dataclass(frozen=True)
class BatchOrder:
    """Which samples, or items of several samples, each optimizer step of a job trains on."""

    count: int
    """Samples, or items."""
    batch_size: int
    seed: int
    lengths: TokenCounts | None = None
    """None: a batch may hold any lengths."""

    def of_step(self, step: int) -> list[int]:
        """The numbers of step `step` (from 0), as `batch_of_step`."""
        return batch_of_step(step, self.count, self.batch_size, self.seed, self.lengths)

    def of_first(self, steps: int) -> list[int]:
        """The numbers that the first steps read, each once, ascending."""
        if steps >= steps_per_epoch(self.count, self.batch_size):
            return list(range(self.count))
        return sorted(number for step in range(steps) for number in self.of_step(step))


@lru_cache(maxsize=2)
def _order_by_length(lengths: TokenCounts, batch_size: int, seed: int, epoch: int) -> list[int]:
    """The epoch's order, of which every window of some batches is sorted by length and cut into
    batches, whose order is drawn again. A batch that is not full is the last.
    """
    tokens = lengths.tokens
    order = _epoch_order(len(tokens), seed, epoch)
    full = len(order) // batch_size * batch_size
    batches: list[list[int]] = []
    for begin in range(0, full, batch_size * BATCHES_SORTED):
        window = order[begin : min(begin + batch_size * BATCHES_SORTED, full)]
        window.sort(key=lambda sample: (-int(tokens[sample]), sample))
        batches += [
            window[first : first + batch_size] for first in range(0, len(window), batch_size)
        ]
    drawn = _epoch_order(len(batches), seed, epoch)
    return [sample for number in drawn for sample in batches[number]] + order[full:]


def make_batch(
    samples: Sequence[Tokens],
    device: torch.device,
    keys: Sequence[int] | None = None,
    *,
    packed: bool = True,
) -> Batch:
    """Samples as a micro-batch, packed or padded."""
    return (pack if packed else collate)(samples, device, keys)


def collate(
    samples: Sequence[Tokens], device: torch.device, keys: Sequence[int] | None = None
) -> Batch:
    """Samples as rows, padded to the longest.

    Without samples: one row of two tokens without a target, which keeps the rank in the
    collectives.

    Padding is at the end and attention is causal, so no target sees it and its token id does not
    matter. `keys`: of the samples, for dropout and noise.
    """
    length = max((len(s.ids) for s in samples), default=2)
    ids = np.zeros((max(1, len(samples)), length), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
    places, targets = _targets(samples, [row * length for row in range(len(samples))])
    of_tokens = own_lengths = None
    if keys is not None:
        rows = [keys_from(key, length, device) for key in (*keys, 0)]
        of_tokens = torch.stack(rows[: len(ids)])
        lengths = np.array([len(s.ids) for s in samples] or [length], dtype=np.float32)
        own_lengths = _moved(np.repeat(lengths[:, None], length, axis=1), device)
    on_device = (_moved(ids, device), _moved(places, device), _moved(targets, device))
    own = tuple(len(s.ids) for s in samples) or (length,)
    batch = Batch(*on_device, rows=own, keys=of_tokens, lengths=own_lengths)
    return _with_pictures(batch, samples, [row * length for row in range(len(samples))])


def pack(
    samples: Sequence[Tokens], device: torch.device, keys: Sequence[int] | None = None
) -> Batch:
    """Samples concatenated to one row, filled up by one without targets (`filled_row`). Without
    samples as `collate`. `keys`: of the samples.
    """
    lengths = [len(s.ids) for s in samples] or [2]
    more = filled_row(sum(lengths)) - sum(lengths)
    own = [s.ids for s in samples] or [np.zeros(2)]
    if keys is not None:
        keys = [*(keys or (0,)), *[0] * (more > 0)]
    if more:
        lengths.append(more)
        own.append(np.zeros(more))
    ids = np.concatenate(own).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places, targets = _targets(samples, starts.tolist())
    positions = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
    on_device = _moved(starts, device)
    packing = Packing(torch.from_numpy(starts), on_device, max(lengths))
    of_tokens = own_lengths = None
    if keys is not None:
        rows = [keys_from(key, length, device) for key, length in zip(keys, lengths, strict=True)]
        of_tokens = torch.cat(rows)[None]
        own_lengths = _moved(np.repeat(np.array(lengths, dtype=np.float32), lengths)[None], device)
    in_row = (_moved(ids[None], device), _moved(places, device), _moved(targets, device))
    batch = Batch(
        *in_row,
        packing,
        keys=of_tokens,
        lengths=own_lengths,
        positions=_moved(positions[None], device),
    )
    return _with_pictures(batch, samples, starts[: len(samples)].tolist())


def _with_pictures(batch: Batch, samples: Sequence[Tokens], begins: Sequence[int]) -> Batch:
    """A micro-batch with the pictures of its samples. `begins`: the places of their first tokens,
    counted through all rows.
    """
    pictured = CURRENT_IMAGES.of(samples)
    if pictured is None:
        return batch
    device = batch.ids.device
    width = int(batch.ids.shape[1])
    positions = pictured.positions(samples, None if batch.packing is not None else width)
    if positions is not None and positions.shape[-1] < width:  # the tokens that fill the row
        more = torch.arange(width - positions.shape[-1]).expand(*positions.shape[:-1], -1)
        positions = torch.cat([positions, more], dim=-1)
    return replace(
        batch,
        positions=batch.positions if positions is None else positions.to(device),
        images=pictured.inputs(samples, begins, device),
    )


def _targets(samples: Sequence[Tokens], starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Positions before each target, counted from the start of its sample's row, and the targets.

    A sample's first token has none before it.
    """
    before = [np.flatnonzero(s.targets[1:]) for s in samples]
    none = np.zeros(0, dtype=np.int64)
    places = np.concatenate(
        [none, *(own + start for own, start in zip(before, starts, strict=False))]
    )
    targets = np.concatenate(
        [none, *(s.ids[own + 1].astype(np.int64) for s, own in zip(samples, before, strict=True))]
    )
    return places, targets


def _moved(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device; the copy to a GPU runs while the host continues."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
