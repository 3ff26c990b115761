"""The loop that moves jobs: claim one, observe its newest attempt, decide, act, write what became of it under the claim.

Observing and acting happen outside any transaction, and every act can be repeated: whatever a crash leaves undone, the next
claim of the job does again. One reconciler per host; another one beside it (while a new version takes over) does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, assert_never

from ft_service.control.checks.data_checks import Check, Checks, check_data, this_hosts
from ft_service.control.intake import Intake, collect_result, note_event, read_report, result_seen
from ft_service.control.orphans import COUNT_SECONDS, find_orphans
from ft_service.control.placing import Placing
from ft_service.errors import FtError, NotFoundError, UnavailableError
from ft_service.host import disk
from ft_service.jobs import decisions, reasons
from ft_service.jobs.decisions import Become, Kill, Launch, Place, Signal, Validate, Wait
from ft_service.jobs.states import Absent, Ended, Job, Observation, Running, State
from ft_service.launcher.base import Launcher, LaunchError, ListsAttempts
from ft_service.logs import about, fields
from ft_service.meters import Meters
from ft_service.plan.admit import Admitted
from ft_service.plan.machines import Machine
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_checkpoint, newest_step
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Start
from ft_service.spec import JobSpec, StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.records import Claim, File, JobChange, NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How long the loop rests when nothing is due."""
IDLE_SECONDS = 0.5
"""How often a running job is looked at."""
LEASE_SECONDS = 30.0
"""How long a job is left alone after its turn ended in an error."""
CHECK_REST_SECONDS = 5.0
"""How often a job whose files are being read is looked at before that is done; after that another process reads them."""
CHECK_AGAIN_SECONDS, MOST_CHECK_REST_SECONDS = 5.0, 60.0
"""Until files are read anew whose check could not be finished, doubled each time; and at most."""
DROP_SECONDS = 0.5
"""How often it is asked whether a job whose files are being read still wants that."""
MAX_REST_SECONDS = 10.0
FAILED_TURNS = 3
"""After how many failed turns in a row a job says so."""
LET_GO = (
    "The job is cancelled, though it cannot be looked after as it should: its slots are free. The service's log says why; look "
    "at its host for processes that may be left."
)
GUEST_SECONDS = 0.05
"""Between asking whether a job's slots are free of whoever else uses them."""


class Guest(Protocol):
    """Somebody who uses slots that no job holds, until a job needs them."""

    def make_way(self, slots: Collection[int]) -> bool:
        """Whether the slots, which a job now holds, are not in use. If they are, they will not be for long: ask again."""
        ...

    def welcome(self, job: Job) -> None:
        """A job has succeeded, and its slots are free."""
        ...


