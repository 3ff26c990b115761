"""A job's states and what to do next: records, the verbs of the user, and `decide()`. Pure: no clock, no I/O.

Vocabulary. A *job* is what the user submitted; an *attempt* is one run of its workers, numbered from 1. `state` is what the
wire shows. `phase` refines `running` (and lives on in `cancelled` until the processes are gone). `desired` is the user's
wish; each change of it raises `generation`, and `signalled` is the last generation that was written to the running attempt.

    validating_files ──▶ queued ──▶ running ──▶ succeeded | failed
                           ▲ ▲         │
                           │ └─────────┤ lost, preempted, resumed
                        resume         ▼
                           └──────── paused          cancel, from anywhere before the end ──▶ cancelled
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from ft_service.jobs.line import LONGEST_WAIT_SECONDS, Shape, Waiting, is_ahead
from ft_service.jobs.reasons import ERROR_CODE, RETRY, USER_TEXT, Reason, Retry, failure_text, reason_of
from ft_service.jobs.states import TERMINAL, Absent, Ended, Halt, Job, Level, Observation, Phase, Running, State, Unknown
from ft_service.rundir.documents import Desired, ErrorInfo

MAX_FAILURES = 3
BACKOFF_SECONDS = 1.0
"""Wait before the second try; doubled for each further one."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do now."""


@dataclass(frozen=True)
class Validate:
    """Read the data files; then `validated()` says what becomes of the job."""


@dataclass(frozen=True)
class Place:
    """Take slots for a new attempt, if enough are free, and start it."""


@dataclass(frozen=True)
class Launch:
    """Start the newest attempt, which holds slots and has no processes (create if absent)."""


@dataclass(frozen=True)
class Signal:
    """Write the wish to the running attempt."""


@dataclass(frozen=True)
class Kill:
    """End the attempt's processes now."""

    reason: Reason


@dataclass(frozen=True)
class Become:
    """The job changes without anything being done in the outside world. `release`: its slots are free again."""

    job: Job
    release: bool = False
    message: str | None = None
    """An event for the user."""
    level: Level = "info"
    """Level of the event; that of a job that has failed is an error."""


Action = Wait | Validate | Place | Launch | Signal | Kill | Become

SILENCE_LIMIT_SECONDS = 1800.0
REST_SECONDS = 120.0
"""Until a job is tried again that found no room on a disk: what it does until then is done in vain."""
RECHECK_SECONDS = 5.0
"""Until a queued job whose last attempt could not be observed is looked at again."""
UNSEEN_SECONDS = 10.0
"""How long a place may not answer before its jobs say so."""
_TIME_IS_UP = "The job has held its slots for as long as it may (max_seconds)."
_UNSEEN = "The job cannot be observed now; what runs goes on"


def decide(job: Job, seen: Observation, now: float) -> Action:
    """What to do next for a job, given what was seen of its newest attempt. `now`: seconds, database time."""
    match job.state:
        case State.VALIDATING:
            return Validate()
        case State.QUEUED | State.PAUSED:
            return _decide_at_rest(job, seen, now)
        case State.RUNNING:
            return _decide_running(job, seen, now)
        case State.CANCELLED if job.phase is not None:
            return _decide_cancelled(job, seen)
        case State.SUCCEEDED | State.FAILED | State.CANCELLED:
            return Wait()
        case _:
            assert_never(job.state)


def _decide_at_rest(job: Job, seen: Observation, now: float) -> Action:
    if job.attempt and isinstance(seen, Running):  # cannot be; but two attempts at once must not be either
        return Kill(Reason.STOP_TIMEOUT)
    if job.state is State.PAUSED or is_ahead(job.not_before, now):
        return Wait()
    if job.is_out_of_time(now):
        return _out_of_time(job, now)
    if isinstance(seen, Unknown):  # steps aside, so that the queue behind it moves
        rest = replace(job, not_before=now + RECHECK_SECONDS)
        return _tell_unseen(rest, seen) if _is_news(job, seen) else Become(rest)
    return _tell_seen(job) if _is_unseen(job) else Place()


