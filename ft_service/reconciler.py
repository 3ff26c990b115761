"""The loop that moves jobs: claim one, observe its newest attempt, decide, act, write what became of it under the claim.

Observing and acting happen outside any transaction, and every act can be repeated: whatever a crash leaves undone, the next
claim of the job does again. One reconciler per host; another one beside it (while a new version takes over) does no harm.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, assert_never

from ft_service import job as rules
from ft_service.dataset import check_file
from ft_service.ingest import Report, collect_result, note_event, read_report
from ft_service.job import (
    Absent,
    Become,
    Ended,
    Job,
    Kill,
    Launch,
    Observation,
    Place,
    Running,
    Signal,
    State,
    Validate,
    Wait,
)
from ft_service.launcher.base import Launcher, LaunchError
from ft_service.places import Places
from ft_service.rundir import Control, ErrorInfo, RunDir, Start, newest_checkpoint, newest_step
from ft_service.scheduling import choose_slots
from ft_service.spec import DataFileRef, JobSpec
from ft_service.store.base import Change, Claim, File, NewEvent, Store

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How long the loop rests when nothing is due."""
IDLE_SECONDS = 0.5
"""How often a running job is looked at."""
LEASE_SECONDS = 30.0
"""How long a job is left alone after its turn ended in an error."""
MAX_REST_SECONDS = 10.0
SMALL_CHECK_SECONDS = 0.2
"""How long a check of data files is waited for before the loop turns to other jobs."""

Check = Callable[[Job], ErrorInfo | None]


def check_data(job: Job, places: Places) -> ErrorInfo | None:
    """Read a job's data files. The error of the first that cannot be trained on, or None."""
    spec = JobSpec.model_validate(job.spec)
    error = _check_one("training_file", spec.training_data, places)
    if error is None and spec.validation_data is not None:
        error = _check_one("validation_file", spec.validation_data, places)
    return error


def _check_one(param: Literal["training_file", "validation_file"], data: DataFileRef, places: Places) -> ErrorInfo | None:
    try:
        return check_file(places.fetched(Path(data.path))).error(param, data.name)
    except OSError as error:
        return ErrorInfo(code=f"invalid_{param}", message=f"{data.name} cannot be read: {error.strerror}.", param=param)


