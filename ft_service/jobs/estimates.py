"""How long a job is expected to hold its slots: by what it was planned to take, and by what others really took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

ENOUGH = 20
"""Jobs after which one more says little that is new."""
PACES_SECONDS, FEW_PACES_SECONDS = 30.0, 2.0
"""How long paces are good for: of so many jobs, and of fewer."""


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
    """A job that has succeeded, or one that trains and tells how fast it is."""

    effort: Effort
    held_seconds: float
    """For which it held slots, over all attempts, or will have."""
    slot_seconds: float


@dataclass(frozen=True)
class _Pace:
    longer: float | None
    """Times its plan that a job takes."""
    slot_seconds_per_flop: float | None


class Paces:
    """What jobs took, by base."""

    def __init__(self, measured: Sequence[Measured] = ()) -> None:
        bases = {one.effort.base for one in measured}
        self._of_base = {base: _pace(one for one in measured if one.effort.base == base) for base in bases}
        self._of_all = _pace(measured)
        self.good_seconds = PACES_SECONDS if len(measured) >= ENOUGH else FEW_PACES_SECONDS
        """After so long they should be measured again."""

    def expected_seconds(self, effort: Effort) -> float | None:
        """Seconds that a job will hold its slots from its next start on; None: not known.

        What the job itself measured comes first. Otherwise its plan, times how much longer than planned others took:
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
