"""Decisions on a job: what to do next (`decide()`), and what it becomes. Pure: no clock, no I/O.

A *job* is what the user submitted; an *attempt* is one run of its workers, numbered from 1. `state`
is what the wire shows. `phase` refines `running` (and remains in `cancelled` until the processes
are gone). `desired` is what the user wants; each change of it raises `generation`, and `signalled`
is the last generation that was written to the running attempt.

    validating_files ──▶ queued ──▶ running ──▶ succeeded | failed
                           ▲ ▲         │
                           │ └─────────┤ lost, preempted, resumed
                        resume         ▼
                           └──────── paused          cancel, from anywhere before the end ──▶
                           cancelled
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from ft_service.jobs.queue_snapshot import LONGEST_WAIT_SECONDS, JobSize, QueuedJob, is_ahead
from ft_service.jobs.reasons import OF_PAUSES, Reason, Retry, failure_text, reason_of, retry_of
from ft_service.jobs.states import (
    TERMINAL,
    Absent,
    Ended,
    Halt,
    Job,
    Level,
    Observation,
    Phase,
    Running,
    State,
    Unknown,
)
from ft_service.jobs.user_actions import Verb, request
from ft_service.rundir.documents import Desired, ErrorInfo
from ft_service.shared_work.losses import pause_seconds
from ft_service.wording import counted

MAX_FAILURES = 3
BACKOFF_SECONDS = 1.0
"""Pause before the second attempt; doubled before each further one."""
MOST_PAUSE_SECONDS = 600.0
"""Longest pause before another attempt, after many in a row that ended through no fault of the
job.
"""


@dataclass(frozen=True)
class Wait:
    """Nothing to do now."""


@dataclass(frozen=True)
class Validate:
    """Read the data files, then apply `validated()`."""


@dataclass(frozen=True)
class Place:
    """Take slots for a new attempt if enough are free, and start it."""


@dataclass(frozen=True)
class Launch:
    """Start the processes of the newest attempt, which holds slots, unless they exist."""


@dataclass(frozen=True)
class Signal:
    """Tell the running attempt what to do now (`Job.effective_desired`)."""


@dataclass(frozen=True)
class Kill:
    """End the attempt's processes now."""

    reason: Reason


@dataclass(frozen=True)
class Become:
    """Write a changed job; nothing else is done. `release`: free its slots."""

    job: Job
    release: bool = False
    message: str | None = None
    """Text of an event for the user."""
    level: Level = "info"
    """Level of that event; error if the job has failed."""


Action = Wait | Validate | Place | Launch | Signal | Kill | Become

SILENCE_LIMIT_SECONDS = 1800.0
REST_SECONDS = 120.0
"""Pause before the next attempt of a job that found no room on a disk; doubled as
BACKOFF_SECONDS.
"""
OTHER_VERSION_SECONDS = 60.0
"""Interval at which it is tried to start a job that this version, or this host, cannot start."""
RECHECK_SECONDS = 5.0
"""Interval at which a queued job is checked whose last attempt cannot be observed."""
UNSEEN_SECONDS = 10.0
"""How long a place may not answer before its jobs report it."""
_TIME_IS_UP = "The job has held its slots for as long as it may (max_seconds)."
_UNSEEN = "The job cannot be observed now; "
_UNSEEN_RUNS = f"{_UNSEEN}its processes keep running"
_UNSEEN_WAITS = f"{_UNSEEN}its next attempt has not started yet"


def decide(job: Job, seen: Observation, now: float, spent: str | None = None) -> Action:
    """What to do next for a job.

    `seen`: what was observed of its newest attempt; `now`: database time in seconds; `spent`: a
    sentence for the user that the job, or its project, has cost as much as it may; None: it has
    not.
    """
    if spent is not None and _costs_more(job, seen):
        return Become(
            request(job, Verb.PAUSE, now, reason=Reason.COST_LIMIT), message=spent, level="warn"
        )
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


def _costs_more(job: Job, seen: Observation) -> bool:
    """Whether a job takes slots, or would take them next, without having been asked to stop."""
    if job.effective_desired is not Desired.RUN or _is_unseen(job):
        return False
    return job.state is State.QUEUED or (
        job.state is State.RUNNING and isinstance(seen, Running) and job.generation == job.signalled
    )


