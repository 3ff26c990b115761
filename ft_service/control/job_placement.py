"""Placement of waiting jobs: which one a reconciler claims, on which slots it starts, and which jobs are preempted for it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from ft_service.jobs import decisions
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue import choose_preempted, choose_slots, next_start
from ft_service.jobs.queue_snapshot import ExpectedStart, Host, QueueSnapshot
from ft_service.jobs.states import Job
from ft_service.launcher.protocol import Launcher
from ft_service.store.queue import HOST_SECONDS
from ft_service.store.records import Claim, JobChange, NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

TOO_LARGE_SECONDS = 5.0
"""Interval of the search for jobs that need more slots than this place has."""
PREEMPT_SECONDS = 1.0
"""Interval of the search for jobs to preempt."""


class Interval:
    """A task that is due again some seconds after it was last done. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def restart(self, seconds: float | None = None) -> None:
        """Note that the task was done. `seconds`: until it is due again; None: as always."""
        self._next = time.monotonic() + (self._seconds if seconds is None else seconds)


class JobPlacement:
    """Claims waiting jobs for one place. For one thread."""

    def __init__(
        self, store: Store, launcher: Launcher, *, owner: str, lease_seconds: float, preempt_after: float | None
    ) -> None:
        """`preempt_after`: as in ReconcilerOptions."""
        self._store, self._launcher = store, launcher
        self._owner, self._lease_seconds = owner, lease_seconds
        self._preempt_after = preempt_after
        self._too_large, self._preemption = Interval(TOO_LARGE_SECONDS), Interval(PREEMPT_SECONDS)
        self._announcement, self._measurement = Interval(HOST_SECONDS / 6), Interval(0.0)
        self._paces = Paces()

    def claim(self) -> tuple[Claim, ExpectedStart | None] | None:
        """The next job of the queue with the start that it may make now, or a job that is too large for this place, without."""
        place, total = self._launcher.host, self._launcher.slots
        claimant = {"host": place, "owner": self._owner, "lease_seconds": self._lease_seconds, "host_slots": total}
        if self._too_large.is_due:
            if claim := self._store.leases.claim_too_large(**claimant):
                return claim, None
            self._too_large.restart()
        if self._announcement.is_due:
            self._announcement.restart()
            self._store.queue.announce_host(place, total)
        may_preempt = self._preempt_after is not None and self._preemption.is_due
        if not may_preempt and not self._store.leases.free_slots(place, total):
            return None
        if self._measurement.is_due:
            self._paces = Paces(self._store.queue.measured_jobs())
            self._measurement.restart(self._paces.good_seconds)
        snapshot = self._store.queue.snapshot_for(place, Host(slots=total, counts=self._launcher.counts), self._paces)
        start = next_start(snapshot)
        if start is None:
            if may_preempt:
                self._preempt(snapshot)
            return None
        claimed = self._store.leases.claim_queued(start.job.id, **claimant)
        return (claimed, start) if claimed else None

    def place(self, job: Job, start: ExpectedStart | None, now: float) -> JobChange:
        """The change that gives a claimed job the slots of its start; if they are taken meanwhile, it changes nothing."""
        if job.slots > self._launcher.slots:
            waiting = decisions.too_large(job)
            return JobChange(job=waiting, events=[NewEvent(level="warn", message=f"The job waits. {waiting.pending}")])
        slots = start and choose_slots(start.shape.ranks, self._store.leases.free_slots(start.host, self._launcher.slots))
        if start is None or slots is None:
            return JobChange(job=job)
        ends_at = None if start.seconds is None else now + start.seconds
        placed = replace(decisions.placed(job, start.host, start.shape), ends_at=ends_at)
        # The ranks themselves report that training starts.
        message = f"Attempt {placed.attempt} is placed on {placed.slots} slot{'s' if placed.slots > 1 else ''}."
        return JobChange(job=placed, events=[NewEvent(level="info", message=message)], take_slots=slots)

    def _preempt(self, snapshot: QueueSnapshot) -> None:
        """Ask jobs to stop that the head of the queue may preempt."""
        assert self._preempt_after is not None, "preemption is on"
        self._preemption.restart()
        head, running = choose_preempted(snapshot, after_seconds=self._preempt_after) or (None, [])
        for job in running:
            if head and self._store.jobs.preempt(head, job.id):
                log.info("job is preempted for %s", head.id, extra={"job_id": job.id})
