"""The ranks that share the rows of their micro-batches (distributed.context_parallel): neighbours,
on one host.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows with this one."""

    rank: int
    """Number of this one among them."""
    ranks: int
    group: dist.ProcessGroup
    """Their own: what they exchange does not wait for gathers that are under way."""

    @classmethod
    def made(cls, ranks: int, timeout: timedelta | None = None) -> ContextGroup | None:
        """The group of this rank, where each has so many ranks; None: every rank has whole rows.

        Called by all ranks together, whose number is a multiple of `ranks`.
        """
        if ranks == 1:
            return None
        group, _ = dist.new_subgroups(group_size=ranks, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is in a group"
        return cls(dist.get_rank(group), ranks, group)