def _decide_at_rest(job: Job, seen: Observation, now: float) -> Action:
    if job.attempt and isinstance(
        seen, Running
    ):  # impossible; but two attempts must never run at once
        return Kill(Reason.STOP_TIMEOUT)
    if job.state is State.PAUSED or is_ahead(job.not_before, now):
        return Wait()
    if job.is_out_of_time(now):
        return _out_of_time(job, now)
    if isinstance(seen, Unknown):  # not due for a while, so that the jobs behind it can start
        rest = replace(job, not_before=now + RECHECK_SECONDS)
        return _report_unseen(rest, seen) if _is_newly_unseen(job, seen) else Become(rest)
    return _report_seen(job) if _is_unseen(job) else Place()


def _is_unseen(job: Job) -> bool:
    """Whether the job reports that it cannot be observed."""
    return job.pending is not None and job.pending.startswith(_UNSEEN)


def _is_newly_unseen(job: Job, seen: Unknown) -> bool:
    return seen.seconds >= UNSEEN_SECONDS and not _is_unseen(job)


def _report_unseen(job: Job, seen: Unknown) -> Become:
    """The job, with the reason why it cannot be observed.

    One whose attempt has not been started is shown as waiting.
    """
    runs = job.state is State.RUNNING and (
        seen.begun or job.phase not in (Phase.LAUNCHING, Phase.WAITING)
    )
    job = replace(job, pending=f"{_UNSEEN_RUNS if runs else _UNSEEN_WAITS}: {seen.why}")
    if job.phase is Phase.LAUNCHING and not runs:
        job = replace(job, phase=Phase.WAITING)
    return Become(job, message=job.pending, level="warn")


def _report_seen(job: Job) -> Become:
    return Become(replace(job, pending=None), message="The job is observed again.")


def _decide_running(job: Job, seen: Observation, now: float) -> Action:
    if _is_unseen(job) and not isinstance(seen, Unknown):
        # Another replica may answer with an observation from before the outage.
        return Wait() if isinstance(seen, Running) and not seen.fresh else _report_seen(job)
    match seen:
        case Unknown():
            return _report_unseen(job, seen) if _is_newly_unseen(job, seen) else Wait()
        case Absent() if _is_stopped_by_sweep(job):
            return _end_by_sweep(job, now)
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
    if job.effective_desired is Desired.RUN and job.is_out_of_time(now):
        return Become(
            halted(job, Halt.TIME_LIMIT),
            message=f"{_TIME_IS_UP} It stops at a checkpoint.",
            level="warn",
        )
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
            return (
                Kill(Reason.STOP_TIMEOUT) if seen.silent_seconds > SILENCE_LIMIT_SECONDS else Wait()
            )
        case Absent() | Ended():
            return Become(replace(job, phase=None), release=True)
        case _:
            assert_never(seen)


def _decide_ended(job: Job, seen: Ended, now: float) -> Action:
    job = replace(job, pending=None, fault_group=seen.fault_group or job.fault_group)
    reason = reason_of(seen.exit)
    if reason is Reason.SUCCEEDED:
        done = replace(
            job, state=State.SUCCEEDED, phase=None, reason=reason, finished_at=now, stopped=None
        )
        return Become(done, release=True, message=reason.text)
    if _is_stopped_by_sweep(job):
        return _end_by_sweep(job, now)
    if job.halt is Halt.TIME_LIMIT and job.desired is Desired.RUN:
        return _out_of_time(job, now)
    if reason is None:
        return _after_stop(job, seen, now)
    error = seen.exit.error if seen.exit else None
    match retry_of(reason, error):
        case Retry.NEVER:
            return Become(
                fail(job, reason, error, now), release=True, message=failure_text(reason, error)
            )
        case Retry.LATER | Retry.LOST | Retry.UNCOUNTED:
            return _later(job, seen.checkpoint_step, reason, error, now)
        case Retry.COUNTED:
            return _after_failure(job, seen.checkpoint_step, reason, error, now)


def _after_stop(job: Job, seen: Ended, now: float) -> Become:
    """The job after an attempt that stopped without failing; if its place ended it in vain, the job
    waits and says why.
    """
    rest = _at_rest(job)
    message = seen.exit.message if seen.exit else None
    if job.halt is Halt.PREEMPTED and rest.state is State.QUEUED:
        rest = replace(rest, reason=Reason.PREEMPTED)
        message = f"{Reason.PREEMPTED.text} It continues from there when slots are free."
    if rest.state is not State.QUEUED or not seen.delay_seconds:
        return Become(rest, release=True, message=message)
    message = f"{message} The next attempt is made in {counted(seen.delay_seconds, 'second')}."
    rest = replace(
        rest, not_before=now + min(seen.delay_seconds, LONGEST_WAIT_SECONDS), pending=message
    )
    return Become(rest, release=True, message=message, level="warn")


