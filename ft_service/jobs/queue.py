"""Whose turn it is: which waiting job starts next, on which host, and which running ones make room for it. Pure.

The order. A higher priority goes first, always. Among equals the project goes first that has used least; within a project,
first come, first served. What a project has used is its slot-seconds, of which half are forgotten every three days
(`HALF_LIFE_SECONDS`), and what its running jobs are still expected to use: so two projects that both have work waiting get the
same over time, whoever submitted first, and who has used nothing for a while goes first once. A project that runs as many ranks
as it may is passed over until one of its jobs ends.

The first job in this order that is not passed over is the head. If too few slots are free for it, it is waited for, and later
jobs start in its place only if that does not move its estimated start: because they are expected to end before it, or because
they leave enough slots for it.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

HALF_LIFE_SECONDS = 3 * 86_400.0
LOOK_AHEAD = 64
"""Jobs behind the head that are looked at to fill its gap."""
UNKNOWN_SECONDS = 3600.0
"""What a job of unknown length counts as in its project's use, until it has ended."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A queued job. Times are seconds since the epoch in database time."""

    id: str
    project: str
    number: int
    """Rises with creation."""
    slots: int
    priority: int = 0
    seconds: float | None = None
    """How long it is expected to hold its slots; None: not known."""
    not_before: float = 0.0
    host: str | None = None
    """The only host that may start it; None: any."""
    note: str | None = None
    """Why it waits although its turn has come, for its user."""


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
    hosts: Mapping[str, int]
    """Host → all its slots."""
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
    host: str


@dataclass(frozen=True)
class _Reserved:
    """The place that is kept for the head."""

    head: Waiting
    at: float
    """Its estimated start; infinite: not known."""
    host: str
    extra: int
    """Slots of that host that are then free beside it."""


def remembered(slot_seconds: float, ago: float) -> float:
    """What is left of use after `ago` seconds."""
    return slot_seconds * 0.5 ** (max(0.0, ago) / HALF_LIFE_SECONDS)


def accrued(slots: int, seconds: float) -> float:
    """Slot-seconds of `slots` held for `seconds` up to now, less what is forgotten of them meanwhile."""
    lifetime = HALF_LIFE_SECONDS / math.log(2)
    return slots * lifetime * -math.expm1(-max(0.0, seconds) / lifetime)


def next_start(line: Line) -> Start | None:
    """The job that starts now, and where; None: none may."""
    return Room(line).next_start()


def displaced(line: Line, *, after_seconds: float) -> tuple[Waiting, list[Holding]] | None:
    """The head of the queue and the running jobs of lower priority that must make room for it; None: nobody must now.

    Nobody is displaced that has held its slots for less than `after_seconds`, or where all who might be are still too few. Of
    those who might be the lowest priority goes first, and of equals the one that began last, which has the least to lose.
    """
    room = Room(line)
    head = room.head()
    if head is None:
        return None
    for host in room.hosts_for(head):
        there = [holding for holding in line.holdings if holding.host == host]
        short = head.slots - room.free[host] - sum(holding.slots for holding in there if holding.halting)
        if short <= 0:
            return None
        may = [h for h in there if h.movable and not h.halting and h.priority < head.priority]
        found = _enough([h for h in may if line.now - h.taken_at >= after_seconds], short)
        if found:
            return head, found
    return None


def _enough(candidates: Sequence[Holding], short: int) -> list[Holding]:
    """The first of the candidates that hold `short` slots together, without those whose slots are not needed; empty: they hold
    fewer."""
    found: list[Holding] = []
    for holding in sorted(candidates, key=lambda holding: (holding.priority, -holding.taken_at, holding.id)):
        if sum(one.slots for one in found) < short:
            found.append(holding)
    spare = sum(one.slots for one in found) - short
    if spare < 0:
        return []
    for holding in sorted(found, key=lambda holding: (-holding.priority, holding.taken_at, holding.id)):
        if holding.slots <= spare:
            found.remove(holding)
            spare -= holding.slots
    return found


