"""Parts of a job that a reconciler's turn has seen end, for its trace. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ft_service.jobs.states import TERMINAL, Job, Phase, State
from ft_service.store.records import Checkpoint, JobChange, NewEvent
from ft_service.traces import Timespan

_JOB = ""
_LAUNCH = frozenset({Phase.LAUNCHING, Phase.WAITING})


def ended_parts(before: Job, change: JobChange, now: float) -> Iterator[Timespan]:
    """Yield the parts that have ended by a change of a job.

    `before`: the job until then. `now`: database time.
    """
    job = change.job
    if before.state is State.VALIDATING and job.state is not State.VALIDATING:
        yield Timespan(
            key="check files", parent=_JOB, began=before.created_at, ended=now, failed=_error(job)
        )
    if before.state is State.QUEUED and job.state is State.RUNNING:
        began = before.queued_at or before.created_at
        yield Timespan(
            key=f"queue {job.attempt}", parent=_JOB, name="queue", began=began, ended=now
        )
    if before.state is State.RUNNING and before.taken_at is not None:
        yield from _parts_of_attempt(before, before.taken_at, change, now)
    if job.state in TERMINAL and before.state not in TERMINAL:
        said = {
            "ft.state": job.state.value,
            "ft.reason": job.reason and job.reason.value,
            "ft.base": job.base,
        }
        name = f"job {job.id}"
        began = before.created_at
        yield Timespan(
            key=_JOB,
            parent=None,
            name=name,
            began=began,
            ended=now,
            failed=_error(job),
            attributes=said,
        )


def _parts_of_attempt(
    before: Job, taken_at: float, change: JobChange, now: float
) -> Iterator[Timespan]:
    job = change.job
    key = f"attempt {before.attempt}"
    is_over = job.state is not State.RUNNING
    if before.phase in _LAUNCH and (is_over or job.phase not in _LAUNCH):
        yield Timespan(key=f"{key} launch", parent=key, name="launch", began=taken_at, ended=now)
    if (steps := _steps(key, change.events)) is not None:
        yield steps
    for point in change.checkpoints:
        yield _checkpoint(key, point)
    if is_over:
        where = {"ft.host": before.host, "ft.engine.id": before.engine_id}
        said = {**where, "ft.slots": before.slots, "ft.nodes": before.nodes}
        yield Timespan(
            key=key, parent=_JOB, began=taken_at, ended=now, failed=_error(job), attributes=said
        )


def _steps(attempt: str, events: Sequence[NewEvent]) -> Timespan | None:
    """Return the steps of one report as one part, since thousands of steps must not become
    thousands of spans; None: there are none.
    """
    steps = [
        (event.metrics, event.created_at or 0.0) for event in events if event.metrics is not None
    ]
    if not steps:
        return None
    (first, began), (last, ended) = steps[0], steps[-1]
    said = {
        "ft.steps": len(steps),
        "ft.tokens": sum(metrics.tokens or 0 for metrics, _ in steps),
        "ft.step_seconds": sum(metrics.step_seconds or 0.0 for metrics, _ in steps) / len(steps),
        "ft.train_loss": last.train_loss,
    }
    name = f"steps {first.step} to {last.step}" if len(steps) > 1 else f"step {first.step}"
    began -= first.step_seconds or 0.0
    return Timespan(
        key=f"{attempt} step {first.step}",
        parent=attempt,
        name=name,
        began=began,
        ended=ended,
        attributes=said,
    )


def _checkpoint(attempt: str, point: Checkpoint) -> Timespan:
    began = point.created_at
    stall = None
    if point.metrics is not None:
        began -= point.metrics.checkpoint_seconds or 0.0
        stall = point.metrics.checkpoint_stall_seconds
    name = f"checkpoint {point.name}"
    said = {"ft.stall_seconds": stall}
    key = f"{attempt} {point.name}"
    return Timespan(
        key=key, parent=attempt, name=name, began=began, ended=point.created_at, attributes=said
    )


def _error(job: Job) -> str | None:
    """Return the message of a job that has failed, or of an attempt that is repeated."""
    return (
        str(job.error.get("message"))
        if job.error and job.state in (State.FAILED, State.QUEUED)
        else None
    )