class Reconciler:
    """Moves the jobs of one host. `step` and `run` belong to one thread; `wake` may be called from any."""

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        places: Places,
        *,
        meters: Meters | None = None,
        guest: Guest | None = None,
        displace_after: float | None = None,
        check: Check | None = None,
        machines: Callable[[], Sequence[Machine]] = this_hosts,
        idle_seconds: float = IDLE_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`meters`: None: counts for nobody. `guest`: None: nobody else uses slots. `displace_after`: seconds that a job has
        held its slots before one of higher priority may take them; None: none may. `check`: of a job's data files and adapter;
        None: `check_data`. `machines`: that may train, by which "auto" is chosen.
        """
        self._store = store
        self._launcher = launcher
        self._places = places
        self._meters = meters or Meters()
        self._guest = guest
        self._meters.place_away.set_function(lambda: launcher.away_seconds)
        self._idle_seconds = idle_seconds
        self._lease_seconds = lease_seconds
        self._owner = f"{platform.node()}:{os.getpid()}"
        self._placing = Placing(store, launcher, owner=self._owner, lease_seconds=lease_seconds, displace_after=displace_after)
        self._wake = store.stirred
        self._queue_first = False
        self._drop_at = 0.0
        self._count_at = 0.0
        self._failed_turns: dict[str, int] = {}
        """Job → how many of its turns in a row have failed."""
        self._held_up: dict[str, int] = {}
        """Job → how often its check could not be finished."""
        self._warm = check is None
        self._checks = Checks(check or partial(check_data, places=places, machines=machines), self.wake, places.tokens_dir)

    def wake(self) -> None:
        """There may be something to do: end the loop's rest early."""
        self._wake.set()

    def close(self) -> None:
        """End what goes on beside the loop; `run` does that by itself."""
        self._checks.close()

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set. An error costs a job its turn, a database that is away costs time; neither ends it."""
        failures = 0
        if self._warm:
            self._checks.warm()
        try:
            while not stop.is_set():
                failures = self._turn(failures)
        finally:
            self.close()

    def step(self) -> bool:
        """Give one job its turn. True if one was due. Raises UnavailableError if the database is away."""
        self._attend_to_checks()
        self._count_orphans()
        claim = self._claim()
        if claim is None:
            return False
        with about(job_id=claim.job.id, attempt=claim.job.attempt), self._meters.turns.time():
            try:
                self._reconcile(claim)
            except Exception as error:
                self._meters.turns_failed.inc()
                log.exception("a job's turn failed; its next is in %g seconds", self._lease_seconds)
                self._note_failed(claim, error)
            else:
                self._failed_turns.pop(claim.job.id, None)
        return True

    def _note_failed(self, claim: Claim, error: Exception) -> None:
        """A job whose turns fail again and again says so, and can be cancelled in spite of it. What is away comes back."""
        if isinstance(error, UnavailableError):
            return
        job = claim.job
        failed = self._failed_turns[job.id] = self._failed_turns.get(job.id, 0) + 1
        if failed < FAILED_TURNS:
            return
        try:
            if job.state is State.CANCELLED:
                self._let_go(claim)
            elif failed == FAILED_TURNS:
                why = failed_turns(failed, error, self._lease_seconds)
                self._store.tell(job, [NewEvent(level="error", message=why)])
        except Exception:
            log.exception("the job was not told of it either")

    def _let_go(self, claim: Claim) -> None:
        """End a cancelled job that cannot be looked at as it should: what runs is ended as far as it can be, and its slots are
        free, unless something is seen to run."""
        attempt = _attempt(self._places.run(claim.job.id), claim.job)
        try:
            self._launcher.kill(attempt, reasons.Reason.USER_CANCELLED)
        except Exception:
            log.exception("the job's processes were not ended as they should")
        try:
            seen = self._launcher.observe(attempt)
        except UnavailableError:
            return
        except Exception:
            log.exception("nobody knows what still runs of the job")
            seen = Ended(None)
        if isinstance(seen, Absent | Ended):
            none = Intake(job=claim.job, events=[], checkpoints=[], more=False)
            told = NewEvent(level="warn", message=LET_GO)
            if self._apply(claim, none, replace(claim.job, phase=None), [told], release_slots=True):
                self._failed_turns.pop(claim.job.id, None)

    def _turn(self, failures: int) -> int:
        """One step, and a rest if nothing was due. Returns how many steps in a row have failed; the rest grows with them."""
        busy = False
        self._meters.turn()
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

    def _attend_to_checks(self) -> None:
        """Have jobs whose check is done looked at now, and end checks of jobs that were cancelled. None holds up the others."""
        self._checks.make_way()
        for job in self._checks.finished():
            self._store.look_again(job.id)
        if time.monotonic() >= self._drop_at:
            self._drop_at = time.monotonic() + DROP_SECONDS
            for job in self._checks.under_way():
                if not self._is_validating(job):
                    self._checks.drop(job)

    def _count_orphans(self) -> None:
        """Count, now and then, what runs in the place although nobody knows its job."""
        if not isinstance(self._launcher, ListsAttempts) or time.monotonic() < self._count_at:
            return
        self._count_at = time.monotonic() + COUNT_SECONDS
        with contextlib.suppress(LaunchError):  # the place is away, which its jobs say
            self._meters.orphaned_jobs.set(len(find_orphans(self._store, self._launcher)))

    def _is_validating(self, job: Job) -> bool:
        try:
            return self._store.get_job(job.project_id, job.id).state is State.VALIDATING
        except NotFoundError:
            return False

    def _claim(self) -> Claim | None:
        """A job that holds something or waits to; the two kinds come first in turn, so that neither keeps the other waiting."""
        self._queue_first = not self._queue_first
        if self._queue_first:
            return self._placing.claim() or self._claim_active()
        return self._claim_active() or self._placing.claim()

    def _claim_active(self) -> Claim | None:
        return self._store.claim(
            host=self._launcher.host,
            owner=self._owner,
            lease_seconds=self._lease_seconds,
            idle_seconds=self._idle_seconds,
        )

    def _reconcile(self, claim: Claim) -> None:
        run = self._places.run(claim.job.id)
        seen = result_seen(run, self._launcher.observe(_attempt(run, claim.job))) if claim.job.attempt else Absent()
        # Read after observing: what an attempt wrote before it ended is then all there.
        report = read_report(run, claim.job, claim.now)
        if isinstance(seen, Running) and seen.note:
            report = replace(report, events=[*report.events, note_event(seen.note, seen.level)])
        if isinstance(seen, Ended) and report.more:
            self._apply(claim, report, report.job)
            return
        self._act(claim, report, run, seen)

    def _act(self, claim: Claim, report: Intake, run: RunDir, seen: Observation) -> None:
        job = report.job
        action = decisions.decide(job, seen, claim.now)
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
                self._launcher.signal(_attempt(run, job), Control(generation=job.generation, desired=job.wish))
                self._apply(claim, report, decisions.signalled(job))
            case Kill(reason):
                self._kill(claim, report, run, reason)
            case Become():
                self._become(claim, report, run, seen, action)
            case _:
                assert_never(action)

    def _validate(self, claim: Claim, report: Intake) -> None:
        checked = self._checks.result(report.job)
        if checked is None:
            self._apply(claim, report, report.job, self._checks.news(report.job), rest_seconds=CHECK_REST_SECONDS)
            return
        if checked.waits is not None:
            self._hold_up(claim, report, checked.waits)
            return
        self._held_up.pop(report.job.id, None)
        job = decisions.validated(report.job, checked.error, claim.now)
        if checked.settled is not None:
            job = _as_settled(job, checked.settled)
        if job.state is State.FAILED:
            ended = NewEvent(level="error", message=str(job.error and job.error["message"]))
        else:
            ended = NewEvent(level="info", message="Files validated, moving job to queued state.")
        if self._apply(claim, report, job, [*checked.events, ended]):
            self._checks.forget(job)

    def _hold_up(self, claim: Claim, report: Intake, why: str) -> None:
        """The files cannot be checked now: the job says why, and they are checked anew later, at growing intervals."""
        times = self._held_up.get(report.job.id, 0)
        job = replace(report.job, pending=why)
        told = [NewEvent(level="warn", message=f"The job waits. {why}")] if report.job.pending is None else []
        if self._apply(claim, report, job, told, rest_seconds=min(CHECK_AGAIN_SECONDS * 2**times, MOST_CHECK_REST_SECONDS)):
            self._held_up[job.id] = times + 1
            self._checks.forget(job)

    def _place(self, claim: Claim, report: Intake) -> None:
        """Take the slots. The start itself is the next turn's, when they are surely ours."""
        job = report.job
        hosts = self._launcher.hosts
        if list(hosts) == [self._launcher.host] and job.slots > self._launcher.slots:
            waits = decisions.too_large(job)
            self._apply(claim, report, waits, [NewEvent(level="warn", message=f"The job waits. {waits.pending}")])
            return
        placed = self._placing.place(job, claim.now)
        if placed is None:
            self._apply(claim, report, job)
            return
        if self._apply(claim, report, placed.job, [NewEvent(level="info", message=placed.told)], take_slots=placed.slots):
            self._meters.attempts.inc()
            self._meters.queue_wait.observe(max(0.0, claim.now - (job.queued_at or claim.now)))

    def _launch(self, claim: Claim, report: Intake, run: RunDir) -> None:
        job = report.job
        spec = job.spec
        held = self._store.held_slots(job.id)
        slots = [slot for numbers in held.values() for slot in numbers]
        if self._guest is not None and not self._guest.make_way(slots):
            if self._apply(claim, report, job):
                self._store.look_again(job.id)
                time.sleep(GUEST_SECONDS)
            return
        if not run.write_if_absent("spec.json", spec) and run.readable("spec.json", JobSpec) is None:
            run.write("spec.json", spec)
        start = Start(
            job_id=job.id,
            attempt=job.attempt,
            world_size=job.slots,
            generation=job.generation,
            checkpoint=newest_checkpoint(run),
            slots=slots if len(held) == 1 else [],
            nodes=job.nodes or spec.distributed.nnodes,
            priority=job.priority,
            hosts=[] if list(held) == [self._launcher.host] else list(held),
            node_slots=list(held.values()) if len(held) > 1 else [],
        )
        attempt = _attempt(run, job)
        attempt.settle_start(start)
        try:
            self._launcher.start(attempt, spec)
        except LaunchError as error:
            log.warning("the attempt was not started: %s", error)
            failed = decisions.launch_failed(job, str(error), newest_step(run), claim.now)
            if self._apply(claim, report, failed.job, _events(failed), release_slots=True):
                self._meters.attempts_ended.labels(reasons.Reason.LAUNCH_FAILED.value).inc()
            return
        self._apply(claim, report, job)

    def _kill(self, claim: Claim, report: Intake, run: RunDir, reason: reasons.Reason) -> None:
        job = report.job
        self._launcher.kill(_attempt(run, job), reason)
        if job.state is State.QUEUED:
            job = replace(job, not_before=claim.now + decisions.RECHECK_SECONDS)
        self._apply(claim, report, job)

    def _become(self, claim: Claim, report: Intake, run: RunDir, seen: Observation, action: Become) -> None:
        attempt = _attempt(run, report.job)
        if isinstance(seen, Absent) and action.release:
            # Nothing runs and nothing is to: an exit record keeps a start that is still on its way from coming to life.
            self._launcher.kill(attempt, reasons.Reason.USER_CANCELLED)
            if not isinstance(self._launcher.observe(attempt), Ended):
                self._apply(claim, report, report.job)
                return
        job, files = action.job, []
        if job.state is State.SUCCEEDED:
            job, files = collect_result(run, job, self._places)
        if not self._apply(claim, report, job, _events(action), files=files, release_slots=action.release):
            for file in files:
                self._places.remove(file.id)
        elif action.release:
            reason = reasons.reason_of(seen.exit) if isinstance(seen, Ended) else None
            self._meters.attempts_ended.labels(reason.value if reason else "stopped").inc()
            self._launcher.clean(attempt)
            if job.state is State.SUCCEEDED and self._guest is not None:
                self._guest.welcome(job)

    def _apply(
        self,
        claim: Claim,
        report: Intake,
        job: Job,
        events: Sequence[NewEvent] = (),
        *,
        files: Sequence[File] = (),
        take_slots: Mapping[str, Sequence[int]] | None = None,
        release_slots: bool = False,
        rest_seconds: float = 0.0,
    ) -> bool:
        change = JobChange(
            job=job,
            events=[*report.events, *events],
            checkpoints=report.checkpoints,
            files=files,
            take_slots=take_slots or {},
            release_slots=release_slots,
            rest_seconds=rest_seconds,
        )
        if not self._store.apply(claim, change):
            return False
        self._note(claim, change)
        return True

    def _note(self, claim: Claim, change: JobChange) -> None:
        """Count and log what has become of a job."""
        before, job = claim.job, change.job
        for metrics in (event.metrics for event in change.events if event.metrics is not None):
            self._meters.steps.inc()
            self._meters.tokens.inc(metrics.tokens or 0)
        newest = max((event.created_at for event in change.events if event.source and event.created_at), default=None)
        if newest is not None:
            self._meters.event_lag.observe(max(0.0, time.time() - newest))
        if (before.state, before.phase) != (job.state, job.phase):
            moved = fields(state=job.state.value, phase=job.phase and job.phase.value, reason=job.reason and job.reason.value)
            log.info("job moved from %s to %s", _named(before), _named(job), extra=moved)