class Room:
    """The hosts and the queue at one moment, which jobs may start in and end in: what is, or what is expected to be."""

    def __init__(self, line: Line) -> None:
        self.now = line.now
        self.free = dict(line.hosts)
        self._total = dict(line.hosts)
        self._ends: dict[str, list[tuple[float, str, int]]] = {host: [] for host in line.hosts}
        self._shares = line.shares
        self.running: dict[str, int] = defaultdict(int)
        self._charged: dict[str, float] = defaultdict(float, {name: share.used for name, share in line.shares.items()})
        self._queues: dict[str, list[Waiting]] = defaultdict(list)
        self._later = [(job.not_before, job.number, job) for job in line.waiting if job.not_before > line.now]
        heapq.heapify(self._later)
        for job in sorted((job for job in line.waiting if job.not_before <= line.now), key=_rank, reverse=True):
            self._queues[job.project].append(job)
        for holding in line.holdings:
            self._hold(holding.project, holding.host, holding.slots, holding.ends_at)

    def _hold(self, project: str, host: str, slots: int, ends_at: float | None) -> None:
        """Note what is held. A project is held against its limit and its share wherever it runs."""
        ends = math.inf if ends_at is None else max(ends_at, self.now)
        self.running[project] += slots
        self._charged[project] += accrued(slots, UNKNOWN_SECONDS if ends_at is None else ends - self.now)
        if host in self.free:
            self.free[host] -= slots
            bisect.insort(self._ends[host], (ends, project, slots))

    def in_order(self, passed_over: set[str] | None = None) -> Iterator[Waiting]:
        """Jobs that are due, in the order of the queue, were each of them to start. Projects that are put into `passed_over`
        meanwhile come no more."""
        heap = [
            (-queue[-1].priority, self._charged[project], queue[-1].number, project, 1)
            for project, queue in self._queues.items()
            if queue
        ]
        heapq.heapify(heap)
        while heap:
            _, charged, _, project, place = heapq.heappop(heap)
            queue = self._queues[project]
            job = queue[-place]
            yield job
            if place < len(queue) and not (passed_over and project in passed_over):
                following = queue[-place - 1]
                heapq.heappush(heap, (-following.priority, charged + _charge(job), following.number, project, place + 1))

    def hosts_for(self, job: Waiting) -> list[str]:
        """Hosts that are large enough for a job and may start it."""
        hosts = self._total if job.host is None else [job.host]
        return [host for host in hosts if self._total.get(host, 0) >= job.slots]

    def over_limit(self, job: Waiting) -> bool:
        """Whether the job's project would run more ranks than it may."""
        limit = self._limit(job.project)
        return limit is not None and self.running[job.project] + job.slots > limit

    def _limit(self, project: str) -> int | None:
        return self._shares[project].max_slots if project in self._shares else None

    def head(self) -> Waiting | None:
        """The first job that is not passed over, whether or not enough slots are free for it."""
        passed_over: set[str] = set()
        for job in self.in_order(passed_over):
            if not self.hosts_for(job):
                continue
            if not self.over_limit(job):
                return job
            passed_over.add(job.project)
        return None

    def next_start(self) -> Start | None:
        """The job that may start now, and where."""
        if not any(free > 0 for free in self.free.values()):
            return None
        passed_over: set[str] = set()
        reserved: _Reserved | None = None
        looked_at = 0
        for job in self.in_order(passed_over):
            hosts = self.hosts_for(job)
            if not hosts:
                continue
            if self.over_limit(job):
                passed_over.add(job.project)
                continue
            fitting = [host for host in hosts if self.free[host] >= job.slots]
            if reserved is None:
                if fitting:
                    return Start(job, fitting[0])
                reserved = min((self._reserve(job, host) for host in hosts), key=lambda kept: kept.at)
                continue
            looked_at += 1
            if looked_at > LOOK_AHEAD:
                return None
            for host in fitting:
                if self._does_not_delay(job, host, reserved):
                    return Start(job, host)
        return None

    def _reserve(self, job: Waiting, host: str) -> _Reserved:
        """When a host is expected to have enough slots for a job, and how many more."""
        free, at = self.free[host], self.now
        for end, _, slots in self._ends[host]:
            if free >= job.slots and end > at:
                break
            free, at = free + slots, end
        return _Reserved(job, at, host, free - job.slots)

    def _does_not_delay(self, job: Waiting, host: str, reserved: _Reserved) -> bool:
        """Whether the head starts as early as before, if a job starts before it."""
        if math.isinf(reserved.at):
            return False
        if job.seconds is not None and self.now + job.seconds <= reserved.at:
            return True
        limit = self._limit(job.project)
        both = self.running[job.project] + job.slots + reserved.head.slots
        if job.project == reserved.head.project and limit is not None and both > limit:
            return False
        return host != reserved.host or job.slots <= reserved.extra

    def start(self, start: Start) -> None:
        """Let a job begin."""
        job = start.job
        self._queues[job.project].remove(job)
        self._hold(job.project, start.host, job.slots, None if job.seconds is None else self.now + job.seconds)

    def advance(self) -> bool:
        """Go on to when the next job is expected to end, or to become due. False: nothing is expected any more."""
        ends = [times[0][0] for times in self._ends.values() if times]
        moment = min([*ends, *(due for due, _, _ in self._later[:1])], default=math.inf)
        if math.isinf(moment):
            return False
        self.now = moment
        for host, times in self._ends.items():
            while times and times[0][0] <= moment:
                _, project, slots = times.pop(0)
                self.free[host] += slots
                self.running[project] -= slots
        while self._later and self._later[0][0] <= moment:
            _, _, job = heapq.heappop(self._later)
            bisect.insort(self._queues[job.project], job, key=lambda one: tuple(-part for part in _rank(one)))
        return True

    def later(self) -> list[Waiting]:
        """Jobs that are not due yet, by when they are."""
        return [job for _, _, job in sorted(self._later, key=lambda entry: entry[:2])]


def _rank(job: Waiting) -> tuple[int, int]:
    """Ascending in the order within a project."""
    return -job.priority, job.number


def _charge(job: Waiting) -> float:
    return accrued(job.slots, UNKNOWN_SECONDS if job.seconds is None else job.seconds)
