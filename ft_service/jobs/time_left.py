"""The time left of a training job, for the page, `ft watch` and the API alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ft_service.rundir.events import Metrics

WINDOW = 20
"""Number of steps whose mean gives the time left and the tokens per second: enough to be steady,
few enough to be current.
"""
Pace = tuple[tuple[float, int], ...]
"""(seconds, tokens) of the last WINDOW steps, the oldest first."""


def pace_after(pace: Pace, metrics: Metrics) -> Pace:
    """The pace after one more step; metrics without a step time change nothing."""
    if metrics.step_seconds is None:
        return pace
    return (*pace, (metrics.step_seconds, metrics.tokens or 0))[-WINDOW:]


def pace_of(reported: Iterable[Metrics]) -> Pace:
    """The pace of a job from its reported metrics, the oldest first.

    A checkpoint repeats its step's metrics, which count once.
    """
    pace: Pace = ()
    step = 0
    for metrics in reported:
        if metrics.step != step:
            pace = pace_after(pace, metrics)
            step = metrics.step
    return pace


def seconds_left(pace: Pace, step: int, total_steps: int, *, since: float = 0.0) -> float | None:
    """Seconds to the end of the last step, without validations and checkpoints; None: unknown.

    `since`: seconds since `step` was reported, of which at most one step's time is subtracted: a
    stalled job does not come nearer its end.
    """
    if not pace or not total_steps:
        return None
    mean = sum(seconds for seconds, _ in pace) / len(pace)
    return max(0.0, (total_steps - step) * mean - min(max(0.0, since), mean))
