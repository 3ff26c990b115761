"""What a job reported by step, over all its attempts, and less of it for a picture. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NAMES = (
    "train_loss",
    "valid_loss",
    "train_mean_token_accuracy",
    "valid_mean_token_accuracy",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
)
"""Series that a job may have; the units are those of `Metrics`."""
Kind = Literal["attempt", "pause", "resume", "cancel", "checkpoint"]


@dataclass(frozen=True)
class Mark:
    """Something that happened on the way. `step`: the newest one by then."""

    kind: Kind
    step: int
    time: float
    label: str
    """The attempt's number, or the checkpoint's id."""


@dataclass(frozen=True)
class Series:
    """One number by step: three lists of one length. `times`: seconds since the epoch."""

    steps: list[int]
    times: list[float]
    values: list[float]


class Curves:
    """A job's numbers, one row a step, in order; a step that was trained again is its newest attempt's."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")
        self._values = {name: array("d") for name in NAMES}  # NaN: not measured at this step
        self._attempt = 0
        self.marks: list[Mark] = []
        self.total_steps = 0

    @property
    def step(self) -> int:
        """The newest step; 0: none yet."""
        return self._steps[-1] if self._steps else 0

    def add(self, attempt: int, time: float, metrics: Mapping[str, Any]) -> None:
        """Add what an attempt reported of a step. Attempts, and steps of one attempt, come in order."""
        step = int(metrics["step"])
        self._forget_from(step)
        if attempt != self._attempt:
            self._attempt = attempt
            self.note("attempt", time, str(attempt))
        self._steps.append(step)
        self._times.append(time)
        for name, values in self._values.items():
            values.append(_number(metrics, name))
        self.total_steps = int(metrics.get("total_steps") or step)

    def note(self, kind: Kind, time: float, label: str = "") -> None:
        """Add a mark at the newest step."""
        self.marks.append(Mark(kind, self.step, time, label))

    def series(self, name: str, points: int) -> Series:
        """One series, of at most `points` (from 4 on) points: the first, the last, and of what lies between the lowest and the
        highest of each of so many stretches, so that no spike is lost."""
        values = self._values[name]
        kept = kept_places(values, points)
        return Series(
            [self._steps[place] for place in kept],
            [round(self._times[place], 2) for place in kept],
            [values[place] for place in kept],
        )

    def _forget_from(self, step: int) -> None:
        if step <= self.step:
            place = bisect_left(self._steps, step)
            for column in (self._steps, self._times, *self._values.values()):
                del column[place:]


def kept_places(values: array[float], most: int) -> Sequence[int]:
    """Places of at most `most` of the values that are numbers: the first, the last, and the extremes of equal stretches."""
    places: Sequence[int] = range(len(values))
    if math.isnan(sum(values)):  # one look at all together, since most series have no gap
        places = [place for place, value in enumerate(values) if not math.isnan(value)]
        values = array("d", [values[place] for place in places])
    if len(places) <= most:
        return places
    inner, stretches = len(places) - 2, (most - 2) // 2
    kept = [0]
    for number in range(stretches):
        begin, end = 1 + number * inner // stretches, 1 + (number + 1) * inner // stretches
        part = values[begin:end]
        kept += sorted({begin + part.index(min(part)), begin + part.index(max(part))})
    return [places[place] for place in (*kept, len(places) - 1)]


def _number(metrics: Mapping[str, Any], name: str) -> float:
    if name == "tokens_per_second":
        tokens, seconds = metrics.get("tokens"), metrics.get("step_seconds")
        return tokens / seconds if tokens and seconds else math.nan
    value = metrics.get(name)
    return math.nan if value is None else float(value)
