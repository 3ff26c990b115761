"""Expected duration of a job, from its plan and from how long other jobs really took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ENOUGH = 20
"""Number of measured jobs from which one more changes little."""
PACES_SECONDS = 30.0
FEW_PACES_SECONDS = 2.0
"""How long paces stay valid: those of so many jobs, and those of fewer."""


@dataclass(frozen=True)
class Effort:
    """The facts about a job from which its duration is estimated."""

    base: str
    slots: int
    work: float | None
    """Planned FLOP of the whole training; None: unknown."""
    planned_seconds: float | None
    """Planned duration; None: the machine's figures are unknown."""
    left_seconds: float | None = None
    """Time left when it last reported a step; None: it never did."""


@dataclass(frozen=True)
class MeasuredJob:
    """A job that has succeeded, or one that trains and has reported its speed."""

    effort: Effort
    held_seconds: float
    """Time that all its attempts held slots, or will have held them at its end."""
    slot_seconds: float


@dataclass(frozen=True)
class _Pace:
    longer: float | None
    """Real duration divided by the planned one."""
    slot_seconds_per_flop: float | None


class Paces:
    """How long jobs took, by base."""

    def __init__(self, measured: Sequence[MeasuredJob] = ()) -> None:
        bases = {job.effort.base for job in measured}
        self._of_base = {
            base: _pace([job for job in measured if job.effort.base == base]) for base in bases
        }
        self._of_all = _pace(measured)
        self.good_seconds = PACES_SECONDS if len(measured) >= ENOUGH else FEW_PACES_SECONDS
        """Seconds after which the jobs should be read again."""

    def expected_seconds(self, effort: Effort) -> float | None:
        """Expected duration of a job from its next start on; None: unknown.

        The job's own measurement comes first. Otherwise its plan, times the ratio by which other
        jobs exceeded theirs: those on the same base if there are any, else all. If the machine's
        figures are unknown, the time that others needed for as much work.
        """
        if effort.left_seconds is not None:
            return effort.left_seconds
        pace = self._of_base.get(effort.base, self._of_all)
        if effort.planned_seconds:
            return effort.planned_seconds * (pace.longer or 1.0)
        if effort.work and pace.slot_seconds_per_flop:
            return effort.work * pace.slot_seconds_per_flop / effort.slots
        return None


def _pace(measured: Sequence[MeasuredJob]) -> _Pace:
    longer = [
        job.held_seconds / job.effort.planned_seconds
        for job in measured
        if job.effort.planned_seconds
    ]
    flops = [job.slot_seconds / job.effort.work for job in measured if job.effort.work]
    return _Pace(median(longer) if longer else None, median(flops) if flops else None)
