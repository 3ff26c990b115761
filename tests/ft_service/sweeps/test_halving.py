"""Who is stopped, and who is best: pure arithmetic over losses at rungs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from ft_service.rundir.events import Metrics
from ft_service.sweeps.halving import (
    Standing,
    SweepJob,
    SweepJobProgress,
    best_of,
    jobs_to_stop,
    shares_of,
)

OPEN = Standing.OPEN
DONE = Standing.DONE
STOPPED = Standing.STOPPED
OUT = Standing.OUT


def runners(
    *losses: Mapping[int, float] | float | None, standings: Sequence[Standing] = ()
) -> list[SweepJob]:
    """Jobs a, b, …; a number: the loss at the first rung; None: it has not come so far."""
    found = []
    for number, loss in enumerate(losses):
        rungs = {} if loss is None else loss if isinstance(loss, Mapping) else {0: loss}
        standing = standings[number] if number < len(standings) else OPEN
        best = min((value for value in rungs.values() if math.isfinite(value)), default=None)
        found.append(SweepJob(chr(ord("a") + number), standing, rungs, best))
    return found


def stopped(given: Sequence[SweepJob], eta: int = 2, rungs: int = 2) -> str:
    return "".join(stop.job_id for stop in jobs_to_stop(given, eta, rungs))


def test_rungs_are_shares_below_the_whole() -> None:
    assert shares_of(2, 0.25) == (0.25, 0.5)
    assert shares_of(3, 0.1) == (0.1, pytest.approx(0.3), pytest.approx(0.9))
    assert shares_of(2, 0.5) == (0.5,)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        pytest.param((1.0, 2.0, 3.0, 4.0), "cd", id="half of four"),
        pytest.param((1.0, 2.0, 3.0), "c", id="of three two stay"),
        pytest.param((None, None, 3.0, 4.0), "", id="late arrivals may still be worse"),
        pytest.param((None, 2.0, 3.0, 4.0), "d", id="two better ones are enough"),
        pytest.param((1.0, 1.0, 1.0, 1.0), "cd", id="ties: the earlier is better"),
        pytest.param((2.0, 1.0, 2.0, 2.0), "cd", id="ties behind the best"),
        pytest.param(
            (math.nan, 2.0, 3.0, None),
            "a",
            id="no number is worse than any, and as soon as two have one",
        ),
        pytest.param(
            (math.nan, math.nan, math.nan, 3.0), "", id="but a missing loss is not better"
        ),
        pytest.param(
            ({0: 9.0, 1: 1.0}, 1.0, 2.0, 3.0), "d", id="who has gone on is judged where he is"
        ),
        pytest.param(
            ({0: 1.0, 1: 5.0}, {0: 2.0, 1: 4.0}, None, None), "a", id="of the second rung one stays"
        ),
        pytest.param(
            ({1: 5.0}, {0: 2.0, 1: 4.0}, None, None), "a", id="a rung that was missed stops no job"
        ),
    ],
)
def test_a_job_is_stopped_once_a_rung_is_full_of_better_ones(
    losses: tuple[Mapping[int, float] | float | None, ...], expected: str
) -> None:
    assert stopped(runners(*losses)) == expected


def test_who_cannot_win_neither_counts_nor_displaces() -> None:
    four = (1.0, 2.0, 3.0, 4.0)
    assert stopped(runners(*four, standings=[OUT])) == "d", "of three that are left two stay"
    assert stopped(runners(*four, standings=[OUT, OUT])) == "d"
    assert stopped(runners(*four, standings=[OUT, OUT, OUT])) == "", "the last one is never stopped"
    assert stopped(runners(*four, standings=[DONE, STOPPED, STOPPED])) == "d", (
        "a stopped job still counts with its loss"
    )
    assert stopped(runners(*four, standings=[OPEN, OPEN, DONE, DONE])) == "", (
        "what is over is not stopped"
    )


def test_eta_says_how_many_stay() -> None:
    losses = tuple(float(number) for number in range(9))
    assert stopped(runners(*losses), eta=3) == "defghi"
    assert stopped(runners(*losses), eta=8) == "cdefghi"


def test_the_verdict_does_not_depend_on_the_order_in_which_losses_arrive() -> None:
    """Looking after each arrival, once at the end, or after a restart in between stops the same
    jobs.
    """
    source = random.Random(5)
    for _ in range(30):
        losses = [source.choice([1.0, 2.0, 3.0, math.nan]) for _ in range(5)]
        verdicts = set()
        for order in itertools.islice(itertools.permutations(range(5)), 0, None, 7):
            known: list[float | None] = [None] * 5
            standings = [OPEN] * 5
            for number in order:
                known[number] = losses[number]
                for stop in jobs_to_stop(runners(*known, standings=standings), 2, 2):
                    standings[ord(stop.job_id) - ord("a")] = STOPPED
            verdicts.add(tuple(standings))
        assert len(verdicts) == 1


def test_a_stop_says_why() -> None:
    [stop] = jobs_to_stop(runners(1.0, 2.0, 2.5), 2, 2)
    assert stop.text((0.25, 0.5)) == (
        "stopped by the sweep: after 25 % of its steps its validation loss was 2.5000, and 2 of 3 "
        "jobs "
        "were better there; 2 go on"
    )
    [stop, _] = jobs_to_stop(runners(math.nan, {1: 3.0}, {1: 2.0}, {0: 2.0}, {0: 1.0}), 3, 2)
    assert "its validation loss was no number" in stop.text((0.25, 0.5))


def test_the_best_has_the_lowest_loss_and_the_earlier_wins_at_equal_ones() -> None:
    assert best_of(runners(2.0, 1.0, 1.0)) == runners(2.0, 1.0, 1.0)[1]
    over = runners(0.5, 3.0, 2.0, 2.0, standings=[OUT, STOPPED, DONE, DONE])
    assert best_of(over) == over[2], "what has failed or was stopped is no outcome"
    assert best_of(runners(None, math.nan, standings=[DONE, DONE])) is None
    assert best_of(runners(0.5, standings=[OUT])) is None


def test_a_course_is_folded_from_metrics() -> None:
    def fold(course: SweepJobProgress, *losses: tuple[int, float | None]) -> SweepJobProgress:
        for step, loss in losses:
            metrics = Metrics(step=step, total_steps=20, valid_loss=loss)
            course = SweepJobProgress.read(course.after(metrics, (5, 10)).document())
        return course

    course = fold(SweepJobProgress(), (1, None), (4, 3.0), (5, 2.0), (7, 1.0))
    assert course.rungs == {0: 2.0}, "the first validation at or behind a rung"
    assert (course.step, course.best_loss, course.best_step, course.valid_loss) == (7, 1.0, 7, 1.0)
    course = fold(course, (8, 1.0), (5, 9.0))
    assert (course.best_step, course.rungs) == (7, {0: 2.0}), (
        "the earlier of equals; a step that is repeated says nothing new"
    )
    course = fold(course, (20, 0.5))
    assert (course.rungs, course.best_step) == ({0: 2.0}, 20), (
        "a job past its rungs is no longer judged, and was not at rung 1"
    )
    worse = fold(SweepJobProgress(), (6, math.nan))
    assert math.isnan(worse.rungs[0])
    assert (worse.best_loss, worse.valid_loss) == (None, None)
