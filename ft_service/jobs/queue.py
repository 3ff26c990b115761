"""Whose turn it is: which waiting job starts next, on which host, and which running ones make room for it. Pure.

The order. A higher priority goes first, always. Among equals the project goes first that has used least; within a project,
first come, first served. What a project has used is its slot-seconds, of which half are forgotten every three days
(`HALF_LIFE_SECONDS`), and what its running jobs are still expected to use: so two projects that both have work waiting get the
same over time, whoever submitted first, and who has used nothing for a while goes first once. A project that runs as many ranks
as it may is passed over until one of its jobs ends.

The first job in this order that is not passed over is the head. If too few slots are free for it, it is waited for, and later
jobs start in its place only if that does not move its estimated start: because they are expected to end before it, or because
they leave enough slots for it.

A job that may run on more or fewer ranks (`Waiting.shapes`) is waited for, and charged, as its smallest shape. When its turn
has come it starts on the largest that is free then, and waits for no more.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ft_service.jobs.line import Holding, Line, Shape, Start, Waiting, accrued, is_ahead

LOOK_AHEAD = 64
"""Jobs behind the head that are looked at to fill its gap."""
UNKNOWN_SECONDS = 3600.0
"""What a job of unknown length counts as in its project's use, until it has ended."""


@dataclass(frozen=True)
class _Reserved:
    """The place that is kept for the head."""

    head: Waiting
    at: float
    """Its estimated start; infinite: not known."""
    extra: Mapping[str, int]
    """Host → its slots that are then free beside the head."""


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
    for group in room.groups_for(head, head.smallest):
        each, number = room.spread(group[0], head.smallest)
        ways = [way for host in group if (way := _way(room, line, head, host, each, after_seconds)) is not None]
        chosen = sorted(ways, key=lambda way: sum(holding.slots for holding in way))[:number]
        if len(chosen) == number:
            found = [holding for way in chosen for holding in way]
            return (head, found) if found else None
    return None


def _way(room: Room, line: Line, head: Waiting, host: str, slots: int, after_seconds: float) -> list[Holding] | None:
    """Who must leave a host so that it has `slots` free for the head; None: that cannot be had."""
    there = [holding for holding in line.holdings if holding.host == host]
    short = slots - room.free[host] - sum(holding.slots for holding in there if holding.halting)
    if short <= 0:
        return []
    may = [h for h in there if h.movable and not h.halting and h.priority < head.priority]
    # Since some time to come: the clock has gone back, and nobody knows since when.
    return _enough([h for h in may if not 0 <= line.now - h.taken_at < after_seconds], short) or None


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
        self.free = {name: host.slots for name, host in line.hosts.items()}
        self._hosts = line.hosts
        self._ends: dict[str, list[tuple[float, str, int]]] = {host: [] for host in line.hosts}
        self._shares = line.shares
        self.running: dict[str, int] = defaultdict(int)
        self._charged: dict[str, float] = defaultdict(float, {name: share.used for name, share in line.shares.items()})
        self._queues: dict[str, list[Waiting]] = defaultdict(list)
        self._later = [(job.not_before, job.number, job) for job in line.waiting if is_ahead(job.not_before, line.now)]
        heapq.heapify(self._later)
        for job in sorted((job for job in line.waiting if not is_ahead(job.not_before, line.now)), key=_rank, reverse=True):
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

    def spread(self, host: str, shape: Shape) -> tuple[int, int]:
        """(slots of each host, hosts) that a shape takes where a host is."""
        return (shape.ranks, 1) if self._hosts[host].place is None else (shape.per_node, shape.nodes)

    def groups_for(self, job: Waiting, shape: Shape) -> list[list[str]]:
        """Hosts that are large enough for a job of this shape and may start it, as groups of which enough are alike."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, host in self._hosts.items():
            where = job.host is None or job.host in (name, host.place)
            if where and host.holds(self.spread(name, shape)[0], job.memory):
                groups[host.place or name, host.kind].append(name)
        return [group for group in groups.values() if len(group) >= self.spread(group[0], shape)[1]]

    def hosts_for(self, job: Waiting) -> list[str]:
        """Hosts that are large enough for a job and may start it."""
        return [host for group in self.groups_for(job, job.smallest) for host in group]

    def over_limit(self, job: Waiting, ranks: int | None = None) -> bool:
        """Whether the job's project would run more ranks than it may. `ranks`: None: the fewest that the job may have."""
        limit = self._limit(job.project)
        return limit is not None and self.running[job.project] + (ranks or job.slots) > limit

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
            groups = self.groups_for(job, job.smallest)
            if not groups:
                continue
            if self.over_limit(job):
                passed_over.add(job.project)
                continue
            if reserved is not None:
                looked_at += 1
                if looked_at > LOOK_AHEAD:
                    return None
            if start := self._start_of(job, reserved):
                return start
            reserved = reserved or min((self._reserve(job, group) for group in groups), key=lambda kept: kept.at)
        return None

    def _start_of(self, job: Waiting, reserved: _Reserved | None) -> Start | None:
        """How a job may start now, in the largest shape for which enough is free. `reserved`: what it must leave alone."""
        for shape in job.shapes or (job.smallest,):
            if self.over_limit(job, shape.ranks):
                continue
            for group in self.groups_for(job, shape):
                if shape != job.smallest and not self._hosts[group[0]].counts:
                    continue
                each, number = self.spread(group[0], shape)
                free = [host for host in group if self.free[host] >= each]
                if reserved is not None:
                    free = [host for host in free if self._does_not_delay(job, shape, host, each, reserved)]
                if len(free) >= number:  # the fullest first, so that what is free stays together
                    return Start(job, tuple(sorted(free, key=lambda host: (self.free[host], host))[:number]), shape)
        return None

    def _reserve(self, job: Waiting, group: Sequence[str]) -> _Reserved:
        """When enough hosts of a group are expected to have the slots that a job needs, and how many more."""
        each, number = self.spread(group[0], job.smallest)
        first = sorted((self._free_from(host, each), host) for host in group)[:number]
        at = first[-1][0]
        return _Reserved(job, at, {host: self._free_at(host, at) - each for _, host in first})

    def _free_from(self, host: str, slots: int) -> float:
        """When a host is expected to have so many slots free."""
        free, at = self.free[host], self.now
        for end, _, freed in self._ends[host]:
            if free >= slots:
                break
            free, at = free + freed, end
        return at

    def _free_at(self, host: str, moment: float) -> int:
        return self.free[host] + sum(slots for end, _, slots in self._ends[host] if end <= moment)

    def _does_not_delay(self, job: Waiting, shape: Shape, host: str, slots: int, reserved: _Reserved) -> bool:
        """Whether the head starts as early as before, if a job takes `slots` of a host before it."""
        if math.isinf(reserved.at):
            return False
        seconds = job.seconds_on(shape.ranks)
        if seconds is not None and self.now + seconds <= reserved.at:
            return True
        limit = self._limit(job.project)
        both = self.running[job.project] + shape.ranks + reserved.head.slots
        if job.project == reserved.head.project and limit is not None and both > limit:
            return False
        return slots <= reserved.extra.get(host, slots)

    def start(self, start: Start) -> None:
        """Let a job begin."""
        job = start.job
        self._queues[job.project].remove(job)
        for host in start.hosts:
            self._hold(job.project, host, start.on_each, None if start.seconds is None else self.now + start.seconds)

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
