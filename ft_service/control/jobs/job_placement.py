"""Placement of waiting jobs: which one a reconciler claims, on which slots it starts, and which
jobs are preempted for it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from ft_service.engines.engine_directory import PREFIX
from ft_service.engines.tending import EngineTending
from ft_service.host.loops import Interval
from ft_service.ids import new_id
from ft_service.jobs import decisions
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue import choose_closing, choose_preempted, choose_slots, next_start
from ft_service.jobs.queue_snapshot import ExpectedStart, Host, QueueSnapshot
from ft_service.jobs.states import Job
from ft_service.launcher.protocol import Launcher
from ft_service.money import Rate
from ft_service.store.leases import HOST_SECONDS
from ft_service.store.records import Claim, JobChange, NewEngine, NewEvent
from ft_service.store.sql import Store
from ft_service.wording import counted

log = logging.getLogger(__name__)

TOO_LARGE_SECONDS = 5.0
"""Interval of the search for jobs that need more slots than this place has."""
PREEMPT_SECONDS = 1.0
"""Interval of the search for jobs to preempt."""
SEARCH_SHARE = 0.1
"""Most of the time that searches of the queue take which find no job to start."""


@dataclass(frozen=True, kw_only=True)
class PlacementRules:
    """As in ReconcilerOptions."""

    lease_seconds: float
    preempt_after: float | None
    rate: Rate | None = None
    """What this place takes for its slots; None: it has no price."""


class JobPlacement:
    """Claims waiting jobs for one place. For one thread."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        engines: EngineTending,
        *,
        owner: str,
        rules: PlacementRules,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._engines = engines
        self._owner = owner
        self._lease_seconds = rules.lease_seconds
        self._preempt_after = rules.preempt_after
        self._rate = rules.rate
        self._too_large, self._preemption = Interval(TOO_LARGE_SECONDS), Interval(PREEMPT_SECONDS)
        self._search = Interval(0.0)
        self._announcement, self._measurement = Interval(HOST_SECONDS / 6), Interval(0.0)
        self._paces = Paces()

    def search_again(self) -> None:
        """Search the queue the next time, though the last search found nothing a moment ago:
        something has changed.
        """
        self._search.restart(0.0)

    def claim(self) -> tuple[Claim, ExpectedStart | None] | None:
        """The next job of the queue with the start that it may make now, or a job that is too large
        for this place, without.
        """
        place = self._launcher.host
        total = self._launcher.slots
        claimant = {
            "host": place,
            "owner": self._owner,
            "lease_seconds": self._lease_seconds,
            "host_slots": total,
        }
        if self._too_large.is_due:
            if claim := self._store.leases.claim_too_large(**claimant):
                return claim, None
            self._too_large.restart()
        if self._announcement.is_due:
            self._announcement.restart()
            self._store.queue.announce_host(place, total)
        may_preempt = self._preempt_after is not None and self._preemption.is_due
        shares = self._engines.options.most_seats > 0
        may_start = self._store.leases.free_slots(place, total) or (
            shares and self._store.engines.live_engines(host=place)
        )
        if not self._search.is_due or (not may_preempt and not may_start):
            return None
        began = time.monotonic()
        if self._measurement.is_due:
            self._paces = Paces(self._store.queue.measured_jobs())
            self._measurement.restart(self._paces.good_seconds)
        host = Host(slots=total, counts=self._launcher.counts)
        snapshot = self._store.queue.snapshot_for(place, host, self._paces, new_engines=shares)
        start = next_start(snapshot)
        if start is None:
            for engine in choose_closing(snapshot):
                self._engines.close(engine.id, if_idle=True)
            if may_preempt:
                self._preempt(snapshot)
            self._search.restart((time.monotonic() - began) / SEARCH_SHARE)
            return None
        claimed = self._store.leases.claim_queued(start.job.id, **claimant)
        return (claimed, start) if claimed else None

    def place(self, job: Job, start: ExpectedStart | None, now: float) -> JobChange:
        """The change that gives a claimed job the slots or the seat of its start; if they are taken
        meanwhile, it changes nothing.
        """
        if job.stored_spec.unknown:  # before it has slots, which it could not use
            waiting = decisions.of_another_version(job, now)
            told = [NewEvent(level="warn", message=f"The job waits. {waiting.pending}")]
            return JobChange(job=waiting, events=told if waiting.pending != job.pending else [])
        if job.slots > self._launcher.slots:
            waiting = decisions.too_large(job)
            return JobChange(
                job=waiting,
                events=[NewEvent(level="warn", message=f"The job waits. {waiting.pending}")],
            )
        if job.max_cost is not None and self._rate is None:
            waiting = decisions.without_price(job, now)
            told = [NewEvent(level="warn", message=f"The job waits. {waiting.pending}")]
            return JobChange(job=waiting, events=told if waiting.pending != job.pending else [])
        if (
            start is not None
            and (start.engine is not None or start.new_engine)
            and not _still_shares(job, start)
        ):
            return JobChange(job=job)
        if start is not None and start.engine is not None:
            placed = _placed(job, start, now, start.engine)
            message = (
                f"Attempt {placed.attempt} has a seat in the engine {start.engine}, beside "
                "other jobs on its base."
            )
            return JobChange(
                job=placed, events=[NewEvent(level="info", message=message)], take_seat=True
            )
        slots = start and choose_slots(
            start.shape.ranks, self._store.leases.free_slots(start.host, self._launcher.slots)
        )
        if start is None or slots is None:
            return JobChange(job=job)
        placed = _placed(job, start, now, new_id(PREFIX) if start.new_engine else None)
        placed = _priced(placed, self._rate)
        # The ranks themselves report that training starts.
        message = f"Attempt {placed.attempt} is placed on {counted(placed.slots, 'slot')}"
        message += f", in the new engine {placed.engine_id}." if start.new_engine else "."
        new = (
            NewEngine(self._engines.options.most_seats, job.seat and job.seat.room)
            if start.new_engine
            else None
        )
        return JobChange(
            job=placed,
            events=[NewEvent(level="info", message=message)],
            take_slots=slots,
            new_engine=new,
        )

    def _preempt(self, snapshot: QueueSnapshot) -> None:
        """Ask jobs to stop here that the head of the queue may preempt."""
        assert self._preempt_after is not None, "preemption is on"
        self._preemption.restart()
        head, running = choose_preempted(snapshot, after_seconds=self._preempt_after) or (None, [])
        if (
            head and head.host is None
        ):  # another host may have room for it, make room already, or lose less by it
            everywhere = replace(self._store.queue.snapshot(self._paces), waiting=[head])
            _, chosen = choose_preempted(everywhere, after_seconds=self._preempt_after) or (
                None,
                [],
            )
            running = [job for job in chosen if job.host == self._launcher.host]
        engines = (
            {engine.id for engine in self._store.engines.live_engines(host=self._launcher.host)}
            if running
            else set()
        )
        for job in running:
            if job.id in engines:
                self._engines.close(job.id, if_idle=False)
            elif head and self._store.jobs.preempt(head, job.id):
                log.info("job is preempted for %s", head.id, extra={"job_id": job.id})


def _placed(job: Job, start: ExpectedStart, now: float, engine_id: str | None) -> Job:
    ends_at = None if start.seconds is None else now + start.seconds
    return replace(decisions.placed(job, start.host, start.shape, engine_id), ends_at=ends_at)


def _priced(job: Job, rate: Rate | None) -> Job:
    """The job with what its new attempt pays for its slots."""
    if rate is None:
        return replace(job, price=None, grams_per_kwh=None)
    return replace(job, price=rate.price, currency=rate.currency, grams_per_kwh=rate.grams_per_kwh)


def _still_shares(job: Job, start: ExpectedStart) -> bool:
    """Whether a claimed job is still what the queue's snapshot said: its user may have changed its
    ranks since.
    """
    sharing = start.job.sharing
    same = sharing is not None and (sharing.key, sharing.fault_group) == (
        job.share_key,
        job.fault_group,
    )
    return same and job.slots == start.job.slots
