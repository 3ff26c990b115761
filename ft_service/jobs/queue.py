"""The scheduling rule: which waiting job starts next, on which host and slots, and which running
jobs it preempts. Pure.

A higher priority always goes first. Among equal priorities the project that has used least goes
first; within a project, first come, first served. What a project has used is its slot-seconds, of
which half are forgotten every three days (`HALF_LIFE_SECONDS`), plus what its running jobs are
still expected to use: two projects that both have work waiting get the same over time, whichever
submitted first. A project that runs as many ranks as it may is passed over until one of its jobs
ends.

The first job in this order that is not passed over is the head. While too few slots are free for
it, later jobs start before it only if that does not delay its expected start: they are expected to
end earlier, or leave enough slots for it.

A job that may share a live engine (ft_service/engines/) takes a seat there, without slots, if the
engine is idle or too few slots are free for the job: where slots are free, two jobs are faster
apart. Behind a head that waits for slots it does so only if it is expected to end before the
engine's other jobs: an engine that takes ever more jobs would never free its slots. On slots it
starts an engine if those that are left do not suffice for all the jobs that could share it. Where
another scheduler assigns the slots, how many are free is not known: there a job with company starts
an engine, and others join it.

A job with several shapes is counted as its smallest while it waits. When its turn comes it starts
in the largest shape for which slots are free at that moment.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ft_service.jobs.queue_snapshot import (
    ExpectedStart,
    JobSize,
    LiveEngine,
    QueuedJob,
    QueueSnapshot,
    RunningJob,
    accrued,
    fit_together,
    is_ahead,
)

LOOK_AHEAD = 64
"""How many jobs behind the head are considered for the slots that the head cannot use yet."""
UNKNOWN_SECONDS = 3600.0
"""Duration that a job of unknown length adds to its project's use until it ends."""


@dataclass(frozen=True)
class _Reservation:
    """The slots kept for the head."""

    head: QueuedJob
    host: str
    at: float
    """Expected start of the head; infinite: unknown."""
    extra: int
    """Slots of the host that are free then beyond those of the head."""


def next_start(snapshot: QueueSnapshot) -> ExpectedStart | None:
    """The job that starts now, with host and shape; None if no job may."""
    return QueueState(snapshot).next_start()


def choose_slots(needed: int, free: Sequence[int]) -> list[int] | None:
    """`needed` of the free slot numbers, ascending; None if there are too few.

    The lowest run of neighbours is preferred, since neighbouring GPUs tend to share the faster
    link; else the lowest numbers.
    """
    ordered = sorted(free)
    if needed > len(ordered):
        return None
    for start in range(len(ordered) - needed + 1):
        run = ordered[start : start + needed]
        if needed and run[-1] - run[0] == needed - 1:
            return run
    return ordered[:needed]


def choose_preempted(
    snapshot: QueueSnapshot, *, after_seconds: float
) -> tuple[QueuedJob, list[RunningJob]] | None:
    """The head of the queue and the running jobs of lower priority that must stop for it; None: no
    job must stop now.

    A job that has held its slots for less than `after_seconds` does not stop, and no job stops
    where all candidates together hold too few slots. The lowest priority stops first; of equal
    priorities the job that began last, which loses least.
    """
    state = QueueState(snapshot)
    head = state.head()
    if head is None:
        return None
    choices = [
        _choose_on_host(state, snapshot, head, host, after_seconds)
        for host in state.hosts_for(head)
    ]
    possible = [jobs for jobs in choices if jobs is not None]
    chosen = min(possible, key=lambda jobs: sum(job.slots for job in jobs), default=[])
    return (head, chosen) if chosen else None


def choose_closing(snapshot: QueueSnapshot) -> list[LiveEngine]:
    """The engines without jobs that must end at once, since the first job that could use their
    slots waits for slots.
    """
    state = QueueState(snapshot)
    idle = [engine for engine in snapshot.engines if not engine.seats and not engine.closing]
    for job in state.in_order() if idle else ():
        hosts = state.hosts_for(job)
        over = state.over_limit(job)
        useful = [
            engine
            for engine in idle
            if engine.host in hosts and (not over or engine.sharing.project == job.project)
        ]
        if useful and state.open_engine(job) is None:
            return useful
        if hosts and not over:
            break
    return []