def _is_unseen(job: Job) -> bool:
    """Whether the job says that it cannot be observed."""
    return job.pending is not None and job.pending.startswith(_UNSEEN)


def _is_news(job: Job, seen: Unknown) -> bool:
    return seen.seconds >= UNSEEN_SECONDS and not _is_unseen(job)


def _tell_unseen(job: Job, seen: Unknown) -> Become:
    job = replace(job, pending=f"{_UNSEEN}: {seen.why}")
    return Become(job, message=job.pending, level="warn")


def _tell_seen(job: Job) -> Become:
    return Become(replace(job, pending=None), message="The job is observed again.")


def _decide_running(job: Job, seen: Observation, now: float) -> Action:
    if _is_unseen(job) and not isinstance(seen, Unknown):
        # Another replica may answer from a look that it made before the outage.
        return Wait() if isinstance(seen, Running) and not seen.fresh else _tell_seen(job)
    match seen:
        case Unknown():
            return _tell_unseen(job, seen) if _is_news(job, seen) else Wait()
        case Absent() if _is_stopped_by_sweep(job):
            return _swept(job, now)
        case Absent():
            return Launch() if job.desired is Desired.RUN else Become(_at_rest(job), release=True)
        case Running():
            return _decide_alive(job, seen, now)
        case Ended():
            return _decide_ended(job, seen, now)
        case _:
            assert_never(seen)


def _decide_alive(job: Job, seen: Running, now: float) -> Action:
    if job.generation != job.signalled:
        return Signal()
    if job.wish is Desired.RUN and job.is_out_of_time(now):
        return Become(halted(job, Halt.TIME_LIMIT), message=f"{_TIME_IS_UP} It stops at a checkpoint.", level="warn")
    if job.wish is Desired.RUN and seen.leaving is not None:
        leaves = halted(job, Halt.DRAINED, f"{seen.leaving}: it stops at a checkpoint, and goes on elsewhere.")
        return Become(leaves, message=leaves.pending, level="warn")
    if seen.silent_seconds > SILENCE_LIMIT_SECONDS:
        return Kill(Reason.STALLED)
    if job.phase in (Phase.LAUNCHING, Phase.WAITING) and not seen.admitted:
        waiting = replace(job, phase=Phase.WAITING, pending=seen.note or job.pending)
        return Wait() if waiting == job else Become(waiting)
    if job.phase is Phase.WAITING:
        launching = replace(job, phase=Phase.LAUNCHING, pending=seen.note)
        return Become(launching, message="The cluster has a place for the attempt.")
    if job.phase is Phase.LAUNCHING and seen.reported:
        return Become(replace(job, phase=Phase.TRAINING, pending=None))
    if job.phase is Phase.LAUNCHING and job.pending != seen.note:
        return Become(replace(job, pending=seen.note))
    return Wait()


def _decide_cancelled(job: Job, seen: Observation) -> Action:
    match seen:
        case Unknown():
            return Wait()
        case Running():
            if job.generation != job.signalled:
                return Signal()
            return Kill(Reason.STOP_TIMEOUT) if seen.silent_seconds > SILENCE_LIMIT_SECONDS else Wait()
        case Absent() | Ended():
            return Become(replace(job, phase=None), release=True)
        case _:
            assert_never(seen)


def _decide_ended(job: Job, seen: Ended, now: float) -> Action:
    job = replace(job, pending=None)
    reason = reason_of(seen.exit)
    if reason is Reason.SUCCEEDED:
        done = replace(job, state=State.SUCCEEDED, phase=None, reason=reason, finished_at=now, stopped=None)
        return Become(done, release=True, message=USER_TEXT[reason])
    if _is_stopped_by_sweep(job):
        return _swept(job, now)
    if job.halt is Halt.TIME_LIMIT and job.desired is Desired.RUN:
        return _out_of_time(job, now)
    if reason is None:
        return _after_stop(job, seen, now)
    error = seen.exit.error if seen.exit else None
    if RETRY[reason] is Retry.NEVER:
        return Become(fail(job, reason, error, now), release=True, message=failure_text(reason, error))
    if RETRY[reason] is Retry.LATER:
        return _later(job, seen.checkpoint_step, reason, error, now)
    return _after_failure(job, seen.checkpoint_step, reason, error, now)


