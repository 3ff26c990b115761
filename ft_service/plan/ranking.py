"""Which of the known GPUs trains a job for the least money, or soonest. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ft_service.plan.job import Plan


@dataclass(frozen=True)
class Choice:
    """A job on one kind of hardware."""

    hardware: str
    plan: Plan | None
    """None: the job cannot be planned there."""
    time: dict[str, Any] | None = None
    """From `training_time`."""
    cost: dict[str, Any] | None = None
    """From `training_cost`; None: the hardware has no price."""
    why_not: str | None = None
    """Why it cannot be planned there."""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits is True

    @property
    def seconds(self) -> float | None:
        """Likely duration, or the longest; None: not known."""
        return _usual(self.time, "seconds_likely", "seconds_at_most")

    @property
    def price(self) -> float | None:
        """Likely cost, or the highest; None: not known."""
        return _usual(self.cost, "likely", "at_most")

    def as_dict(self) -> dict[str, Any]:
        """The choice as JSON."""
        return {
            "hardware": self.hardware,
            "fits": None if self.plan is None else self.plan.fits,
            "bytes_per_rank": self.plan and self.plan.rank.total,
            "time": self.time,
            "cost": self.cost,
            "why_not": self.why_not,
        }


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Return the best first: what fits before what does not, then by money where there is a price,
    and what has none behind it by time.
    """
    return sorted(choices, key=_order)


def _order(choice: Choice) -> tuple[bool, bool, float, bool, float]:
    price, seconds = choice.price, choice.seconds
    return not choice.fits, price is None, price or 0.0, seconds is None, seconds or 0.0


def _usual(values: dict[str, Any] | None, likely: str, at_most: str) -> float | None:
    if values is None:
        return None
    return values[at_most] if values[likely] is None else values[likely]
