from __future__ import annotations

import pytest

from ft_service.client.progress import Curve, JobProgress, clock, numbers, progress_line
from ft_service.jobs.time_left import WINDOW
from ft_service.rundir.events import Metrics


def progress_of(*steps: Metrics) -> JobProgress:
    progress = JobProgress()
    for metrics in steps:
        progress = progress.after(metrics)
    return progress


def step(number: int, seconds: float = 2.0, tokens: int = 100, total: int = 150) -> Metrics:
    return Metrics(
        step=number,
        total_steps=total,
        train_loss=3.0 - number / 100,
        step_seconds=seconds,
        tokens=tokens,
    )


def test_the_line_says_all_that_is_known() -> None:
    assert progress_line(JobProgress()) == ""
    first = progress_of(Metrics(step=1, total_steps=150))
    assert progress_line(first) == "step 1/150"
    later = first.after(step(50)).after(Metrics(step=50, total_steps=150, valid_loss=2.25))
    assert (
        progress_line(later) == "step 50/150 · loss 2.500 · valid 2.250 · 50 tokens/s · 3:20 left"
    )
    assert numbers(later) == "loss 2.500 · valid 2.250 · 50 tokens/s · 3:20 left"


def test_a_validation_of_an_earlier_step_is_told_with_that_step() -> None:
    later = progress_of(step(49), Metrics(step=49, total_steps=150, valid_loss=2.25), step(50))
    assert numbers(later).startswith("loss 2.500 · valid 2.250 at 49 · ")


def test_preference_optimisation_shows_the_share_of_pairs_that_it_orders() -> None:
    pairs = step(150).model_copy(update={"more": {"rewards/accuracies": 0.75}})
    assert (
        progress_line(progress_of(pairs))
        == "step 150/150 · loss 1.500 · reward accuracy 0.75 · 50 tokens/s"
    )


def test_a_finished_job_has_no_time_left() -> None:
    assert progress_line(progress_of(step(150))) == "step 150/150 · loss 1.500 · 50 tokens/s"


def test_the_pace_is_that_of_the_last_steps() -> None:
    slow = [step(number, seconds=10.0) for number in range(1, 30)]
    quick = [step(number, seconds=1.0) for number in range(30, 30 + WINDOW)]
    progress = progress_of(*slow, *quick)
    assert progress.seconds_left == pytest.approx(150 - 49)
    assert progress.tokens_per_second == pytest.approx(100)


def test_numbers_told_twice_count_once() -> None:
    assert progress_of(
        step(1, seconds=4.0), step(2, seconds=2.0), step(2, seconds=2.0)
    ).seconds_left == pytest.approx(148 * 3.0)


def test_a_job_that_resumed_goes_back() -> None:
    progress = progress_of(step(90), step(51))
    assert (progress.step, progress.share) == (51, pytest.approx(0.34))
    assert progress.seconds_left == pytest.approx(99 * 2.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (725, "12:05"),
        (3600, "1:00:00"),
        (11525, "3:12:05"),
        (184_320, "2d 03:12"),
    ],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_curve_shows_the_course_in_the_given_width() -> None:
    curve = Curve()
    curve.add(1, None)
    assert not curve.any
    assert curve.sparkline(8) == ""
    for number in range(1, 9):
        curve.add(number, 9.0 - number)
    assert curve.sparkline(8) == "█▇▆▅▄▃▂▁ 8.000 → 1.000"
    assert curve.sparkline(4) == "█▆▃▁ 8.000 → 1.000"
    curve.add(9, None)
    curve.add(9, float("nan"))
    assert curve.sparkline(2) == "█▁ 8.000 → 1.000"


def test_a_curve_forgets_what_a_resume_trains_again() -> None:
    curve = Curve()
    for number, value in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 2.5), (3, 1.0)):
        curve.add(number, value)
    assert curve.sparkline(9) == "█▆▁ 3.000 → 1.000"
