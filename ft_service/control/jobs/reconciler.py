"""The loop that moves jobs: claim one, observe its newest attempt, decide, act, store the result
under the claim.

Observing and acting happen outside any transaction, and every action can be repeated: what a crash
leaves undone, the next claim of the job does again. One reconciler per host is enough; a second one
(while a new version takes over) does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, assert_never

from ft_service.control.admission.job_admission import LateAdmission
from ft_service.control.checks.data_checks import Check
from ft_service.control.cleanup.housekeeping import remove_unrecorded
from ft_service.control.jobs.budgets import Budgets
from ft_service.control.jobs.ingest import (
    Intake,
    collect_result,
    note_event,
    read_report,
    result_seen,
    with_energy,
)
from ft_service.control.jobs.job_placement import JobPlacement, PlacementRules
from ft_service.control.jobs.job_trace import ended_parts
from ft_service.control.jobs.job_validation import JobValidation
from ft_service.control.jobs.orphans import COUNT_SECONDS, find_orphans
from ft_service.engines.tending import EngineOptions, EngineTending
from ft_service.errors import FtError, UnavailableError
from ft_service.host import disk
from ft_service.host.loops import Interval
from ft_service.jobs import decisions, reasons
from ft_service.jobs.decisions import Become, Kill, Launch, Place, Signal, Validate, Wait
from ft_service.jobs.queue_snapshot import ExpectedStart
from ft_service.jobs.states import Absent, Ended, Job, Observation, Running, State
from ft_service.launcher.protocol import Launcher, LaunchError, ListsAttempts
from ft_service.logs import about, fields
from ft_service.meters import Meters
from ft_service.money import Rate
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.checkpoints import newest_checkpoint, newest_step
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Start
from ft_service.rundir.presence import LEAVE_AFTER_SECONDS, SIGNS, Presence
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from ft_service.store.records import Claim, JobChange, NewEvent
from ft_service.store.sql import Store
from ft_service.traces import Traces

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Pause of the loop when no job is due."""
MAX_POLL_SECONDS = 10.0
"""Longest pause of the loop while the store cannot be used."""
IDLE_SECONDS = 0.5
"""Interval at which a running job is looked at."""
LEASE_SECONDS = 30.0
"""Length of a lease: so long a job is left alone after its turn has failed."""
FAILED_TURNS = 3
"""Number of failed turns in a row from which a job reports them."""
TOLD_LOSSES = 3
"""Number of attempts in a row that a host or a place ended, or did not start, from which the
operator is told.
"""
CANCELLED_UNOBSERVED = (
    "The job is cancelled, though it cannot be looked after as it should: its slots are free. The "
    "service's log says why; look "
    "at its host for processes that may be left."
)
LOOKS = 64
"""Most jobs that are looked at without a claim before others get their turn."""
NOTE_SECONDS = 30.0
"""How often it is noted that a job was looked at, if that changed nothing: each note writes the
job's row, and an entry in every index of it.
"""
UNTENDED_SECONDS = 90.0
"""Age of the newest note from which a running job gets a turn of its own."""
SLOT_USER_SECONDS = 0.05
"""Interval at which a slot user is asked whether it has left a job's slots."""


class SlotUser(Protocol):
    """A user of slots that no job holds (the preview), which leaves them when a job needs them."""

    def release_slots(self, slots: Collection[int]) -> bool:
        """Return whether the slots, which a job now holds, are free.

        If not, it begins to leave them: ask again.
        """
        ...

    def preload(self, job: Job) -> None:
        """Load the model of a job that has succeeded, whose slots are free now."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReconcilerOptions:
    """What a reconciler may do besides moving jobs, and its intervals."""

    meters: Meters = field(default_factory=Meters)
    traces: Traces | None = None
    """Gets the parts of jobs that have ended; None: nobody does."""
    slot_user: SlotUser | None = None
    """User of slots that no job holds; None: there is none."""
    preempt_after: float | None = None
    """Seconds that a job holds its slots before one of higher priority may take them; None:
    never.
    """
    check: Check | None = None
    """Check of a job's data files and adapter; None: `check_data`."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    admission: LateAdmission | None = None
    """Admission of jobs on bases that are described later; None: no job waits for its base, and the
    ranks choose what is "auto".
    """
    rate_of: Callable[[str], Rate | None] = lambda host: None
    """What a host takes for its slots; None: it has no price."""
    leave_after_seconds: float = LEAVE_AFTER_SECONDS
    """Time without a sign of the service after which ranks that live by commands leave."""
    without_paths: Callable[[str], str] = str
    """Returns a text for a user without the paths of this host's folders."""
    idle_seconds: float = IDLE_SECONDS
    lease_seconds: float = LEASE_SECONDS


