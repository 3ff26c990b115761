"""The queue at one moment: waiting jobs, running jobs, and the use of each project. Pure.

From it, `queue.py` decides which job starts next, and `forecast.py` what users read about a waiting
job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ft_service.rundir.engine import SeatSize

HALF_LIFE_SECONDS = 3 * 86_400.0
LONGEST_WAIT_SECONDS = 900.0
"""The longest delay before a job's next attempt."""


class JobSize(NamedTuple):
    """The nodes of a job, and its ranks on each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class Host:
    """A place where ranks run: this host, or a cluster."""

    slots: int
    """Slots of all nodes together."""
    counts: bool = True
    """False: another scheduler assigns the slots.

    A job with several shapes then gets its smallest.
    """


class Sharing(NamedTuple):
    """What the jobs of an engine have in common."""

    project: str
    key: str
    """Their `share_key` (ft_service/engines/sharing.py)."""
    fault_group: str | None = None


@dataclass(frozen=True, kw_only=True)
class LiveEngine:
    """An engine that has not ended.

    Its slots are held by the entry of the same id in `QueueSnapshot.running`.
    """

    id: str
    host: str
    slots: int
    sharing: Sharing
    seats: int
    """Number of jobs that it trains."""
    most_seats: int
    sizes: Sequence[SeatSize | None] = ()
    """Those of its seats; None: not planned."""
    room: int | None = None
    """Bytes of a rank for all seats and a round; None: not known."""
    closing: bool = False
    """Whether it was asked to end; then it takes no more jobs."""
    ends_at: float | None = None
    """Expected end of the last of its jobs; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A queued job. Times are seconds since the epoch in database time."""

    id: str
    project: str
    number: int
    """Position in order of creation."""
    slots: int
    """Ranks on all nodes together, in the smallest shape."""
    nodes: int = 1
    """Nodes of the smallest shape, with equally many ranks each."""
    shapes: Sequence[JobSize] = ()
    """All possible shapes, the largest first; empty: only the one above."""
    priority: int = 0
    seconds: float | None = None
    """Expected duration in the smallest shape; None: unknown."""
    not_before: float = 0.0
    host: str | None = None
    """The only host that may start it; None: any."""
    note: str | None = None
    """Reason for the user why the job waits although its turn has come."""
    sharing: Sharing | None = None
    """What a job must have in common with it to share an engine; None: it runs alone."""
    seat: SeatSize | None = None
    """What it takes in an engine; None: not planned."""
    sweep: str | None = None
    """The sweep that it belongs to."""
    company: int = 0
    """Number of other jobs that wait or run and could share an engine with it."""
    by_client: bool = False
    """Whether its client runs the training loop, so that it may hold its ranks for days and use
    them now and then.
    """

    @property
    def smallest(self) -> JobSize:
        return JobSize(self.nodes, self.slots // self.nodes)

    def seconds_on(self, ranks: int) -> float | None:
        """Return the expected duration on `ranks` ranks: the same work, divided among them; None:
        unknown.
        """
        return None if self.seconds is None else self.seconds * self.slots / ranks


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A job, or an engine, that holds slots."""

    id: str
    project: str
    host: str
    slots: int
    priority: int = 0
    ends_at: float | None = None
    """Expected end; None: unknown."""
    taken_at: float = 0.0
    preemptible: bool = False
    """Whether it trains and can be asked to stop at a checkpoint."""
    stopping: bool = False
    """Whether it was asked to stop and still runs."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Use and limit of a project."""

    used: float = 0.0
    """Slot-seconds up to now, running jobs included, discounted by age."""
    max_slots: int | None = None
    """Most ranks that may run at once; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class QueueSnapshot:
    """All waiting and running jobs at one moment."""

    now: float
    hosts: Mapping[str, Host]
    waiting: Sequence[QueuedJob]
    running: Sequence[RunningJob]
    shares: Mapping[str, Share] = field(default_factory=dict)
    engines: Sequence[LiveEngine] = ()
    """Engines that waiting jobs may join."""
    new_engines: bool = False
    """Whether a job that has company may start an engine."""

    def share_of(self, project: str) -> float:
        """Return a project's part of the use of all projects, from 0 to 1; 0 if nothing was
        used.
        """
        total = sum(share.used for share in self.shares.values())
        return self.shares[project].used / total if total and project in self.shares else 0.0


@dataclass(frozen=True)
class ExpectedStart:
    """A job that may start, with its host and shape."""

    job: QueuedJob
    host: str
    shape: JobSize
    engine: str | None = None
    """The engine in which it takes a seat, without slots of its own; None: it takes slots."""
    new_engine: bool = False
    """Whether its slots are those of a new engine, in which it takes the first seat."""

    @property
    def seconds(self) -> float | None:
        """Expected duration; None: unknown."""
        return self.job.seconds_on(self.shape.ranks)


def fit_together(seats: Iterable[SeatSize | None], room: int | None) -> bool:
    """Return whether an engine with so much room (None: not known) holds these seats, and the
    largest micro-batch of any.
    """
    known = [seat for seat in seats if seat is not None]
    return (
        room is None
        or sum(seat.held for seat in known) + max((seat.batch for seat in known), default=0) <= room
    )


def is_ahead(moment: float, now: float, longest: float = LONGEST_WAIT_SECONDS) -> bool:
    """Return whether `moment`, until which a job waits, is in the future.

    A moment more than `longest` seconds ahead was stored before the clock was set back, and counts
    as past.
    """
    return now < moment <= now + longest


def remembered(slot_seconds: float, ago: float) -> float:
    """Return how many slot-seconds still count after `ago` seconds."""
    return slot_seconds * 0.5 ** (max(0.0, ago) / HALF_LIFE_SECONDS)


def accrued(slots: int, seconds: float) -> float:
    """Return the slot-seconds of `slots` held for the last `seconds`, discounted by age."""
    lifetime = HALF_LIFE_SECONDS / math.log(2)
    return slots * lifetime * -math.expm1(-max(0.0, seconds) / lifetime)
