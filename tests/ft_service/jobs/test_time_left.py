"""One time left for everybody: smoothed, and no nearer while nothing is done."""

from __future__ import annotations

import pytest

from ft_service.client.progress import JobProgress
from ft_service.jobs.time_left import WINDOW, pace_of, seconds_left
from ft_service.rundir.events import Metrics


def step(number: int, seconds: float | None) -> Metrics:
    return Metrics(step=number, total_steps=400, step_seconds=seconds, tokens=100)


NOISY = [step(number, 2.0 + 6.0 * (number % 3 == 0)) for number in range(1, 61)]


def test_a_step_that_takes_long_moves_it_little() -> None:
    told = [seconds_left(pace_of(NOISY[:end]), end, 400) for end in range(40, 61)]
    steady = [
        seconds / (400 - end)
        for end, seconds in zip(range(40, 61), told, strict=True)
        if seconds is not None
    ]
    assert len(steady) == 21
    assert max(steady) - min(steady) < 0.1 * min(steady)


def test_a_watch_says_the_same() -> None:
    progress = JobProgress()
    for metrics in NOISY:
        progress = progress.after(metrics)
    assert progress.seconds_left == seconds_left(pace_of(NOISY[-2 * WINDOW :]), 60, 400)


def test_a_checkpoint_repeats_its_step_and_a_validation_has_no_time() -> None:
    assert pace_of([step(1, 2.0), step(1, 2.0), step(2, None), step(3, 4.0)]) == (
        (2.0, 100),
        (4.0, 100),
    )


@pytest.mark.parametrize(
    ("since", "left"), [(0.0, 20.0), (1.5, 18.5), (600.0, 18.0), (-7200.0, 20.0)]
)
def test_a_job_that_stands_still_comes_no_nearer(since: float, left: float) -> None:
    assert seconds_left(((2.0, 100),) * 5, 10, 20, since=since) == left


def test_nothing_is_guessed() -> None:
    assert seconds_left((), 3, 20) is None
    assert seconds_left(((2.0, 1),), 3, 0) is None
    assert seconds_left(((2.0, 1),), 20, 20) == 0.0


def test_a_step_that_says_no_tokens_had_none() -> None:
    assert pace_of([Metrics(step=1, total_steps=4, step_seconds=2.0)]) == ((2.0, 0),)
