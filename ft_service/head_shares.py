"""How ranks that share rows divide the heads of attention (distributed.context_parallel), for what
they compute (workers/layers/exchange.py) and for the plan.

Every rank has as many heads, one rank's behind the other's, and kernels take as many heads of each
group. Where heads do not come out even, heads of zeros make them up, which no one reads:

    behind the last head      9 heads in 3 groups on 2 ranks: 5 a rank, the last of zeros
    behind each group's       14 heads in 2 groups on 4 ranks: 8 a group, 4 a rank, and each rank
                              needs the keys and values of one group only

Of the two the one with fewer heads a rank is taken, and then the one with fewer keys and values.
The slowest rank has ceil(heads / ranks) heads of the whole row. To gather keys and values and
divide queries instead would leave the last of N ranks (2 N - 1) / N times the mean, since a query
sees what is before it: on 4 ranks 1.75 times, against 1.14 times with 14 heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShares:
    """Heads, and groups of keys and values, as the ranks have them."""

    ranks: int
    in_group: int
    """Heads of a group, with those of zeros."""
    heads: int
    """Heads of a rank, with those of zeros."""
    groups: int
    """Keys and values of a rank: as many as stand for its heads."""
    copies: int
    """How often a group's keys and values stand, for the ranks or the parts of ranks' heads that
    share them.
    """

    @property
    def all_heads(self) -> int:
        return self.ranks * self.heads

    @property
    def all_groups(self) -> int:
        return self.ranks * self.groups


def head_shares(heads: int, groups: int, ranks: int) -> HeadShares:
    """The shares of `ranks` ranks. `heads`: a multiple of `groups`."""
    in_group = heads // groups
    even = ranks // math.gcd(groups, ranks)
    found: list[HeadShares] = []
    for width in (in_group, -(-in_group // even) * even):
        own = -(-groups * width // ranks)
        together = math.gcd(own, width)
        found.append(HeadShares(ranks, width, own, own // together, width // together))
    return min(found, key=lambda shares: (shares.heads, shares.groups))
