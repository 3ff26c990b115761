"""How long a job is expected to hold its slots: by what it was planned to take, and by what finished jobs really took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Effort:
    """What a job is, for an estimate."""

    base: str
    slots: int
    work: float | None
    """FLOP of the whole training, as planned; None: not known (jobs of earlier versions)."""
    planned_seconds: float | None
    """What the plan says it takes; None: the machine's figures are not known."""
    left_seconds: float | None = None
    """What was left of it when it last reported a step; None: it never did."""


@dataclass(frozen=True)
class Measured:
    """A job that has succeeded."""

    effort: Effort
    held_seconds: float
    """For which it held slots, over all attempts."""
    slot_seconds: float


@dataclass(frozen=True)
class _Pace:
    longer: float | None
    """Times its plan that a job takes."""
    slot_seconds_per_flop: float | None


class Paces:
    """What finished jobs took, by base."""

    def __init__(self, measured: Sequence[Measured] = ()) -> None:
        bases = {one.effort.base for one in measured}
        self._of_base = {base: _pace(one for one in measured if one.effort.base == base) for base in bases}
        self._of_all = _pace(measured)

    def expected_seconds(self, effort: Effort) -> float | None:
        """Seconds that a job will hold its slots from its next start on; None: not known.

        What the job itself measured comes first. Otherwise its plan, times how much longer than planned finished jobs took:
        those on the same base if there are any, else all. Where the machine's figures are not known, the time that the same
        amount of work took them.
        """
        if effort.left_seconds is not None:
            return effort.left_seconds
        pace = self._of_base.get(effort.base, self._of_all)
        if effort.planned_seconds:
            return effort.planned_seconds * (pace.longer or 1.0)
        if effort.work and pace.slot_seconds_per_flop:
            return effort.work * pace.slot_seconds_per_flop / effort.slots
        return None


def _pace(measured: Iterable[Measured]) -> _Pace:
    some = list(measured)
    longer = [one.held_seconds / one.effort.planned_seconds for one in some if one.effort.planned_seconds]
    flops = [one.slot_seconds / one.effort.work for one in some if one.effort.work]
    return _Pace(median(longer) if longer else None, median(flops) if flops else None)