def _out_of_time(job: Job, now: float) -> Become:
    return Become(
        fail(job, Reason.TIME_LIMIT, None, now), release=True, message=Reason.TIME_LIMIT.text
    )


def _is_stopped_by_sweep(job: Job) -> bool:
    return job.halt is Halt.SWEEP and job.desired is Desired.RUN


def _end_by_sweep(job: Job, now: float) -> Become:
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
    return Become(ended, release=True, message=Reason.SWEEP_STOPPED.text)


def stopped_by_sweep(job: Job, why: str, now: float) -> Job:
    """The job stopped by its sweep: at a checkpoint if an attempt runs, else at once.

    A job that is over, or already stops, is returned unchanged. `why`: text for the user.
    """
    if job.state in TERMINAL or job.halt is Halt.SWEEP:
        return job
    if job.state is State.RUNNING:
        stops = replace(halted(job, Halt.SWEEP, f"It stops at a checkpoint: {why}."), stopped=why)
        return stops if job.desired is Desired.RUN else job
    return _end_by_sweep(replace(job, stopped=why), now).job


def halted(job: Job, halt: Halt, why: str | None = None) -> Job:
    """The job whose attempt must stop at a checkpoint although its user wants it to run.

    `why`: text for the user.
    """
    return replace(job, halt=halt, generation=job.generation + 1, pending=why or job.pending)


def preempted_by(job: Job, head: QueuedJob) -> Job:
    """The job stopping at a checkpoint so that `head` can start.

    A job that does not train, or already stops, is returned unchanged.
    """
    if (
        job.state is not State.RUNNING
        or job.phase is not Phase.TRAINING
        or job.effective_desired is not Desired.RUN
    ):
        return job
    return halted(
        job,
        Halt.PREEMPTED,
        f"It stops at a checkpoint, to make room for a job of priority {head.priority}.",
    )


def launch_failed(job: Job, message: str, checkpoint_step: int, now: float) -> Become:
    """The job after an attempt that could not be started; `message` says why.

    `checkpoint_step`: as in Ended.
    """
    error = ErrorInfo(code=Reason.LAUNCH_FAILED.code, message=message)
    return _later(job, checkpoint_step, Reason.LAUNCH_FAILED, error, now)


def _after_failure(
    job: Job, checkpoint_step: int, reason: Reason, error: ErrorInfo | None, now: float
) -> Become:
    job = _since_checkpoint(job, checkpoint_step)
    job = replace(job, failures=job.failures + 1)
    text = failure_text(reason, error)
    if job.failures >= MAX_FAILURES:
        text += f" {job.failures} attempts failed without reaching a new checkpoint."
        return Become(fail(job, reason, error, now, text), release=True, message=text)
    delay = BACKOFF_SECONDS * 2 ** (job.failures - 1)
    where, rest = _continued(job, checkpoint_step, reason, now + delay)
    return Become(rest, release=True, message=f"{text} The job continues {where}.", level="error")


def _later(
    job: Job, checkpoint_step: int, reason: Reason, error: ErrorInfo | None, now: float
) -> Become:
    """The job after an attempt that its host or its place has ended, or did not start: it tries
    again for as long as that lasts, without counting failures.
    """
    job = _since_checkpoint(job, checkpoint_step)
    job = replace(job, losses=job.losses + 1)
    first = REST_SECONDS if reason is Reason.DISK_FULL else BACKOFF_SECONDS
    pause = pause_seconds(job.losses, first=first, longest=MOST_PAUSE_SECONDS)
    where, rest = _continued(job, checkpoint_step, reason, now + pause)
    lost = (
        f" That is {job.losses} times in a row without a new checkpoint." if job.losses > 1 else ""
    )
    text = (
        f"{failure_text(reason, error)}{lost} This counts as no failure of the job, which "
        f"continues {where}"
    )
    text += f" in {counted(pause, 'second')}."
    rest = replace(rest, pending=text) if rest.state is State.QUEUED else rest
    return Become(
        rest, release=True, message=text, level="error" if reason.retry is Retry.LATER else "warn"
    )


def _since_checkpoint(job: Job, checkpoint_step: int) -> Job:
    """The job with its failures and losses counted from the newest checkpoint.

    `checkpoint_step`: as in Ended.
    """
    if checkpoint_step <= job.failed_at_step:
        return job
    return replace(job, failures=0, losses=0, failed_at_step=checkpoint_step)