def _after_stop(job: Job, seen: Ended, now: float) -> Become:
    """No failure. Where the attempt did not get its place the job waits, and says why."""
    rest, message = _at_rest(job), seen.exit.message if seen.exit else None
    if job.halt is Halt.PREEMPTED and rest.state is State.QUEUED:
        rest = replace(rest, reason=Reason.PREEMPTED)
        message = f"{USER_TEXT[Reason.PREEMPTED]} It goes on from there when slots are free."
    if rest.state is not State.QUEUED or not seen.delay_seconds:
        return Become(rest, release=True, message=message)
    message = f"{message} The next attempt is made in {seen.delay_seconds:g} seconds."
    rest = replace(rest, not_before=now + min(seen.delay_seconds, LONGEST_WAIT_SECONDS), pending=message)
    return Become(rest, release=True, message=message, level="warn")


def _out_of_time(job: Job, now: float) -> Become:
    return Become(fail(job, Reason.TIME_LIMIT, None, now), release=True, message=USER_TEXT[Reason.TIME_LIMIT])


def _is_stopped_by_sweep(job: Job) -> bool:
    return job.halt is Halt.SWEEP and job.desired is Desired.RUN


def _swept(job: Job, now: float) -> Become:
    ended = replace(
        job,
        state=State.CANCELLED,
        phase=None,
        halt=None,
        signalled=job.generation,
        reason=Reason.SWEEP_STOPPED,
        pending=None,
        finished_at=now,
    )
    return Become(ended, release=True, message=USER_TEXT[Reason.SWEEP_STOPPED])


def stopped_by_sweep(job: Job, why: str, now: float) -> Job:
    """The job when its sweep stops it: at a checkpoint if an attempt of it runs, else at once. Itself, if it is over, stops
    already, or stops because its user wants it to. `why`: for the user."""
    if job.state in TERMINAL or job.halt is Halt.SWEEP:
        return job
    if job.state is State.RUNNING:
        stops = replace(halted(job, Halt.SWEEP, f"It stops at a checkpoint: {why}."), stopped=why)
        return stops if job.desired is Desired.RUN else job
    return _swept(replace(job, stopped=why), now).job


def halted(job: Job, halt: Halt, why: str | None = None) -> Job:
    """The job whose attempt is to stop at a checkpoint, though its user wants it to run. `why`: for the user."""
    return replace(job, halt=halt, generation=job.generation + 1, pending=why or job.pending)


def displaced_by(job: Job, head: Waiting) -> Job:
    """The job when it is to make room for another. Itself, if it is not training any more or stops already."""
    if job.state is not State.RUNNING or job.phase is not Phase.TRAINING or job.wish is not Desired.RUN:
        return job
    return halted(job, Halt.PREEMPTED, f"It stops at a checkpoint, to make room for a job of priority {head.priority}.")


def launch_failed(job: Job, message: str, checkpoint_step: int, now: float) -> Become:
    """What becomes of a job whose attempt could not be started; `message` says why. `checkpoint_step`: as in Ended."""
    error = ErrorInfo(code=ERROR_CODE[Reason.LAUNCH_FAILED], message=message)
    return _after_failure(job, checkpoint_step, Reason.LAUNCH_FAILED, error, now)


def _after_failure(job: Job, checkpoint_step: int, reason: Reason, error: ErrorInfo | None, now: float) -> Become:
    progressed = checkpoint_step > job.failed_at_step
    failures = 1 if progressed else job.failures + 1
    job = replace(job, failures=failures, failed_at_step=max(checkpoint_step, job.failed_at_step))
    text = failure_text(reason, error)
    if failures >= MAX_FAILURES:
        text += f" {failures} attempts in a row failed without reaching a new checkpoint."
        return Become(fail(job, reason, error, now, text), release=True, message=text)
    delay = BACKOFF_SECONDS * 2 ** (failures - 1)
    where, rest = _goes_on(job, checkpoint_step, reason, now + delay)
    return Become(rest, release=True, message=f"{text} The job goes on {where}.", level="error")


