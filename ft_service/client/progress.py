"""Progress of a job, as numbers and as one line of text, for bars and plain log lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ft_service.jobs.time_left import Pace, pace_after, seconds_left
from ft_service.rundir.events import Metrics


@dataclass(frozen=True)
class JobProgress:
    """Numbers known after some metrics. None: not known yet."""

    step: int = 0
    total_steps: int = 0
    """0: not known yet."""
    train_loss: float | None = None
    valid_loss: float | None = None
    """Loss of the last validation."""
    valid_step: int = 0
    """Step of the last validation."""
    reward_accuracy: float | None = None
    """Of preference optimisation: the share of a step's pairs whose preferred answer has the higher
    reward.
    """
    mean_reward: float | None = None
    """Of reinforcement learning."""
    pace: Pace = ()

    def after(self, metrics: Metrics) -> JobProgress:
        """Return the progress after another step's metrics; an earlier step, of a job that was
        resumed, moves it back.
        """
        progress = replace(self, step=metrics.step, total_steps=metrics.total_steps)
        if metrics.train_loss is not None:
            progress = replace(progress, train_loss=metrics.train_loss)
        if metrics.valid_loss is not None:
            progress = replace(progress, valid_loss=metrics.valid_loss, valid_step=metrics.step)
        if (accuracy := (metrics.more or {}).get("rewards/accuracies")) is not None:
            progress = replace(progress, reward_accuracy=accuracy)
        if (reward := (metrics.more or {}).get("train_mean_reward")) is not None:
            progress = replace(progress, mean_reward=reward)
        if metrics.step != self.step:  # a checkpoint repeats its step's numbers
            progress = replace(progress, pace=pace_after(self.pace, metrics))
        return progress

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end."""
        return seconds_left(self.pace, self.step, self.total_steps)

    @property
    def tokens_per_second(self) -> float | None:
        seconds, tokens = (
            (sum(column) for column in zip(*self.pace, strict=True)) if self.pace else (0.0, 0)
        )
        return tokens / seconds if seconds > 0 and tokens else None

    @property
    def share(self) -> float:
        """Share of completed steps, 0 to 1."""
        return self.step / self.total_steps if self.total_steps else 0.0


def progress_line(progress: JobProgress) -> str:
    """Return `step 45/150 · loss 1.234 · valid 1.301 at 40 · 5,120 tokens/s · 1:05 left`, as far as
    it is known.
    """
    step = f"step {progress.step}/{progress.total_steps}" if progress.total_steps else ""
    return " · ".join(part for part in (step, numbers(progress)) if part)


def numbers(progress: JobProgress) -> str:
    """Return the progress line without the step, for a bar that shows it."""
    parts: list[str] = []
    if progress.mean_reward is not None:
        parts.append(f"mean reward {progress.mean_reward:.3f}")
    if progress.train_loss is not None:
        parts.append(f"loss {progress.train_loss:.3f}")
    if progress.reward_accuracy is not None:
        parts.append(f"reward accuracy {progress.reward_accuracy:.2f}")
    if progress.valid_loss is not None:
        at = f" at {progress.valid_step}" if progress.valid_step != progress.step else ""
        parts.append(f"valid {progress.valid_loss:.3f}{at}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None and progress.step < progress.total_steps:
        parts.append(f"{clock(progress.seconds_left)} left")
    return " · ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as `0:05`, `12:05`, `3:12:05`, `2d 03:12`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


_BARS = "▁▂▃▄▅▆▇█"


class Curve:
    """Values of a metric over the steps, which can be drawn as a line of text."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}

    def add(self, step: int, value: float | None) -> None:
        """Add a value. An earlier step than the newest, of a job that was resumed, removes the
        values after it.
        """
        if value is None or not math.isfinite(value):
            return
        if self._values and step < next(reversed(self._values)):
            self._values = {known: old for known, old in self._values.items() if known < step}
        self._values[step] = value

    @property
    def any(self) -> bool:
        """Whether it has a value."""
        return bool(self._values)

    @staticmethod
    def scale_of(curves: Sequence[Curve]) -> tuple[float, float] | None:
        """Return the lowest and the highest value of several curves, to draw them on one scale;
        None: there are no values.
        """
        values = [value for curve in curves for value in curve._values.values()]
        return (min(values), max(values)) if values else None

    def sparkline(self, width: int, scale: tuple[float, float] | None = None) -> str:
        """Return `▇▅▃▁ 2.310 → 0.520` with at most `width` bars, each the mean of its share of the
        values; empty for fewer than two. `scale`: values of the lowest and the highest bar; None:
        the curve's own.
        """
        values = list(self._values.values())
        if len(values) < 2:
            return ""
        count = min(width, len(values))
        edges = [len(values) * i // count for i in range(count + 1)]
        means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
        low, high = scale or (min(means), max(means))
        span = high - low
        heights = [round((mean - low) / span * (len(_BARS) - 1)) if span else 0 for mean in means]
        return f"{''.join(_BARS[height] for height in heights)} {values[0]:.3f} → {values[-1]:.3f}"
