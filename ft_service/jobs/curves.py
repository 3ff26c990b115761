"""A job's metrics by step over all its attempts, thinned out for charts. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ft_service.rundir.documents import GpuLoad

Name = Literal[
    "train_loss",
    "valid_loss",
    "train_mean_token_accuracy",
    "valid_mean_token_accuracy",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "train_mean_reward",
    "valid_mean_reward",
    "completions/mean_length",
    "sampler/logprob_gap",
    "kl/forward",
    "kl/reverse",
    "teacher/gap",
    "teacher/agreement",
    "teacher/kept",
    "rewards/margins",
    "valid_rewards/margins",
    "rewards/accuracies",
    "valid_rewards/accuracies",
    "kl",
    "before/valid_loss",
]
"""Series that a job may have; the units are those of `Metrics`."""
NAMES: tuple[Name, ...] = get_args(Name)
GpuName = Literal["gpu/memory", "gpu/busy", "gpu/watts"]
"""Series of the GPUs of a job's first node: bytes, shares in [0, 1], watts."""
GPU_NAMES: tuple[GpuName, ...] = get_args(GpuName)
Kind = Literal["attempt", "pause", "resume", "cancel", "checkpoint"]


@dataclass(frozen=True)
class Mark:
    """An event to mark in a chart. `step`: the newest step at that time."""

    kind: Kind
    step: int
    time: float
    label: str
    """The attempt's number, or the checkpoint's id."""


@dataclass(frozen=True)
class Series:
    """One metric by step: three lists of equal length. `times`: seconds since the epoch."""

    steps: list[int]
    times: list[float]
    values: list[float]


class Curves:
    """A job's metrics, one row per step in order; a repeated step has the values of the newest
    attempt.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")
        self._values = {name: array("d") for name in NAMES}  # NaN: not measured at this step
        self._attempt = 0
        self.marks: list[Mark] = []
        self.total_steps = 0

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def add(self, attempt: int, time: float, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that an attempt reported for a step.

        Attempts, and steps of one attempt, come in order.
        """
        step = int(metrics["step"])
        if step <= self.step:
            place = bisect_left(self._steps, step)
            for column in (self._steps, self._times, *self._values.values()):
                del column[place:]
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

    def steps_at(self, times: Sequence[float]) -> list[int]:
        """The newest step at each time; 0 before the first. `times`: seconds since the epoch."""
        places = [bisect_right(self._times, time) for time in times]
        return [self._steps[place - 1] if place else 0 for place in places]

    def series(self, name: str, points: int) -> Series:
        """One series of at most `points` (at least 4) points: the first, the last, and the lowest
        and highest of each of equal stretches between them, so that no spike is lost.
        """
        values = self._values[name]
        kept = kept_places(values, points)
        return Series(
            [self._steps[place] for place in kept],
            [round(self._times[place], 2) for place in kept],
            [values[place] for place in kept],
        )


def gpu_series(curves: Curves, loads: Sequence[GpuLoad], points: int) -> dict[str, Series]:
    """What a job's GPUs did, oldest first, as series; a moment is at the newest step before it."""
    if not loads:
        return {}
    times = [load.time for load in loads]
    steps = curves.steps_at(times)
    columns = {
        "gpu/memory": [float(load.memory) for load in loads],
        "gpu/busy": [load.busy for load in loads],
        "gpu/watts": [load.watts for load in loads],
    }
    found = {}
    for name, values in columns.items():
        kept = kept_places(array("d", values), points)
        found[name] = Series(
            [steps[place] for place in kept],
            [round(times[place], 2) for place in kept],
            [values[place] for place in kept],
        )
    return found


def kept_places(values: array[float], most: int) -> Sequence[int]:
    """Indices of at most `most` values that are not NaN: the first, the last, and the extremes of
    equal stretches.
    """
    places: Sequence[int] = range(len(values))
    if math.isnan(
        sum(values)
    ):  # one sum is cheaper than a test of each value, and most series have no gap
        places = [place for place, value in enumerate(values) if not math.isnan(value)]
        values = array("d", [values[place] for place in places])
    if len(places) <= most:
        return places
    inner = len(places) - 2
    stretches = (most - 2) // 2
    kept = [0]
    for number in range(stretches):
        begin = 1 + number * inner // stretches
        end = 1 + (number + 1) * inner // stretches
        part = values[begin:end]
        kept += sorted({begin + part.index(min(part)), begin + part.index(max(part))})
    return [places[place] for place in (*kept, len(places) - 1)]


def _number(metrics: Mapping[str, Any], name: str) -> float:
    if name == "tokens_per_second":
        tokens = metrics.get("tokens")
        seconds = metrics.get("step_seconds")
        return tokens / seconds if tokens and seconds else math.nan
    value = metrics.get(name, (metrics.get("more") or {}).get(name))
    return math.nan if value is None else float(value)