def _as_settled(job: Job, settled: Admitted) -> Job:
    job = replace(job, stored_spec=StoredSpec.of(settled.spec))
    if settled.work is None:
        return job
    return replace(job, work=settled.work.flops, planned_seconds=settled.work.seconds)


def _attempt(run: RunDir, job: Job) -> Attempt:
    """The job's newest attempt."""
    return Attempt(run, job.attempt, job_id=job.id)


def failed_turns(number: int, error: Exception, seconds: float) -> str:
    """What the user of a job hears whose turns fail. `seconds`: until its next."""
    cause = disk.os_error(error)
    if isinstance(error, FtError):
        why = error.message
    elif cause is not None and cause.errno in disk.NO_ROOM:
        why = f"{disk.NO_ROOM[cause.errno][0].upper()}{disk.NO_ROOM[cause.errno][1:]}."
    else:
        why = f"The cause is in the service's log ({type(error).__name__})."
    again = f"It is tried again every {seconds:g} seconds. Cancelling the job works."
    return f"The service has failed {number} times in a row to look after this job. {why} {again}"


def _named(job: Job) -> str:
    return f"{job.state.value} ({job.phase.value})" if job.phase else job.state.value


def _events(action: Become) -> list[NewEvent]:
    if action.message is None:
        return []
    return [NewEvent(level="error" if action.job.state is State.FAILED else action.level, message=action.message)]