class Reconciler:
    """Moves the jobs of one host. `step` and `run` belong to one thread; `wake` may be called from any."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        places: Places,
        *,
        check: Check | None = None,
        idle_seconds: float = IDLE_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`check`: of a job's data files; None: `check_data`."""
        self._store = store
        self._launcher = launcher
        self._places = places
        self._idle_seconds = idle_seconds
        self._lease_seconds = lease_seconds
        self._owner = f"{platform.node()}:{os.getpid()}"
        self._wake = threading.Event()
        self._queue_first = False
        self._checks = _Checks(check or partial(check_data, places=places), self.wake)

    def wake(self) -> None:
        """There may be something to do: end the loop's rest early."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set. An error costs a job its turn, a database that is away costs time; neither ends it."""
        failures = 0
        try:
            while not stop.is_set():
                failures = self._turn(failures)
        finally:
            self._checks.close()

    def step(self) -> bool:
        """Give one job its turn. True if one was due. Raises UnavailableError if the database is away."""
        claim = self._claim()
        if claim is None:
            return False
        try:
            self._reconcile(claim)
        except Exception:
            log.exception("job %s: its turn failed; the next is in %g seconds", claim.job.id, self._lease_seconds)
        return True

    def _turn(self, failures: int) -> int:
        """One step, and a rest if nothing was due. Returns how many steps in a row have failed; the rest grows with them."""
        busy = False
        try:
            busy = self.step()
            failures = 0
        except Exception:
            log.exception("the store cannot be used")
            failures += 1
        if not busy:
            self._wake.wait(min(POLL_SECONDS * 2**failures, MAX_REST_SECONDS))
            self._wake.clear()
        return failures

    def _claim(self) -> Claim | None:
        """A job that holds something or waits to; the two kinds come first in turn, so that neither keeps the other waiting."""
        self._queue_first = not self._queue_first
        if self._queue_first:
            return self._claim_queued() or self._claim_active()
        return self._claim_active() or self._claim_queued()

    def _claim_active(self) -> Claim | None:
        return self._store.claim(
            host=self._launcher.host,
            owner=self._owner,
            lease_seconds=self._lease_seconds,
            idle_seconds=self._idle_seconds,
        )

    def _claim_queued(self) -> Claim | None:
        host = self._launcher.host
        free = len(self._store.free_slots(host, self._launcher.slots))
        if not free:
            return None
        return self._store.claim_next(host=host, owner=self._owner, lease_seconds=self._lease_seconds, max_slots=free)

    def _reconcile(self, claim: Claim) -> None:
        run = self._places.run(claim.job.id)
        seen = self._launcher.observe(run, claim.job.attempt) if claim.job.attempt else Absent()
        # Read after observing: what an attempt wrote before it ended is then all there.
        report = read_report(run, claim.job)
        if isinstance(seen, Running) and seen.note:
            report = replace(report, events=[*report.events, note_event(seen.note)])
        if isinstance(seen, Ended) and report.more:
            self._apply(claim, report, report.job)
            return
        self._act(claim, report, run, seen)

    def _act(self, claim: Claim, report: Report, run: RunDir, seen: Observation) -> None:
        job = report.job
        action = rules.decide(job, seen, claim.now)
        match action:
            case Wait():
                self._apply(claim, report, job)
            case Validate():
                self._validate(claim, report)
            case Place():
                self._place(claim, report)
            case Launch():
                self._launch(claim, report, run)
            case Signal():
                self._launcher.signal(run, job.attempt, Control(generation=job.generation, desired=job.desired.value))
                self._apply(claim, report, rules.signalled(job))
            case Kill(reason):
                self._kill(claim, report, run, reason)
            case Become():
                self._become(claim, report, run, seen, action)
            case _:
                assert_never(action)

    def _validate(self, claim: Claim, report: Report) -> None:
        checked = self._checks.result(report.job)
        if checked is None:
            self._apply(claim, report, report.job)
            return
        job = rules.validated(report.job, checked.error, claim.now)
        if job.state is State.FAILED:
            message, level = str(job.error and job.error["message"]), "error"
        else:
            message, level = "Files validated, moving job to queued state.", "info"
        if self._apply(claim, report, job, [NewEvent(level=level, message=message)]):
            self._checks.forget(job)

    def _place(self, claim: Claim, report: Report) -> None:
        """Take the slots. The start itself is the next turn's, when they are surely ours."""
        job = report.job
        slots = choose_slots(job.slots, self._store.free_slots(self._launcher.host, self._launcher.slots))
        if slots is None:
            self._apply(claim, report, job)
            return
        placed = rules.placed(job, self._launcher.host)
        message = f"Training starts on {job.slots} ranks (attempt {placed.attempt})."
        self._apply(claim, report, placed, [NewEvent(level="info", message=message)], take_slots=slots)

    def _launch(self, claim: Claim, report: Report, run: RunDir) -> None:
        job = report.job
        run.write_if_absent("spec.json", JobSpec.model_validate(job.spec))
        start = Start(
            job_id=job.id,
            attempt=job.attempt,
            world_size=job.slots,
            generation=job.generation,
            checkpoint=newest_checkpoint(run),
            slots=self._store.held_slots(job.id),
            nodes=JobSpec.model_validate(job.spec).distributed.nnodes,
        )
        run.write_if_absent(f"attempts/{job.attempt}/start.json", start)
        try:
            self._launcher.start(run, job.attempt)
        except LaunchError as error:
            log.warning("job %s: attempt %d was not started: %s", job.id, job.attempt, error)
            failed = rules.launch_failed(job, str(error), newest_step(run), claim.now)
            self._apply(claim, report, failed.job, _events(failed), release_slots=True)
            return
        self._apply(claim, report, job)

    def _kill(self, claim: Claim, report: Report, run: RunDir, reason: rules.Reason) -> None:
        job = report.job
        self._launcher.kill(run, job.attempt, reason)
        if job.state is State.QUEUED:
            job = replace(job, not_before=claim.now + rules.RECHECK_SECONDS)
        self._apply(claim, report, job)

    def _become(self, claim: Claim, report: Report, run: RunDir, seen: Observation, action: Become) -> None:
        if isinstance(seen, Absent) and action.release:
            # Nothing runs and nothing is to: an exit record keeps a start that is still on its way from coming to life.
            self._launcher.kill(run, report.job.attempt, rules.Reason.USER_CANCELLED)
            if not isinstance(self._launcher.observe(run, report.job.attempt), Ended):
                self._apply(claim, report, report.job)
                return
        job, files = action.job, []
        if job.state is State.SUCCEEDED:
            job, files = collect_result(run, job, self._places)
        if not self._apply(claim, report, job, _events(action), files=files, release_slots=action.release):
            for file in files:
                self._places.remove(file.id)
        elif action.release:
            self._launcher.clean(run, report.job.attempt)

    def _apply(
        self,
        claim: Claim,
        report: Report,
        job: Job,
        events: Sequence[NewEvent] = (),
        *,
        files: Sequence[File] = (),
        take_slots: Sequence[int] = (),
        release_slots: bool = False,
    ) -> bool:
        change = Change(
            job=job,
            events=[*report.events, *events],
            checkpoints=report.checkpoints,
            files=files,
            take_slots=take_slots,
            release_slots=release_slots,
        )
        return self._store.apply(claim, change)


def _events(action: Become) -> list[NewEvent]:
    if action.message is None:
        return []
    return [NewEvent(level="error" if action.job.state is State.FAILED else "info", message=action.message)]


@dataclass(frozen=True)
class _Checked:
    """What a finished check found."""

    error: ErrorInfo | None


class _Checks:
    """Checks of data files, one after the other in a thread of their own: a large file must not keep other jobs waiting.

    The thread is a daemon, which an executor's is not: a check only reads, so a service that ends need not wait half a minute
    for it. The next start checks anew.
    """

    def __init__(self, check: Check, on_done: Callable[[], None]) -> None:
        self._check = check
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._waiting: SimpleQueue[tuple[Future[ErrorInfo | None], Job] | None] = SimpleQueue()
        self._closed = False
        self._running: dict[str, Future[ErrorInfo | None]] = {}

    def result(self, job: Job) -> _Checked | None:
        """What the check of this job found; None: it is under way. Raises what the check raised, and then forgets it."""
        future = self._running.get(job.id)
        if future is None:
            future = self._running[job.id] = self._submit(job)
            future.add_done_callback(lambda _: self._on_done())
            futures.wait([future], SMALL_CHECK_SECONDS)
        if not future.done():
            return None
        if future.exception() is not None:
            self.forget(job)
        return _Checked(future.result())

    def forget(self, job: Job) -> None:
        self._running.pop(job.id, None)

    def close(self) -> None:
        """No further check begins; one under way is not waited for."""
        self._closed = True
        self._waiting.put(None)

    def _submit(self, job: Job) -> Future[ErrorInfo | None]:
        future: Future[ErrorInfo | None] = Future()
        self._waiting.put((future, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="data-check", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closed:
            future, job = item
            try:
                found = self._check(job)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(found)
