"""Results of a sweep's jobs, and successive halving: early stopping of jobs that cannot become the
best one. Pure.

Rungs are shares of a job's own steps: `min_share`, then each `eta` times the one before, below 1
(by default 1/4 and 1/2). A job is validated at each rung. Of n jobs that can still become the best,
the first rung keeps the best n / eta (rounded up), the next rung 1 / eta of those, and so on, at
least one. A job is judged at the last rung that it has reached. It is stopped once as many jobs as
that rung keeps had a lower loss there: no later result at that rung can change this.

The number of jobs is known from the beginning, so a rung does not wait for all of them. A rung's
decision depends on the losses there alone, not on the order in which jobs run, how many run at
once, or when they are compared. Jobs that run one after the other are not paused at rungs: the
first ones train to their end, and later ones are compared with them. A job that has reached the
next rung is no longer judged at an earlier one.

At equal losses the job that was created first is better. NaN is worse than any number. Jobs that
failed or were cancelled cannot become the best, and are not counted. A stopped job stays stopped. A
job that was not validated at a rung is not judged there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ft_service.rundir.events import Metrics


class Standing(StrEnum):
    """The state of a job in its sweep."""

    OPEN = "open"
    """Not ended yet."""
    DONE = "done"
    """Succeeded."""
    STOPPED = "stopped"
    """Stopped by its sweep."""
    OUT = "out"
    """Failed or cancelled."""


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep. Sequences of them are in the order of creation."""

    job_id: str
    standing: Standing
    rungs: Mapping[int, float]
    """Rung → validation loss there."""
    best_loss: float | None = None


@dataclass(frozen=True)
class EarlyStop:
    """A job to stop, and why."""

    job_id: str
    rung: int
    loss: float
    better: int
    """Jobs that had a lower loss at the rung."""
    kept: int
    """Jobs that the rung keeps."""
    jobs: int
    """Jobs of the sweep that were neither cancelled nor failed."""

    def text(self, shares: Sequence[float]) -> str:
        """The message for the job's user. `shares`: the rungs."""
        loss = f"{self.loss:.4f}" if math.isfinite(self.loss) else "no number"
        after = f"after {100 * shares[self.rung]:.3g} % of its steps its validation loss was {loss}"
        better = (
            f"{self.better} of {self.jobs} jobs {'was' if self.better == 1 else 'were'} "
            "better there"
        )
        return (
            f"stopped by the sweep: {after}, and {better}; {self.kept} "
            f"{'goes' if self.kept == 1 else 'go'} on"
        )


def shares_of(eta: int, min_share: float) -> tuple[float, ...]:
    """The rungs: shares of a job's steps, ascending, below 1."""
    shares = [min_share]
    while shares[-1] * eta < 1:
        shares.append(shares[-1] * eta)
    return tuple(shares)


def jobs_to_stop(jobs: Sequence[SweepJob], eta: int, rungs: int) -> list[EarlyStop]:
    """The jobs to stop now. `rungs`: the number of rungs."""
    counted = [job for job in jobs if job.standing is not Standing.OUT]
    kept = [len(counted)]
    for _ in range(rungs):
        kept.append(max(1, -(-kept[-1] // eta)))
    stops: list[EarlyStop] = []
    for number, job in enumerate(counted):
        if job.standing is not Standing.OPEN or not job.rungs:
            continue
        rung = max(job.rungs)
        own = _order(job.rungs[rung], number)
        losses = [
            _order(other.rungs[rung], place)
            for place, other in enumerate(counted)
            if rung in other.rungs
        ]
        better = sum(loss < own and math.isfinite(loss[0]) for loss in losses)
        if better >= kept[rung + 1]:
            stops.append(
                EarlyStop(job.job_id, rung, job.rungs[rung], better, kept[rung + 1], len(counted))
            )
    return stops


def best_of(jobs: Sequence[SweepJob]) -> SweepJob | None:
    """The job with the lowest validation loss among those that succeeded; while a job is open,
    among the open ones too. The earlier one at equal losses. None: no such job has a loss.
    """
    is_open = any(job.standing is Standing.OPEN for job in jobs)
    candidates = {Standing.OPEN, Standing.DONE} if is_open else {Standing.DONE}
    measured = [job for job in jobs if job.standing in candidates and job.best_loss is not None]
    return min(measured, key=lambda job: job.best_loss or 0.0, default=None)


def _order(loss: float, place: int) -> tuple[float, int]:
    return (loss if math.isfinite(loss) else math.inf, place)


@dataclass(frozen=True)
class SweepJobProgress:
    """A job's steps and validation losses (nats a token), as its sweep compares them.

    NaN is a measured loss, and the worst.
    """

    step: int = 0
    total_steps: int = 0
    valid_loss: float | None = None
    """Loss of the last validation; None: the job was not validated, or the loss was NaN."""
    best_loss: float | None = None
    """The lowest loss so far."""
    best_step: int | None = None
    rungs: Mapping[int, float] = field(default_factory=dict)
    """Number of a rung, from 0 → loss there.

    Rungs at which the job was not validated before the next one are missing.
    """

    @classmethod
    def read(cls, document: Mapping[str, Any] | None) -> SweepJobProgress:
        """The progress in a `document`; None: nothing was reported yet."""
        if document is None:
            return cls()
        rungs = {int(rung): _loss(value) for rung, value in document["rungs"].items()}
        return cls(**{**document, "rungs": rungs})

    def document(self) -> dict[str, Any]:
        """The progress as JSON, with null for NaN."""
        rungs = {
            str(rung): loss if math.isfinite(loss) else None for rung, loss in self.rungs.items()
        }
        return {**asdict(self), "rungs": rungs}

    def after(self, metrics: Metrics, rung_steps: Sequence[int]) -> SweepJobProgress:
        """The progress after a step was reported.

        `rung_steps`: steps of the job's rungs, ascending.
        """
        progress = replace(self, step=metrics.step, total_steps=metrics.total_steps)
        loss = metrics.valid_loss
        if loss is None:
            return progress
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            progress = replace(progress, best_loss=loss, best_step=metrics.step)
        progress = replace(progress, valid_loss=loss if math.isfinite(loss) else None)
        reached = [rung for rung, step in enumerate(rung_steps) if metrics.step >= step]
        if not reached or metrics.step >= metrics.total_steps or reached[-1] in self.rungs:
            return progress
        return replace(progress, rungs={**self.rungs, reached[-1]: loss})


def _loss(value: float | None) -> float:
    return math.nan if value is None else value