def _choose_on_host(
    state: QueueState, snapshot: QueueSnapshot, head: QueuedJob, host: str, after_seconds: float
) -> list[RunningJob] | None:
    """The jobs that must stop so that a host has enough free slots for the head; None if that is
    impossible.
    """
    on_host = [job for job in snapshot.running if job.host == host]
    missing = head.slots - state.free[host] - sum(job.slots for job in on_host if job.stopping)
    if missing <= 0:
        return []
    candidates = [
        job
        for job in on_host
        if job.preemptible and not job.stopping and job.priority < head.priority
        # A start in the future: the clock was set back since, and the true start is unknown.
        if not 0 <= snapshot.now - job.taken_at < after_seconds
    ]
    return _smallest_sufficient(candidates, missing) or None


def _smallest_sufficient(candidates: Sequence[RunningJob], missing: int) -> list[RunningJob]:
    """The first candidates that together hold `missing` slots, less those not needed; empty if all
    hold too few.
    """
    chosen: list[RunningJob] = []
    spare = -missing
    for job in sorted(candidates, key=lambda job: (job.priority, -job.taken_at, job.id)):
        if spare < 0:
            chosen.append(job)
            spare += job.slots
    if spare < 0:
        return []
    for job in sorted(chosen, key=lambda job: (-job.priority, job.taken_at, job.id)):
        if job.slots <= spare:
            chosen.remove(job)
            spare -= job.slots
    return chosen


