"""Successive halving: which jobs of a sweep are stopped since they have no hope, and which is the best. Pure.

Rungs are shares of a job's own steps: `min_share`, then each `eta` times the one before, below 1 (by default 1/4 and 1/2). At
each rung a job is validated. Of n jobs that can still win, the first rung keeps the best n / eta (rounded up), the next one 1
/ eta of those, and so on, at least one. A job is judged by the last rung that it has reached, and stopped once as many jobs
as that rung keeps had a lower loss there: from then on nothing that others may still report there can save it.

How many jobs there are is known from the beginning, so that a rung need not wait for all of them, and nobody is stopped
because he was early or late: a rung's verdict depends on the losses there alone, not on the order in which jobs run, how many
run at once, or when somebody looks. Jobs that run one after the other are not paused at rungs; the first ones train to their
end, and the later ones are measured by them. A job that has gone on to the next rung by then is not called back by an earlier
one.

At equal losses the job that was created first is the better one. A loss that is no number is worse than any number. Jobs that
have failed, or that their user has cancelled, cannot win: they neither count nor displace anybody. What was stopped stays
stopped. A rung at which a job was not validated does not judge it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    OPEN = "open"
    """It trains, or will."""
    DONE = "done"
    """It has succeeded."""
    STOPPED = "stopped"
    """Its sweep has stopped it."""
    OUT = "out"
    """It has failed, or was cancelled."""


@dataclass(frozen=True)
class Runner:
    """A job of a sweep, in the order of creation."""

    job_id: str
    standing: Standing
    rungs: Mapping[int, float]
    """Rung → validation loss there."""
    best_loss: float | None = None


@dataclass(frozen=True)
class Stop:
    """A job that has no hope, and why."""

    job_id: str
    rung: int
    loss: float
    better: int
    """Jobs that had a lower loss there."""
    kept: int
    """Jobs that the rung keeps."""
    jobs: int
    """That count."""

    def text(self, shares: Sequence[float]) -> str:
        """For the job's user."""
        loss = f"{self.loss:.4f}" if math.isfinite(self.loss) else "no number"
        after = f"after {100 * shares[self.rung]:.3g} % of its steps its validation loss was {loss}"
        better = f"{self.better} of {self.jobs} jobs {'was' if self.better == 1 else 'were'} better there"
        return f"stopped by the sweep: {after}, and {better}; {self.kept} {'goes' if self.kept == 1 else 'go'} on"


def shares_of(eta: int, min_share: float) -> tuple[float, ...]:
    """The rungs: shares of a job's steps, ascending, below 1."""
    shares = [min_share]
    while shares[-1] * eta < 1:
        shares.append(shares[-1] * eta)
    return tuple(shares)


def hopeless(runners: Sequence[Runner], eta: int, rungs: int) -> list[Stop]:
    """Jobs to stop now. `rungs`: how many there are."""
    counting = [runner for runner in runners if runner.standing is not Standing.OUT]
    kept = _kept(len(counting), eta, rungs)
    stops: list[Stop] = []
    for place, runner in enumerate(counting):
        if runner.standing is not Standing.OPEN or not runner.rungs:
            continue
        rung = max(runner.rungs)
        mine = _order(runner.rungs[rung], place)
        there = [_order(other.rungs[rung], number) for number, other in enumerate(counting) if rung in other.rungs]
        better = sum(other < mine and math.isfinite(other[0]) for other in there)
        if better >= kept[rung]:
            stops.append(Stop(runner.job_id, rung, runner.rungs[rung], better, kept[rung], len(counting)))
    return stops


def _kept(jobs: int, eta: int, rungs: int) -> list[int]:
    """How many jobs each rung keeps."""
    kept: list[int] = []
    for _ in range(rungs):
        jobs = max(1, -(-jobs // eta))
        kept.append(jobs)
    return kept


def best_of(runners: Sequence[Runner]) -> Runner | None:
    """The job with the lowest validation loss, of those that have succeeded; as long as one is open, of all that count. The
    earlier one at equal losses. None: none has any."""
    is_open = any(runner.standing is Standing.OPEN for runner in runners)
    wanted = {Standing.OPEN, Standing.DONE} if is_open else {Standing.DONE}
    measured = [runner for runner in runners if runner.standing in wanted and runner.best_loss is not None]
    return min(measured, key=lambda runner: runner.best_loss or 0.0, default=None)


def _order(loss: float, place: int) -> tuple[float, int]:
    return (loss if math.isfinite(loss) else math.inf, place)
