"""What stands in the queue and what holds slots, at one moment, and what projects have used. Pure.

`ft_service.jobs.queue` says whose turn it is; `ft_service.jobs.forecast` what users are told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HALF_LIFE_SECONDS = 3 * 86_400.0
LONGEST_WAIT_SECONDS = 900.0
"""The next attempt of a job is put off by no more."""


class Shape(NamedTuple):
    """How many ranks, and on how many hosts."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where ranks run."""

    slots: int
    place: str | None = None
    """What starts attempts on this host and others, which a job of several nodes needs one each of. None: the host is a place
    of its own, in which all nodes of a job count together."""
    kind: str = ""
    """Of its processors; the nodes of a job are all of one kind."""
    memory: int | None = None
    """Bytes that one rank can have; None: not known."""
    counts: bool = True
    """False: its slots are somebody else's to give. Jobs that may have more or fewer ranks get the fewest."""
    shared_memory: bool = False
    """All ranks of the host have `memory` together."""

    def holds(self, ranks: int, memory: int | None) -> bool:
        """Whether so many ranks fit, each of which needs so many bytes."""
        if ranks > self.slots:
            return False
        return memory is None or self.memory is None or memory * (ranks if self.shared_memory else 1) <= self.memory


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A queued job. Times are seconds since the epoch in database time."""

    id: str
    project: str
    number: int
    """Rises with creation."""
    slots: int
    """Ranks, of all nodes together; where it may have more or fewer, the fewest."""
    nodes: int = 1
    """Hosts that these are spread over evenly."""
    shapes: Sequence[Shape] = ()
    """All shapes that it may have, the largest first; empty: only that one."""
    memory: int | None = None
    """Bytes that a rank needs; None: not known."""
    priority: int = 0
    seconds: float | None = None
    """How long it is expected to hold its slots, if these are the fewest; None: not known."""
    not_before: float = 0.0
    host: str | None = None
    """The only host or place that may start it; None: any."""
    note: str | None = None
    """Why it waits although its turn has come, for its user."""

    @property
    def smallest(self) -> Shape:
        return Shape(self.nodes, self.slots // self.nodes)

    def seconds_on(self, ranks: int) -> float | None:
        """How long it is expected to hold so many slots: the same work, shared."""
        return None if self.seconds is None else self.seconds * self.slots / ranks


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A job that holds slots."""

    id: str
    project: str
    host: str
    slots: int
    priority: int = 0
    ends_at: float | None = None
    """When it is expected to give them back; None: not known."""
    taken_at: float = 0.0
    movable: bool = False
    """It trains, and can be asked to stop at a checkpoint."""
    halting: bool = False
    """It was asked to stop and has not yet."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A project in the queue."""

    used: float = 0.0
    """Slot-seconds up to now, what runs now included, as far as they are not forgotten."""
    max_slots: int | None = None
    """Ranks that it may run at once; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Everything that waits and runs, at one moment."""

    now: float
    hosts: Mapping[str, Host]
    waiting: Sequence[Waiting]
    holdings: Sequence[Holding]
    shares: Mapping[str, Share] = field(default_factory=dict)

    def share_of(self, project: str) -> float:
        """A project's part of what all projects have used, from 0 to 1; 0: nobody has used anything."""
        total = sum(share.used for share in self.shares.values())
        return self.shares[project].used / total if total and project in self.shares else 0.0


@dataclass(frozen=True)
class Start:
    job: Waiting
    hosts: tuple[str, ...]
    """A host for each node; where nodes count together, the one."""
    shape: Shape

    @property
    def seconds(self) -> float | None:
        """How long it is expected to hold its slots; None: not known."""
        return self.job.seconds_on(self.shape.ranks)

    @property
    def on_each(self) -> int:
        """Slots that it takes of each of its hosts."""
        return self.shape.ranks // len(self.hosts)


def is_ahead(moment: float, now: float, longest: float = LONGEST_WAIT_SECONDS) -> bool:
    """Whether a moment until which something waits is still to come. `longest`: seconds that it may be off at most: what is
    further off was written before the clock went back, and is over."""
    return now < moment <= now + longest


def remembered(slot_seconds: float, ago: float) -> float:
    """What is left of use after `ago` seconds."""
    return slot_seconds * 0.5 ** (max(0.0, ago) / HALF_LIFE_SECONDS)


def accrued(slots: int, seconds: float) -> float:
    """Slot-seconds of `slots` held for `seconds` up to now, less what is forgotten of them meanwhile."""
    lifetime = HALF_LIFE_SECONDS / math.log(2)
    return slots * lifetime * -math.expm1(-max(0.0, seconds) / lifetime)
