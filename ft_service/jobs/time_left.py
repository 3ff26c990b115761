"""The time that a training job still takes, as the page, `ft watch` and the API all say it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ft_service.rundir.events import Metrics

WINDOW = 20
"""Steps whose mean pace gives the time left and the tokens per second: long enough to be calm, short enough to be current."""
Pace = tuple[tuple[float, int], ...]
"""(seconds, tokens) of the last WINDOW steps, the oldest first."""


def pace_after(pace: Pace, metrics: Metrics) -> Pace:
    """The pace after one more step's numbers; without its time it stays."""
    if metrics.step_seconds is None:
        return pace
    return (*pace, (metrics.step_seconds, metrics.tokens or 0))[-WINDOW:]


def pace_of(reported: Iterable[Metrics]) -> Pace:
    """The pace of a job by what it reported, the oldest first. A checkpoint repeats its step's numbers, which count once."""
    pace: Pace = ()
    step = 0
    for metrics in reported:
        if metrics.step != step:
            pace, step = pace_after(pace, metrics), metrics.step
    return pace


def seconds_left(pace: Pace, step: int, total_steps: int, *, since: float = 0.0) -> float | None:
    """Seconds to the end of the last step, validations and checkpoints not counted; None: not known. `since`: seconds since
    `step` was reported, of which no more than one step's are taken off: a job that stands still does not come nearer its end.
    """
    if not pace or not total_steps:
        return None
    mean = sum(seconds for seconds, _ in pace) / len(pace)
    return max(0.0, (total_steps - step) * mean - min(max(0.0, since), mean))
