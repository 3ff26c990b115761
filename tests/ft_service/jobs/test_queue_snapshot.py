from __future__ import annotations

import pytest

from ft_service.jobs.queue_snapshot import (
    HALF_LIFE_SECONDS,
    ExpectedStart,
    Host,
    JobSize,
    QueuedJob,
    QueueSnapshot,
    Share,
    accrued,
    fit_together,
    is_ahead,
    remembered,
)
from ft_service.rundir.engine import SeatSize


def test_use_is_forgotten_by_half_in_three_days() -> None:
    assert remembered(800.0, HALF_LIFE_SECONDS) == 400.0
    assert accrued(2, 60.0) == pytest.approx(120.0, rel=1e-3)
    day = HALF_LIFE_SECONDS / 3
    assert remembered(accrued(3, day), day) + accrued(3, day) == pytest.approx(accrued(3, 2 * day))


@pytest.mark.parametrize("ago", [0.0, -60.0])
def test_what_is_of_now_or_was_stored_before_the_clock_went_back_counts_whole(ago: float) -> None:
    assert remembered(800.0, ago) == 800.0
    assert accrued(2, ago) == 0.0


@pytest.mark.parametrize(
    ("moment", "ahead"),
    [(99.0, False), (100.0, False), (101.0, True), (110.0, True), (111.0, False)],
)
def test_a_moment_is_ahead_up_to_the_longest_wait(moment: float, ahead: bool) -> None:
    assert is_ahead(moment, 100.0, 10.0) is ahead


def seat(held: int, batch: int) -> SeatSize:
    return SeatSize(held=held, batch=batch, batch_tokens=8, room=None, gain=None)


@pytest.mark.parametrize(
    ("room", "fit"), [(None, True), (30 + 50 + 9, True), (30 + 50 + 8, False), (0, False)]
)
def test_seats_fit_together_with_the_largest_micro_batch_of_any(
    room: int | None, fit: bool
) -> None:
    assert fit_together([seat(30, 9), None, seat(50, 2)], room) is fit
    assert fit_together([None], room), "what is not planned is not counted"


def test_a_project_has_its_part_of_the_use_of_all() -> None:
    empty = QueueSnapshot(now=0.0, hosts={"h": Host(slots=1)}, waiting=(), running=())
    assert empty.share_of("a") == 0.0
    shares = {"a": Share(used=30.0), "b": Share(used=10.0), "c": Share()}
    used = QueueSnapshot(now=0.0, hosts={}, waiting=(), running=(), shares=shares)
    assert [used.share_of(name) for name in ("a", "b", "c", "d")] == [0.75, 0.25, 0.0, 0.0]
    unused = QueueSnapshot(now=0.0, hosts={}, waiting=(), running=(), shares={"c": Share()})
    assert unused.share_of("c") == 0.0


def test_the_same_work_takes_less_time_on_more_ranks() -> None:
    job = QueuedJob(id="x", project="a", number=0, slots=4, nodes=2, seconds=100.0)
    assert job.smallest == JobSize(2, 2)
    assert [job.seconds_on(ranks) for ranks in (4, 8, 1)] == [100.0, 50.0, 400.0]
    assert ExpectedStart(job, "h", JobSize(2, 4)).seconds == 50.0
    unknown = QueuedJob(id="x", project="a", number=0, slots=4)
    assert (unknown.smallest, unknown.seconds_on(8)) == (JobSize(1, 4), None)