def _later(job: Job, checkpoint_step: int, reason: Reason, error: ErrorInfo | None, now: float) -> Become:
    """What becomes of a job whose attempt found something lacking that is no fault of its own: it tries again until it is
    there, and its failures are not counted."""
    where, rest = _goes_on(job, checkpoint_step, reason, now + REST_SECONDS)
    text = f"{failure_text(reason, error)} The job goes on {where} in {REST_SECONDS:g} seconds, and waits as long as it takes."
    return Become(replace(rest, pending=text), release=True, message=text, level="error")


def _goes_on(job: Job, checkpoint_step: int, reason: Reason, not_before: float) -> tuple[str, Job]:
    """From where the next attempt goes on, in words, and the job until then."""
    where = f"from step {checkpoint_step}" if checkpoint_step >= 0 else "from the beginning"
    rest = replace(_at_rest(job), reason=reason, not_before=not_before)
    return where, rest if checkpoint_step >= 0 else replace(rest, left_seconds=None)


def _at_rest(job: Job) -> Job:
    """Where a job goes whose attempt has ended before its time."""
    state = State.PAUSED if job.desired is Desired.PAUSE else State.QUEUED
    job = replace(job, state=state, phase=None, halt=None, signalled=job.generation, pending=None, stopped=None)
    if not job.shapes:
        return job
    fewest = job.shapes[-1]  # with which it waits, whatever it had
    left = None if job.left_seconds is None else job.left_seconds * job.slots / fewest.ranks
    return replace(job, slots=fewest.ranks, nodes=fewest.nodes, left_seconds=left)


def fail(job: Job, reason: Reason, error: ErrorInfo | None, now: float, text: str | None = None) -> Job:
    """The job, failed for good, with OpenAI's error object."""
    shown = {
        "code": error.code if error else ERROR_CODE[reason],
        "message": text or failure_text(reason, error),
        "param": error.param if error else None,
    }
    return replace(job, state=State.FAILED, phase=None, halt=None, reason=reason, error=shown, finished_at=now)


def validated(job: Job, error: ErrorInfo | None, now: float) -> Job:
    """The job after its data files were read: failed, or on its way."""
    job = replace(job, pending=None)
    if error is not None:
        of_data = error.param in ("training_file", "validation_file", "validation_split")
        reason = Reason.INVALID_FILE if of_data else Reason.PERMANENT_ERROR
        return fail(job, reason, error, now, error.message)
    return replace(job, state=State.PAUSED if job.desired is Desired.PAUSE else State.QUEUED)


def placed(job: Job, host: str, shape: Shape | None = None) -> Job:
    """The job with a new attempt on a host or in a place, whose slots it holds. `shape`: of a job that may have
    several, the one that it got."""
    if job.shapes and shape is not None:
        job = replace(job, slots=shape.ranks, nodes=shape.nodes)
    return replace(
        job,
        state=State.RUNNING,
        phase=Phase.LAUNCHING,
        attempt=job.attempt + 1,
        ingested=-1,
        host=host,
        halt=None,
        signalled=job.generation,
        pending=None,
    )


def too_large(job: Job) -> Job:
    """The job, left in the queue: no host that could observe it has as many slots as it needs."""
    return replace(
        job,
        pending=f"It needs {job.slots} slots at once, more than this host has now (FT_SLOTS). Smaller jobs go first. It starts "
        "when the host has enough; or cancel it, and ask for fewer ranks (distributed.nproc_per_node).",
    )


def signalled(job: Job) -> Job:
    """The job after its wish was written to the running attempt."""
    phase = Phase.LAUNCHING if job.wish is Desired.RUN else Phase.STOPPING
    return replace(job, signalled=job.generation, phase=phase)