def _continued(
    job: Job, checkpoint_step: int, reason: Reason, not_before: float
) -> tuple[str, Job]:
    """Where the next attempt begins, in words, and the job until then."""
    where = f"from step {checkpoint_step}" if checkpoint_step >= 0 else "from the beginning"
    rest = _at_rest(job)
    # By its reason it is resumed, however it ended.
    kept = rest.state is State.PAUSED and rest.reason in OF_PAUSES
    rest = replace(rest, reason=rest.reason if kept else reason, not_before=not_before)
    return where, rest if checkpoint_step >= 0 else replace(rest, left_seconds=None)


def _at_rest(job: Job) -> Job:
    """The job, queued or paused, after an attempt that ended before training did."""
    state = State.PAUSED if job.desired is Desired.PAUSE else State.QUEUED
    job = replace(
        job,
        state=state,
        phase=None,
        halt=None,
        signalled=job.generation,
        pending=None,
        stopped=None,
    )
    if not job.shapes:
        return job
    fewest = job.shapes[-1]  # a waiting job counts as its smallest shape
    left = None if job.left_seconds is None else job.left_seconds * job.slots / fewest.ranks
    return replace(job, slots=fewest.ranks, nodes=fewest.nodes, left_seconds=left)


def fail(
    job: Job, reason: Reason, error: ErrorInfo | None, now: float, text: str | None = None
) -> Job:
    """The failed job, with OpenAI's error object."""
    shown = {
        "code": error.code if error else reason.code,
        "message": text or failure_text(reason, error),
        "param": error.param if error else None,
    }
    return replace(
        job, state=State.FAILED, phase=None, halt=None, reason=reason, error=shown, finished_at=now
    )


def validated(job: Job, error: ErrorInfo | None, now: float) -> Job:
    """The job after its data files were read: failed, queued or paused."""
    job = replace(job, pending=None)
    if error is not None:
        of_data = error.param in ("training_file", "validation_file", "validation_split")
        reason = Reason.INVALID_FILE if of_data else Reason.PERMANENT_ERROR
        return fail(job, reason, error, now, error.message)
    return replace(job, state=State.PAUSED if job.desired is Desired.PAUSE else State.QUEUED)


def placed(job: Job, host: str, shape: JobSize | None = None, engine_id: str | None = None) -> Job:
    """The job with a new attempt that holds slots of a host.

    `shape`: the one it got, where it may have several. `engine_id`: the engine in which it has a
    seat, which holds the slots instead; None: none.
    """
    if job.shapes and shape is not None:
        job = replace(job, slots=shape.ranks, nodes=shape.nodes)
    return replace(
        job,
        state=State.RUNNING,
        phase=Phase.LAUNCHING,
        attempt=job.attempt + 1,
        ingested=-1,
        attempt_joules=None,
        host=host,
        engine_id=engine_id,
        halt=None,
        signalled=job.generation,
        pending=None,
    )


def too_large(job: Job) -> Job:
    """The job, still queued, with the reason that its host has too few slots."""
    return replace(
        job,
        pending=f"It needs {job.slots} slots at once, more than this host has now (FT_SLOTS). "
        "Smaller jobs go first. It starts "
        "when the host has enough; or cancel it, and ask for fewer ranks "
        "(distributed.nproc_per_node).",
    )


def without_price(job: Job, now: float) -> Job:
    """The job, still queued, with the reason that this place cannot count its cost."""
    return replace(
        job,
        not_before=now + OTHER_VERSION_SECONDS,
        pending="It has a limit of its cost (max_cost), and this host has no price by which that "
        "could be counted (FT_PRICES). It starts where there is one; or cancel it, and create it "
        "without max_cost.",
    )


def of_another_version(job: Job, now: float) -> Job:
    """The job, still queued, with the reason that this version cannot train it.

    It is looked at again after a while: another version may then serve.
    """
    return replace(
        job,
        not_before=now + OTHER_VERSION_SECONDS,
        pending=f"It was made by another version of the service, and this one does not know its "
        f"{job.stored_spec.unknown_text}. It starts under a version that does; or cancel it, and "
        "create it again.",
    )


def signalled(job: Job) -> Job:
    """The job after the running attempt was told what to do."""
    phase = Phase.LAUNCHING if job.effective_desired is Desired.RUN else Phase.STOPPING
    return replace(job, signalled=job.generation, phase=phase)
