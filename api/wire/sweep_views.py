"""Sweeps on the wire: nothing of OpenAI's, in the manner of its jobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from ft_service.jobs.states import TERMINAL, Job, Phase, State
from ft_service.store.sweeps.records import Sweep
from ft_service.sweeps.course import Course


class SweepJobView(BaseModel):
    """A job of a sweep, in its table."""

    id: str
    values: dict[str, Any]
    """What it has of its own: dotted option → value."""
    status: str
    phase: str | None
    reason: str | None
    stopped: str | None
    """Why the sweep stopped it; null: it did not."""
    error: str | None
    """Why it failed."""
    step: int | None
    total_steps: int | None
    valid_loss: float | None
    """Its lowest, by which jobs are compared; null: it was not validated yet."""
    best_step: int | None
    """Where that was."""
    fine_tuned_model: str | None


class BestView(BaseModel):
    """The job with the lowest validation loss, the earlier one at equal losses."""

    job_id: str
    valid_loss: float
    step: int
    values: dict[str, Any]
    fine_tuned_model: str | None
    """Once it has succeeded."""


class SweepView(BaseModel):
    id: str
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    created_at: int
    finished_at: int | None
    status: Literal["running", "succeeded", "failed", "cancelled"]
    """running: a job is not over; succeeded: a job has succeeded, and is named; failed: none has."""
    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    metadata: dict[str, str] | None
    sweep: dict[str, Any]
    """As it was asked for."""
    method: Literal["grid", "random"]
    options: list[str]
    """Those that are tried, dotted."""
    seed: int | None
    """Of what was drawn."""
    eta: int | None
    """Of those that reach a rung one in so many is kept; null: none is stopped."""
    rungs: list[float]
    """Shares of a job's steps after which jobs are compared."""
    counts: dict[str, int]
    """Status → jobs."""
    best: BestView | None
    """So far, until the sweep is over: then of the jobs that have succeeded."""
    jobs: list[SweepJobView]
    """Best first; those without a loss last, in the order of their creation."""


class DeletedSweepView(BaseModel):
    id: str
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    deleted: Literal[True] = True


def sweep_view(sweep: Sweep, jobs: Sequence[Job], best: Job | None) -> SweepView:
    """`jobs`: its jobs in the order of their creation; `best`: of these, so far."""
    request, settings = sweep.request, sweep.settings
    counts: dict[str, int] = {}
    for job in jobs:
        counts[_status(job)] = counts.get(_status(job), 0) + 1
    return SweepView(
        id=sweep.id,
        created_at=int(sweep.created_at),
        finished_at=None if sweep.finished_at is None else int(sweep.finished_at),
        status=_status_of(sweep, jobs),
        model=request["model"],
        training_file=request["training_file"],
        validation_file=request.get("validation_file"),
        suffix=request.get("suffix"),
        metadata=request.get("metadata"),
        sweep=request["sweep"],
        method=settings["method"],
        options=settings["options"],
        seed=settings.get("seed"),
        eta=settings["eta"],
        rungs=settings["rungs"],
        counts=counts,
        best=_best(best) if best else None,
        jobs=sorted((_job(job) for job in jobs), key=_rank),
    )


def _rank(job: SweepJobView) -> tuple[bool, float]:
    return job.valid_loss is None, job.valid_loss or 0.0


def _job(job: Job) -> SweepJobView:
    course = Course.read(job.sweep_course)
    return SweepJobView(
        id=job.id,
        values=job.sweep_values or {},
        status=_status(job),
        phase=job.phase.value if job.phase else None,
        reason=job.reason.value if job.reason else None,
        stopped=job.stopped,
        error=(job.error or {}).get("message"),
        step=course.step or None,
        total_steps=course.total_steps or None,
        valid_loss=course.best_loss,
        best_step=course.best_step,
        fine_tuned_model=str(job.tuned_name) if job.state is State.SUCCEEDED else None,
    )


def _best(job: Job) -> BestView:
    shown = _job(job)
    assert shown.valid_loss is not None, "the best job has a loss"
    assert shown.best_step is not None, "a loss is of a step"
    return BestView(
        job_id=job.id,
        valid_loss=shown.valid_loss,
        step=shown.best_step,
        values=shown.values,
        fine_tuned_model=shown.fine_tuned_model,
    )


def _status(job: Job) -> str:
    """As a job's own view says it."""
    return State.QUEUED.value if job.phase is Phase.WAITING else job.state.value


def _status_of(sweep: Sweep, jobs: Sequence[Job]) -> Literal["running", "succeeded", "failed", "cancelled"]:
    if any(job.state not in TERMINAL for job in jobs) or (sweep.finished_at is None and sweep.cancelled_at is None):
        return "running"
    if sweep.cancelled_at is not None:
        return "cancelled"
    return "succeeded" if any(job.state is State.SUCCEEDED for job in jobs) else "failed"
