"""The part that a rank has of a micro-batch whose rows several ranks share
(distributed.context_parallel): other tokens of the same sums.

    row          padded to a multiple of the ranks, in packed rows by a sample without targets
    part         as many tokens of each row for every rank, one rank's behind the other's
    target       belongs to the part with the token before it, whose logits are asked for it
    positions,   those in the whole sample, so that a token is rotated, dropped out and given noise
    keys         as on a rank that has all of it

What is a sum over tokens adds up over the ranks as it does over micro-batches. What is a function
of a sample's sum, such as a preference, takes all targets' values from all ranks, and each rank's
backward goes through its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from workers.layers.segments import RowPart
from workers.ranks.context_group import ContextGroup


@dataclass(frozen=True)
class SharedRows:
    """A micro-batch of which each of several ranks has a part."""

    part: RowPart
    """This rank's part of each row."""
    length: int
    """Tokens of a whole row."""
    targets: int
    """Of all parts."""
    kept: Tensor
    """int64 [targets]: which of these are the part's."""
    places: Tensor
    """int64 [targets]: the positions of these in the part, counted through its rows."""

    @classmethod
    def of(cls, own: ContextGroup, length: int, places: Tensor) -> SharedRows:
        """`length`: tokens of a row; `places`: int64 [targets], the positions of all targets,
        counted through all rows.

        On a GPU the host waits until it knows which are the part's.
        """
        part = RowPart(own.rank, own.ranks, -(-length // own.ranks), own.group)
        place = places % length - part.first
        kept = ((place >= 0) & (place < part.length)).nonzero().flatten()
        in_part = (places // length * part.length + place).index_select(0, kept)
        return cls(part, length, len(places), kept, in_part)

    @property
    def filled(self) -> int:
        """Tokens by which a row is padded."""
        return self.part.ranks * self.part.length - self.length

    @property
    def reports(self) -> bool:
        """Whether this rank is the one that reports on the whole micro-batch."""
        return self.part.rank == 0

    def cut(self, tensor: Tensor, value: float = 0) -> Tensor:
        """The part of [rows, length], in memory of its own. `value`: of the padding."""
        whole = F.pad(tensor, (0, self.filled), value=value)
        return whole[:, self.part.first : self.part.first + self.part.length].clone()

    def positions(self, given: Tensor | None, rows: int, device: torch.device) -> Tensor:
        """The part of positions [rows, length], followed by those of the padding from 0. `given`:
        None: tokens of a row are numbered from 0.
        """
        first = self.part.first
        row = torch.arange(first, first + self.part.length, device=device)
        if given is None:
            return row.expand(rows, -1)
        own = given[:, first : first + self.part.length]
        return torch.cat([own, row[None, own.shape[1] :] - self.length], dim=1)


def of_all_targets(values: Tensor, shared: SharedRows) -> Tensor:
    """The values of the part's targets, [targets], with those of the other parts, in the order of
    the whole micro-batch. Called by the ranks of the group together.

    Each rank takes the same loss of them. Backward, a rank's gradient goes to its own values alone,
    as the other ranks' copies of the loss send theirs.
    """
    return _OfAllTargets.apply(values, shared)  # pyright: ignore[reportReturnType]


class _OfAllTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, shared: SharedRows) -> Tensor:
        ctx.kept = shared.kept
        whole = values.new_zeros(shared.targets).index_copy_(0, shared.kept, values)
        dist.all_reduce(whole, group=shared.part.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.kept), None


def taken_once(sums: Tensor, shared: SharedRows | None) -> Tensor:
    """Sums that all ranks of the group have made of the whole micro-batch: on the rank that
    reports, and zeros on the others.
    """
    return sums if shared is None or shared.reports else torch.zeros_like(sums)