class QueueState:
    """The queue and the free slots of each host.

    It begins as a snapshot; `start` and `advance` simulate what follows.
    """

    def __init__(self, snapshot: QueueSnapshot) -> None:
        self.now = snapshot.now
        self.free = {name: host.slots for name, host in snapshot.hosts.items()}
        self.ranks: dict[str, int] = defaultdict(int)
        """Running ranks of each project."""
        self._hosts = snapshot.hosts
        self._ends: dict[str, list[tuple[float, str, int]]] = {host: [] for host in snapshot.hosts}
        self._shares = snapshot.shares
        self._charged: dict[str, float] = defaultdict(
            float, {name: share.used for name, share in snapshot.shares.items()}
        )
        self._queues: dict[str, list[QueuedJob]] = defaultdict(list)
        self._later = [
            (job.not_before, job.number, job)
            for job in snapshot.waiting
            if is_ahead(job.not_before, self.now)
        ]
        heapq.heapify(self._later)
        for job in sorted(
            (job for job in snapshot.waiting if not is_ahead(job.not_before, self.now)),
            key=_rank,
            reverse=True,
        ):
            self._queues[job.project].append(job)
        self._new_engines = snapshot.new_engines
        self._engines = list(snapshot.engines)
        for running in snapshot.running:
            self._take(running.project, running.host, running.slots, running.ends_at)

    def _take(self, project: str, host: str, slots: int, ends_at: float | None) -> None:
        """Take slots. They count towards the project's limit and use on whichever host they are."""
        ends = math.inf if ends_at is None else max(ends_at, self.now)
        self.ranks[project] += slots
        self._charged[project] += accrued(
            slots, UNKNOWN_SECONDS if ends_at is None else ends - self.now
        )
        if host in self.free:
            self.free[host] -= slots
            bisect.insort(self._ends[host], (ends, project, slots))

    def in_order(self, passed_over: set[str] | None = None) -> Iterator[QueuedJob]:
        """Due jobs in the order of the queue, as if each of them started.

        Jobs of projects that the caller adds to `passed_over` are then left out.
        """
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
                charge = accrued(job.slots, UNKNOWN_SECONDS if job.seconds is None else job.seconds)
                heapq.heappush(
                    heap,
                    (-following.priority, charged + charge, following.number, project, place + 1),
                )

    def hosts_for(self, job: QueuedJob, shape: JobSize | None = None) -> list[str]:
        """Hosts that may start a job and are large enough for it. `shape`: None: its smallest."""
        ranks = (shape or job.smallest).ranks
        return [
            name
            for name, host in self._hosts.items()
            if job.host in (None, name) and host.slots >= ranks
        ]

    def over_limit(self, job: QueuedJob, ranks: int | None = None) -> bool:
        """Whether the job's project would run more ranks than it may.

        `ranks`: None: those of the job's smallest shape.
        """
        limit = self._limit(job.project)
        return limit is not None and self.ranks[job.project] + (ranks or job.slots) > limit

    def _limit(self, project: str) -> int | None:
        return self._shares[project].max_slots if project in self._shares else None

    def _candidates(self) -> Iterator[QueuedJob]:
        """Due jobs in order, without those that no host can hold or the limit of their project does
        not allow at all, and those of projects at their limit.
        """
        passed_over: set[str] = set()
        for job in self.in_order(passed_over):
            if self.hosts_for(job):
                if not self.over_limit(job) or self.open_engine(job) is not None:
                    yield job
                elif job.slots <= (
                    self._limit(job.project) or 0
                ):  # else waiting does not help: the limit has been lowered
                    passed_over.add(job.project)

    def head(self) -> QueuedJob | None:
        """The first job that is not passed over, whether or not enough slots are free for it."""
        return next(self._candidates(), None)

    def next_start(self) -> ExpectedStart | None:
        """The job that may start now, with host and shape."""
        if not any(free > 0 for free in self.free.values()) and not any(
            map(_is_open, self._engines)
        ):
            return None
        reserved: _Reservation | None = None
        for number, job in enumerate(self._candidates()):
            if number > LOOK_AHEAD:
                return None
            engine = self.open_engine(job)
            joins = engine is not None and (not engine.seats or not self._counts(engine.host))
            if start := (None if joins else self._start_of(job, reserved)) or self._seat_of(
                job, reserved
            ):
                return start
            if self._waits_for_seat(job):
                continue
            reserved = reserved or min(
                (self._reserve(job, host) for host in self.hosts_for(job)), key=lambda kept: kept.at
            )
        return None

    def open_engine(self, job: QueuedJob) -> LiveEngine | None:
        """The engine in which a job may take a seat now, of several the one with fewest jobs; None:
        there is none, or the project's limit was lowered below what it runs.
        """
        limit = self._limit(job.project)
        if limit is not None and self.ranks[job.project] > limit:
            return None
        found = [
            engine
            for engine in self._engines
            if _is_open(engine) and _may_share(job, engine) and _has_room(job, engine)
        ]
        return min(found, key=lambda engine: (engine.seats, engine.id), default=None)

    def _waits_for_seat(self, job: QueuedJob) -> bool:
        """Whether a job gets a seat as soon as an engine has one free, so that no slots need to be
        kept for it.
        """
        taken = [
            engine for engine in self._engines if not engine.closing and _may_share(job, engine)
        ]
        fits = [engine for engine in taken if fit_together([job.seat], engine.room)]
        return any(not _is_open(engine) or not _has_room(job, engine) for engine in fits)

    def _seat_of(self, job: QueuedJob, reserved: _Reservation | None) -> ExpectedStart | None:
        """The start of a job in an engine now.

        `reserved`: slots that the engine must not keep any longer.
        """
        engine = self.open_engine(job)
        if engine is None:
            return None
        if reserved is not None and engine.host == reserved.host:
            known = job.seconds is not None and engine.ends_at is not None
            if not known or self.now + (job.seconds or 0.0) > (engine.ends_at or 0.0):
                return None
        return ExpectedStart(job, engine.host, job.smallest, engine=engine.id)

    def _start_of(self, job: QueuedJob, reserved: _Reservation | None) -> ExpectedStart | None:
        """The start of a job now, in the largest shape for which enough slots are free.

        `reserved`: slots not to use.
        """
        for shape in job.shapes or (job.smallest,):
            if self.over_limit(job, shape.ranks):
                continue
            free = [host for host in self.hosts_for(job, shape) if self.free[host] >= shape.ranks]
            if shape != job.smallest:
                free = [host for host in free if self._counts(host)]
            if reserved is not None:
                free = [host for host in free if self._does_not_delay(job, shape, host, reserved)]
            if free:  # the fullest, so that free slots stay together
                host = min(free, key=lambda host: (self.free[host], host))
                return ExpectedStart(
                    job, host, shape, new_engine=self._starts_engine(job, host, shape.ranks)
                )
        return None

    def _starts_engine(self, job: QueuedJob, host: str, ranks: int) -> bool:
        """Whether a job that starts on `ranks` of a host's free slots starts an engine there."""
        limit = self._limit(job.project)
        free = self.free[host] if self._counts(host) else ranks
        left = (free if limit is None else min(free, limit - self.ranks[job.project])) - ranks
        return (
            self._new_engines
            and job.sharing is not None
            and (job.by_client or job.company * job.slots > left)
        )

    def _counts(self, host: str) -> bool:
        """Whether the service knows which slots of a host are free."""
        return host not in self._hosts or self._hosts[host].counts

    def _reserve(self, job: QueuedJob, host: str) -> _Reservation:
        """When a host is expected to have the slots that a job needs, and how many more."""
        free = self.free[host]
        at = self.now
        for end, _, freed in self._ends[host]:
            if free >= job.slots and end > at:
                break
            free = free + freed
            at = max(end, at)
        return _Reservation(job, host, at, free - job.slots)

    def _does_not_delay(
        self, job: QueuedJob, shape: JobSize, host: str, reserved: _Reservation
    ) -> bool:
        """Whether the head starts as early as before if this job starts now."""
        if math.isinf(reserved.at):
            return False
        seconds = job.seconds_on(shape.ranks)
        if seconds is not None and self.now + seconds <= reserved.at:
            return True
        limit = self._limit(job.project)
        both = self.ranks[job.project] + shape.ranks + reserved.head.slots
        if job.project == reserved.head.project and limit is not None and both > limit:
            return False
        return host != reserved.host or shape.ranks <= reserved.extra

    def start(self, start: ExpectedStart) -> None:
        """Start a job."""
        job = start.job
        self._queues[job.project].remove(job)
        if start.engine is not None:
            self._engines = [
                replace(engine, seats=engine.seats + 1, sizes=(*engine.sizes, job.seat))
                if engine.id == start.engine
                else engine
                for engine in self._engines
            ]
            return
        ends_at = None if start.seconds is None else self.now + start.seconds
        self._take(job.project, start.host, start.shape.ranks, ends_at)

    def advance(self) -> bool:
        """Move on to the next expected end of a job or of a back-off. False if there is none."""
        ends = [times[0][0] for times in self._ends.values() if times]
        moment = min([*ends, *(due for due, _, _ in self._later[:1])], default=math.inf)
        if math.isinf(moment):
            return False
        self.now = moment
        for host, times in self._ends.items():
            while times and times[0][0] <= moment:
                _, project, slots = times.pop(0)
                self.free[host] += slots
                self.ranks[project] -= slots
        while self._later and self._later[0][0] <= moment:
            _, _, job = heapq.heappop(self._later)
            bisect.insort(
                self._queues[job.project], job, key=lambda job: tuple(-part for part in _rank(job))
            )
        return True

    def later(self) -> list[QueuedJob]:
        """Jobs that are not due yet, in the order in which they become due."""
        return [job for _, _, job in sorted(self._later, key=lambda entry: entry[:2])]


def _is_open(engine: LiveEngine) -> bool:
    return not engine.closing and engine.seats < engine.most_seats


def _may_share(job: QueuedJob, engine: LiveEngine) -> bool:
    return (
        job.sharing == engine.sharing
        and job.slots == engine.slots
        and job.host in (None, engine.host)
    )


def _has_room(job: QueuedJob, engine: LiveEngine) -> bool:
    return fit_together((*engine.sizes, job.seat), engine.room)


def _rank(job: QueuedJob) -> tuple[int, int]:
    """Sort key of the order within a project."""
    return -job.priority, job.number