@dataclass(frozen=True)
class _Turn:
    """A claimed job, what it reported, and what was observed of its newest attempt."""

    claim: Claim
    report: Intake
    run: RunDir
    seen: Observation
    start: ExpectedStart | None = None
    """Where a queued job may start."""

    @property
    def job(self) -> Job:
        return self.report.job

    @cached_property
    def attempt(self) -> Attempt:
        return _attempt(self.run, self.job)


class Reconciler:
    """Moves the jobs of one host.

    `step` and `run` belong to one thread; `wake` may be called from any.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        places: Places,
        options: ReconcilerOptions | None = None,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._places = places
        self._options = options = options or ReconcilerOptions()
        self._meters = options.meters
        self._slot_user = options.slot_user
        self._meters.observe_place(lambda: launcher.away_seconds)
        self._lease_seconds = lease_seconds = options.lease_seconds
        self._owner = f"{platform.node()}:{os.getpid()}"
        self._engines = EngineTending(store, launcher, places, options.engines)
        self._budgets = Budgets(store)
        rules = PlacementRules(
            lease_seconds=lease_seconds,
            preempt_after=options.preempt_after,
            rate=options.rate_of(launcher.host),
        )
        self._placement = JobPlacement(
            store, launcher, self._engines, owner=self._owner, rules=rules
        )
        self._validation = JobValidation(
            store,
            places,
            self.wake,
            options.check,
            options.admission,
            engines=options.engines,
        )
        self._queue_first = self._new_first = False
        self._looked = 0
        """Number of jobs that the last look without a claim was at."""
        self._busy: list[str] = []
        """Those of them that are still to be claimed, since there is something to do."""
        self._round: list[str] = []
        """Running jobs that are still to be looked at in this round."""
        self._next_round = Interval(options.idle_seconds)
        self._orphan_count = Interval(COUNT_SECONDS)
        self._failed_turns: dict[str, int] = {}
        """Job → number of its turns that failed in a row."""
        self._next_signs: dict[str, float] = {}
        """Job whose ranks live by commands → time of its next sign (monotonic clock)."""

    def wake(self) -> None:
        """End the loop's pause, since there may be something to do."""
        self._store.changed.set()

    def close(self) -> None:
        """End the checks of files; `run` does that by itself."""
        self._validation.close()

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set. An error costs a job its turn, an unreachable database costs
        time; neither ends the loop."""
        failures = 0
        self._validation.warm()
        try:
            while not stop.is_set():
                failures = self._step_and_wait(failures)
        finally:
            self.close()

    def _step_and_wait(self, failures: int) -> int:
        """One step, and a pause if no job was due.

        Returns how many steps in a row have failed; the pause grows with them.
        """
        busy = False
        self._meters.turn(self._launcher.host)
        try:
            busy = self.step()
            failures = 0
        except Exception:
            log.exception("the store cannot be used")
            failures += 1
        if not busy:
            self._store.changed.wait(min(POLL_SECONDS * 2**failures, MAX_POLL_SECONDS))
        return failures

    def step(self) -> bool:
        """Give one job its turn, and look at those for which there is nothing to do.

        True if one was due. Raises UnavailableError if the database does not answer.
        """
        self._looked = 0
        if self._store.changed.is_set():
            self._store.changed.clear()
            self._placement.search_again()
        self._validation.attend()
        self._engines.attend()
        self._count_orphans()
        claimed = self._claim()
        if claimed is None:
            return self._looked > 0
        claim, start = claimed
        with about(job_id=claim.job.id, attempt=claim.job.attempt), self._meters.turns.time():
            try:
                self._reconcile(claim, start)
            except Exception as error:
                self._meters.turns_failed.inc()
                log.exception("a job's turn failed; its next is in %g seconds", self._lease_seconds)
                self._report_failed_turn(claim, error)
            else:
                self._failed_turns.pop(claim.job.id, None)
        return True

    def _report_failed_turn(self, claim: Claim, error: Exception) -> None:
        """Tell the user of a job whose turns fail repeatedly, and let it be cancelled all the same.
        An outage is not counted."""
        if isinstance(error, UnavailableError):
            return
        job = claim.job
        failed = self._failed_turns[job.id] = self._failed_turns.get(job.id, 0) + 1
        if failed < FAILED_TURNS:
            return
        try:
            if job.state is State.CANCELLED:
                self._end_unobserved(claim)
            elif failed == FAILED_TURNS:
                message = failed_turns(failed, error, self._lease_seconds)
                self._store.jobs.add_events(job, [NewEvent(level="error", message=message)])
        except Exception:
            log.exception("the job's user could not be told either")

    def _end_unobserved(self, claim: Claim) -> None:
        """End a cancelled job whose turns fail: kill its processes as far as possible, and free its
        slots unless it is seen to run.
        """
        run = self._places.run(claim.job.id)
        attempt = _attempt(run, claim.job)
        try:
            self._launcher.kill(attempt, reasons.Reason.USER_CANCELLED)
        except Exception:
            log.exception("the job's processes were not ended as they should")
        try:
            seen = self._launcher.observe(attempt)
        except UnavailableError:
            return
        except Exception:
            log.exception("it is unknown which processes of the job still run")
            seen = Ended(None)
        if isinstance(seen, Absent | Ended):
            turn = _Turn(
                claim, Intake(job=claim.job, events=[], checkpoints=[], more=False), run, seen
            )
            events = [NewEvent(level="warn", message=CANCELLED_UNOBSERVED)]
            if self._apply(
                turn,
                JobChange(job=replace(claim.job, phase=None), events=events, release_slots=True),
            ):
                self._failed_turns.pop(claim.job.id, None)

    def _count_orphans(self) -> None:
        """Count now and then the attempts whose job the database does not know."""
        if not isinstance(self._launcher, ListsAttempts) or not self._orphan_count.is_due:
            return
        self._orphan_count.restart()
        with contextlib.suppress(LaunchError):  # the place does not answer, which its jobs report
            self._meters.count_orphans(
                self._launcher.host, len(find_orphans(self._store, self._launcher))
            )

    def _claim(self) -> tuple[Claim, ExpectedStart | None] | None:
        """The next active or queued job; the two kinds come first in turn, and so do new and
        running jobs among the active ones, so that none keeps the others waiting.
        """
        self._queue_first = not self._queue_first
        if self._queue_first:
            return self._placement.claim() or self._claim_active()
        return self._claim_active() or self._placement.claim()

    def _claim_active(self) -> tuple[Claim, None] | None:
        self._new_first = not self._new_first
        if not self._busy:
            self._busy = self._look()
        claim = None if self._new_first else self._claim_busy()
        claim = claim or self._store.leases.claim(
            host=self._launcher.host,
            owner=self._owner,
            lease_seconds=self._lease_seconds,
            idle_seconds=self._options.idle_seconds,
            untended_seconds=max(self._options.idle_seconds, UNTENDED_SECONDS),
            new_first=self._new_first,
        )
        claim = claim or self._claim_busy()
        return (claim, None) if claim else None

    def _claim_busy(self) -> Claim | None:
        while self._busy:
            if claim := self._store.leases.claim_given(
                self._busy.pop(0),
                host=self._launcher.host,
                owner=self._owner,
                lease_seconds=self._lease_seconds,
            ):
                return claim
        return None

    def _look(self) -> list[str]:
        """Look at the next running jobs without a claim, which would write each twice: what has
        changed nothing is noted now and then, and what a job has reported is stored in one write.

        Return those for which there is something else to do.
        """
        leases = self._store.leases
        due = {"host": self._launcher.host, "idle_seconds": self._options.idle_seconds}
        if not self._round and self._next_round.is_due:
            self._next_round.restart()
            self._round = leases.ids_to_look_at(**due)
        ids, self._round = self._round[:LOOKS], self._round[LOOKS:]
        if not ids:
            return []
        found, now = leases.jobs_to_look_at(ids, **due)
        self._looked = len(found)
        busy = [job.id for job, _ in found if not self._is_done_by_a_look(job, now)]
        before = now - NOTE_SECONDS
        late = [job.id for job, noted in found if noted <= before and job.id not in busy]
        if late:
            leases.looked_at(late)
        return busy

    def _is_done_by_a_look(self, job: Job, now: float) -> bool:
        """Whether a turn of a job would change nothing but what it has reported, which is stored.

        What fails here fails again in its turn, which tells it.
        """
        try:
            with about(job_id=job.id, attempt=job.attempt):
                run, seen, report = self._observe(job, now)
                if self._sign_is_due(job, seen) or not isinstance(
                    decisions.decide(report.job, seen, now, self._budgets.spent(report.job, now)),
                    Wait,
                ):
                    return False
                if report.job != job or report.events or report.checkpoints or report.more:
                    turn = _Turn(Claim(job=job, token=None, now=now), report, run, seen)
                    with self._meters.turns.time():
                        self._apply(turn, JobChange(job=report.job))
        except Exception:
            return False
        self._failed_turns.pop(job.id, None)
        return True

    def _observe(self, job: Job, now: float) -> tuple[RunDir, Observation, Intake]:
        run = self._places.run(job.id)
        seen = (
            result_seen(run, self._launcher.observe(_attempt(run, job)))
            if job.attempt
            else Absent()
        )
        # Read after observing: all that an attempt wrote before it ended is then there.
        report = read_report(run, job, now)
        if report.checkpoints or isinstance(seen, Ended):
            report = replace(report, job=with_energy(report.job, run))
        if isinstance(seen, Running) and seen.note:
            report = replace(report, events=[*report.events, note_event(seen.note, seen.level)])
        return run, seen, report

    def _reconcile(self, claim: Claim, start: ExpectedStart | None) -> None:
        run, seen, report = self._observe(claim.job, claim.now)
        turn = _Turn(claim, report, run, seen, start)
        if self._sign_is_due(claim.job, seen):
            self._give_sign(turn)
        if isinstance(seen, Ended) and report.more:
            self._apply(turn, JobChange(job=report.job))
        else:
            self._act(turn)

    def _sign_is_due(self, job: Job, seen: Observation) -> bool:
        """Whether ranks that live by commands are to be told that somebody looks after them: a few
        times within the time after which they would leave.
        """
        by_commands = isinstance(seen, Running) and job.stored_spec.by_commands
        return by_commands and time.monotonic() >= self._next_signs.get(job.id, float("-inf"))

    def _give_sign(self, turn: _Turn) -> None:
        now = time.monotonic()
        seconds = self._options.leave_after_seconds
        self._next_signs = {job_id: at for job_id, at in self._next_signs.items() if at > now}
        try:
            turn.attempt.write_presence(
                Presence(sign=secrets.token_hex(8), leave_after_seconds=seconds)
            )
        except OSError as error:  # a full disk must not keep the job from its turn
            log.warning("the job's ranks get no sign of the service: %s", error)
        self._next_signs[turn.job.id] = now + seconds / SIGNS

    def _act(self, turn: _Turn) -> None:
        job = turn.job
        now = turn.claim.now
        action = decisions.decide(job, turn.seen, now, self._budgets.spent(job, now))
        match action:
            case Wait():
                self._apply(turn, JobChange(job=job))
            case Validate():
                change, checked = self._validation.change(job, turn.claim.now)
                if self._apply(turn, change) and checked is not None:
                    self._validation.stored(job, checked)
            case Place():
                self._place(turn)
            case Launch():
                self._launch(turn)
            case Signal():
                self._launcher.signal(
                    turn.attempt, Control(generation=job.generation, desired=job.effective_desired)
                )
                self._apply(turn, JobChange(job=decisions.signalled(job)))
            case Kill(reason):
                self._launcher.kill(turn.attempt, reason)
                if job.state is State.QUEUED:
                    job = replace(job, not_before=turn.claim.now + decisions.RECHECK_SECONDS)
                self._apply(turn, JobChange(job=job))
            case Become():
                self._become(turn, action)
            case _:
                assert_never(action)

    def _place(self, turn: _Turn) -> None:
        """Take the slots, or a seat.

        The start itself is the next turn's, when they are certainly the job's.
        """
        job = turn.job
        now = turn.claim.now
        change = self._placement.place(job, turn.start, now)
        if self._apply(turn, change) and (change.take_slots or change.take_seat):
            self._meters.attempts.inc()
            self._meters.queue_wait.observe(max(0.0, now - (job.queued_at or now)))

    def _launch(self, turn: _Turn) -> None:
        job = turn.job
        spec = turn.job.spec
        if job.engine_id is None:
            slots = self._store.leases.held_slots(job.id)
        else:
            slots = self._store.engines.engine_slots(job.engine_id)
        if self._slot_user is not None and not self._slot_user.release_slots(slots):
            if self._apply(turn, JobChange(job=job)):
                self._store.leases.look_again(job.id)
                time.sleep(SLOT_USER_SECONDS)
            return
        run = self._engines.run_of(job)
        attempt = _attempt(run, job)
        if (
            not run.write_if_absent("spec.json", spec)
            and run.readable("spec.json", JobSpec) is None
        ):
            run.write("spec.json", spec)
        engine = self._engines.prepare(job, spec)
        start = Start(
            job_id=job.id,
            attempt=job.attempt,
            world_size=job.slots,
            generation=job.generation,
            checkpoint=newest_checkpoint(run),
            slots=slots if self._launcher.slots_name_gpus else [],
            nodes=job.nodes,
            priority=job.priority,
            engine=None if engine is None else str(engine),
            seat=None if engine is None else job.seat,
        )
        attempt.settle_start(start)
        try:
            self._launcher.start(attempt, spec)
        except LaunchError as error:
            log.warning("the attempt was not started: %s", error)
            failed = decisions.launch_failed(job, str(error), newest_step(run), turn.claim.now)
            if self._apply(
                turn, JobChange(job=failed.job, events=_events(failed), release_slots=True)
            ):
                self._meters.attempts_ended.labels(reasons.Reason.LAUNCH_FAILED.value).inc()
            return
        self._apply(turn, JobChange(job=job))

    def _become(self, turn: _Turn, action: Become) -> None:
        seen = turn.seen
        if isinstance(seen, Absent) and action.release:
            # Nothing runs and nothing may: an exit record keeps a start that is still on its way
            # from coming to life.
            self._launcher.kill(turn.attempt, reasons.Reason.USER_CANCELLED)
            if not isinstance(self._launcher.observe(turn.attempt), Ended):
                self._apply(turn, JobChange(job=turn.job))
                return
        if turn.job.engine_id is not None and action.release:
            self._engines.look_at(turn.job.engine_id)
        job = action.job
        files = []
        if job.state is State.SUCCEEDED:
            job, files = collect_result(turn.run, job, self._places)
        applied = False
        try:
            change = JobChange(
                job=job, events=_events(action), files=files, release_slots=action.release
            )
            applied = self._apply(turn, change)
        finally:
            for file in files if not applied else ():
                remove_unrecorded(self._places, self._store, file.id)
        if applied and action.release:
            reason = reasons.reason_of(seen.exit) if isinstance(seen, Ended) else None
            self._meters.attempts_ended.labels(reason.value if reason else "stopped").inc()
            self._launcher.clean(turn.attempt)
            if (
                job.state is State.SUCCEEDED
                and self._slot_user is not None
                and turn.job.engine_id is None
            ):
                self._slot_user.preload(job)

    def _apply(self, turn: _Turn, change: JobChange) -> bool:
        """Store a change together with what the attempt reported. False if the claim was lost."""
        report = turn.report
        shown = self._options.without_paths
        job = change.job
        if job.error is not None and job.error != turn.claim.job.error:
            job = replace(job, error={**job.error, "message": shown(job.error["message"])})
        events = [
            replace(event, message=shown(event.message))
            for event in (*report.events, *change.events)
        ]
        change = replace(change, job=job, events=events, checkpoints=report.checkpoints)
        if not self._store.leases.apply(turn.claim, change):
            return False
        if change.release_slots or change.job.state is not turn.claim.job.state:
            self._placement.search_again()
        self._count_and_log(turn.claim.job, change)
        self._trace(turn, change)
        return True

    def _trace(self, turn: _Turn, change: JobChange) -> None:
        before = turn.claim.job
        traces = self._options.traces
        if traces is None or before.traceparent is None:
            return
        try:
            traces.job_parts(
                before.id, before.traceparent, ended_parts(before, change, turn.claim.now)
            )
        except Exception:  # what is stored is stored: a trace is not worth a turn
            log.exception("the job's trace lacks a part")

    def _count_and_log(self, before: Job, change: JobChange) -> None:
        job = change.job
        for metrics in (event.metrics for event in change.events if event.metrics is not None):
            self._meters.steps.inc()
            self._meters.tokens.inc(metrics.tokens or 0)
        newest = max(
            (event.created_at for event in change.events if event.source and event.created_at),
            default=None,
        )
        if newest is not None:
            self._meters.event_lag.observe(max(0.0, time.time() - newest))
        if job.losses > before.losses and job.losses >= TOLD_LOSSES:
            lost = fields(
                losses=job.losses, reason=job.reason and job.reason.value, host=before.host
            )
            log.error(
                "a job's attempts end through no fault of its own: %s",
                job.pending or "its log says why",
                extra=lost,
            )
        if job.state is State.FAILED and before.state is not State.FAILED:
            reason = job.reason.value if job.reason else ""
            self._meters.count_failure(job.project_id, reason)
        if (before.state, before.phase) != (job.state, job.phase):
            moved = fields(
                state=job.state.value,
                phase=job.phase and job.phase.value,
                reason=job.reason and job.reason.value,
            )
            log.info("job moved from %s to %s", _state_text(before), _state_text(job), extra=moved)


def _attempt(run: RunDir, job: Job) -> Attempt:
    """The job's newest attempt."""
    return Attempt(run, job.attempt, job_id=job.id)


def failed_turns(number: int, error: Exception, seconds: float) -> str:
    """Message for the user of a job whose turns fail. `seconds`: until its next turn."""
    cause = disk.os_error(error)
    if isinstance(error, FtError):
        why = error.message
    elif cause is not None and cause.errno in disk.NO_ROOM:
        why = f"{disk.NO_ROOM[cause.errno][0].upper()}{disk.NO_ROOM[cause.errno][1:]}."
    else:
        why = f"The cause is in the service's log ({type(error).__name__})."
    again = f"It is tried again every {seconds:g} seconds. Cancelling the job works."
    return f"The service has failed {number} times in a row to look after this job. {why} {again}"


def _state_text(job: Job) -> str:
    return f"{job.state.value} ({job.phase.value})" if job.phase else job.state.value


def _events(action: Become) -> list[NewEvent]:
    if action.message is None:
        return []
    return [
        NewEvent(
            level="error" if action.job.state is State.FAILED else action.level,
            message=action.message,
        )
    ]
