"""Brings the stored metrics of jobs into their runs: each step once, in order, whatever has ended in between.

A turn of the sender waits for W&B at most once, so that its leases outlive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ft_service.control.tracking.points import RunDescription, describe, exit_code, point, retry_after, wish
from ft_service.jobs.states import Job
from ft_service.logs import about
from ft_service.store.records import JobIntegration, NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

LEASE_SECONDS = 120.0
"""Longer than any turn: opening a run, or ending it, waits for W&B for half of this at most."""
STEPS_AT_ONCE = 500
CHECK_SECONDS = 300.0


class Run(Protocol):
    """An open run elsewhere (WandbRun, MlflowRun, TrackioRun). What it cannot do it raises as a RunError."""

    url: str
    next_step: int

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def confirm(self, step: int) -> None: ...
    def rest(self) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class RunError(Exception):
    """The tracker did not do what was asked; the message says why, without the key. `clean`: other runs go on as they were."""

    def __init__(self, message: str, *, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


@dataclass
class _Held:
    """An integration that this sender has claimed."""

    integration: JobIntegration
    claimed_at: float
    """On the monotonic clock."""
    run: Run | None = None
    place: int = 0
    """Place of the last stored step that was looked at."""
    checked_at: float = 0.0
    """When it was made sure last that what is sent arrives, on the monotonic clock."""
    sent_then: int = -1
    """The last step that had been sent then."""


class Sender:
    """Everything that `owner` has claimed. For one thread."""

    def __init__(
        self,
        store: Store,
        open_run: Callable[[RunDescription], Run],
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._open_run = open_run
        self._owner = owner
        self._clock = clock
        self._held: dict[tuple[str, int], _Held] = {}
        self._failed: set[tuple[str, int]] = set()
        """Integrations whose runs could not be opened: the SDK does not open them again in the same process."""
        self.broken = False
        """A run could not be left in order, or is another's now: the process must end."""
        self.spent = False
        """A run is to be tried again, which needs a new process."""

    def turn(self) -> bool:
        """Send what has come up since the last turn. False if there was nothing to look after.

        Raises UnavailableError if the database is away.
        """
        self._claim()
        jobs = {job.id: job for job in self._store.jobs_by_id(sorted({job_id for job_id, _ in self._held}))}
        for key, held in list(self._held.items()):
            with about(job_id=held.integration.job_id):
                waited = self._attend(key, held, jobs[held.integration.job_id])
            if waited or self.broken or self.spent:
                return True
        return bool(self._held)

    def release(self) -> None:
        """Let others go on. Raises UnavailableError if the database is away."""
        self._store.release_integrations(self._owner)

    def _claim(self) -> None:
        now = self._clock()
        for integration in self._store.claim_integrations(self._owner, lease_seconds=LEASE_SECONDS):
            key = (integration.job_id, integration.number)
            held = self._held.setdefault(key, _Held(integration, now))
            held.claimed_at = now
        if any(now - held.claimed_at >= LEASE_SECONDS for held in self._held.values()):
            log.warning("a lease has run out: somebody else may send now")
            self.broken = True

    def _attend(self, key: tuple[str, int], held: _Held, job: Job) -> bool:
        """Whatever one job needs now. True if that meant waiting for W&B."""
        wanted = wish(job)
        if held.run is None and (wanted == "rest" or job.attempt == 0):  # what was never begun has nothing to show
            self._end(key, held, retry_seconds=0.0 if wanted == "rest" else None)
            return False
        if held.run is None and key in self._failed:
            self.spent = True
            return False
        opened = held.run is None
        try:
            run = held.run or self._open(held, job)
            self._feed(held, run)
            checked = wanted == "send" and self._check(held, run)
            if wanted == "rest":
                run.rest()
                self._end(key, held, retry_seconds=0.0)
            elif wanted == "end":
                run.finish(exit_code(job))
                self._end(key, held)
        except RunError as error:
            self._fail(key, held, job, error)
            return True
        return opened or checked or wanted != "send"

    def _open(self, held: _Held, job: Job) -> Run:
        integration = held.integration
        held.run = run = self._open_run(describe(integration, job))
        told = [] if run.url == integration.url else [NewEvent(level="info", message=f"{_label(integration)} run: {run.url}")]
        if not self._store.begin_integration(integration, self._owner, run.url, told):
            self.broken = True
        held.integration = replace(integration, url=run.url)
        held.checked_at = self._clock()
        log.info("sending to %s from step %d on", run.url, run.next_step)
        return run

    def _feed(self, held: _Held, run: Run) -> None:
        more = not self.broken
        while more:
            found = self._store.list_metrics(held.integration.job_id, after=held.place, limit=STEPS_AT_ONCE)
            for place, created_at, metrics in found:
                if metrics.step >= run.next_step:  # an attempt repeats the steps since its checkpoint
                    run.log(metrics.step, point(metrics, created_at))
                    run.next_step = metrics.step + 1
                held.place = place
            more = len(found) == STEPS_AT_ONCE

    def _check(self, held: _Held, run: Run) -> bool:
        """Now and then, whether what was sent by the last time is there. True if that meant asking."""
        now = self._clock()
        if now - held.checked_at < CHECK_SECONDS:
            return False
        before, held.sent_then, held.checked_at = held.sent_then, run.next_step - 1, now
        if before >= 0:
            run.confirm(before)
        return before >= 0

    def _end(self, key: tuple[str, int], held: _Held, *, retry_seconds: float | None = None) -> None:
        if not self._store.end_integration(held.integration, self._owner, retry_seconds=retry_seconds):
            self.broken = True
        del self._held[key]

    def _fail(self, key: tuple[str, int], held: _Held, job: Job, error: RunError) -> None:
        seconds_over = self._store.now() - job.finished_at if job.finished_at else 0.0
        retry = retry_after(held.integration.tries + 1, seconds_over)
        log.warning("%s, try %d: %s", _label(held.integration), held.integration.tries + 1, error)
        self._store.end_integration(
            held.integration, self._owner, _told(held.integration, error, retry), error=str(error), retry_seconds=retry
        )
        self.broken = self.broken or not error.clean
        self._failed.add(key)
        del self._held[key]


def _told(integration: JobIntegration, error: RunError, retry: float | None) -> list[NewEvent]:
    if retry is None:
        return [
            NewEvent(
                level="warn", message=f"{_label(integration)}: not all metrics are there, and it is not tried any more: {error}"
            )
        ]
    if integration.error is not None:
        return []
    message = (
        f"{_label(integration)} does not take the job's metrics now: {error}. It is tried again; training goes on without it."
    )
    return [NewEvent(level="warn", message=message)]


def _label(integration: JobIntegration) -> str:
    """What an integration's tracker is called in events."""
    return {"mlflow": "MLflow", "trackio": "trackio"}.get(str(integration.settings.get("type")), "W&B")
