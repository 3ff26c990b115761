"""Sweeps on the wire. OpenAI's API has none; the fields follow those of its jobs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from api.wire.job_views import status_text
from api.wire.views import Deleted, EnergyView, MoneyView, Seconds, View, money_view
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.store.records import Sweep
from ft_service.sweeps.halving import SweepJobProgress


class SweepJobView(View):
    """A job of a sweep."""

    id: str
    values: dict[str, Any]
    """The options that this job has of its own: dotted name → value."""
    status: str
    phase: str | None
    reason: str | None
    stopped: str | None
    """Why the sweep stopped it; null: the sweep did not."""
    error: str | None
    """Why it failed."""
    step: int | None
    total_steps: int | None
    valid_loss: float | None
    """Its lowest validation loss, by which jobs are compared; null: not validated yet."""
    best_step: int | None
    """The step with the lowest validation loss."""
    fine_tuned_model: str | None
    cost: MoneyView | None
    """As that of the job."""


class BestView(View):
    """The job with the lowest validation loss; of equal ones, the earliest."""

    job_id: str
    valid_loss: float
    step: int
    values: dict[str, Any]
    fine_tuned_model: str | None
    """Set once it has succeeded."""


class SweepView(View):
    id: str
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    created_at: Seconds
    finished_at: Seconds | None
    status: Literal["running", "succeeded", "failed", "cancelled"]
    """running: a job is not over; succeeded: at least one job has succeeded; failed: no job has."""
    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    metadata: dict[str, str] | None
    sweep: dict[str, Any]
    """The search space as the create body gave it."""
    method: Literal["grid", "random"]
    options: list[str]
    """Dotted names of the options that are tried."""
    seed: int | None
    """Seed of the drawn values."""
    eta: int | None
    """One of `eta` jobs that reach a rung is kept; null: no job is stopped."""
    rungs: list[float]
    """Shares of a job's steps at which jobs are compared."""
    counts: dict[str, int]
    """Status → number of jobs."""
    best: BestView | None
    """The best job so far; once the sweep is over, the best of the jobs that have succeeded."""
    cost: MoneyView | None
    """What its jobs have cost together; null: their slots have no price."""
    energy: EnergyView | None
    """What was measured of its jobs; null: nothing."""
    jobs: list[SweepJobView]
    """Best first; jobs without a loss come last, in the order of their creation."""


class DeletedSweepView(Deleted):
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"


def sweep_view(
    sweep: Sweep, jobs: Sequence[Job], best: Job | None, costs: Mapping[str, int]
) -> SweepView:
    """Return the view of a sweep.

    `jobs`: its jobs in the order of their creation; `best`: the best of them so far; `costs`: what
    each has cost until now (ft_service/control/jobs/costs.py).
    """
    request = sweep.request
    settings = sweep.settings
    optional = ("validation_file", "suffix", "metadata")
    return SweepView(
        **{name: getattr(sweep, name) for name in ("id", "created_at", "finished_at")},
        status=_sweep_status(sweep, jobs),
        **{name: request[name] for name in ("model", "training_file", "sweep")},
        **{name: request.get(name) for name in optional},
        **{name: settings[name] for name in ("method", "options", "eta", "rungs")},
        seed=settings.get("seed"),
        counts=dict(Counter(status_text(job) for job in jobs)),
        best=_best_view(best) if best else None,
        cost=_whole_cost(jobs, costs),
        energy=_whole_energy(jobs),
        jobs=sorted(
            (_job_view(job, costs[job.id]) for job in jobs),
            key=lambda view: (view.valid_loss is None, view.valid_loss or 0.0),
        ),
    )


def _whole_cost(jobs: Sequence[Job], costs: Mapping[str, int]) -> MoneyView | None:
    priced = [job for job in jobs if job.currency is not None]
    return money_view(sum(costs[job.id] for job in priced), priced[0].currency) if priced else None


def _whole_energy(jobs: Sequence[Job]) -> EnergyView | None:
    joules = [job.joules for job in jobs if job.joules is not None]
    grams = [job.co2_grams for job in jobs if job.co2_grams is not None]
    return (
        EnergyView(joules=sum(joules), co2_grams=sum(grams) if grams else None) if joules else None
    )


def _job_view(job: Job, cost: int) -> SweepJobView:
    course = SweepJobProgress.read(job.sweep_course)
    return SweepJobView(
        id=job.id,
        values=job.sweep_values or {},
        status=status_text(job),
        phase=job.phase.value if job.phase else None,
        reason=job.reason.value if job.reason else None,
        stopped=job.stopped,
        error=(job.error or {}).get("message"),
        step=course.step or None,
        total_steps=course.total_steps or None,
        valid_loss=course.best_loss,
        best_step=course.best_step,
        fine_tuned_model=str(job.tuned_name) if job.state is State.SUCCEEDED else None,
        cost=money_view(cost, job.currency),
    )


def _best_view(job: Job) -> BestView:
    view = _job_view(job, job.cost)
    return BestView.of(view, job_id=job.id, step=view.best_step)


def _sweep_status(
    sweep: Sweep, jobs: Sequence[Job]
) -> Literal["running", "succeeded", "failed", "cancelled"]:
    if any(job.state not in TERMINAL for job in jobs) or (
        sweep.finished_at is None and sweep.cancelled_at is None
    ):
        return "running"
    if sweep.cancelled_at is not None:
        return "cancelled"
    return "succeeded" if any(job.state is State.SUCCEEDED for job in jobs) else "failed"
