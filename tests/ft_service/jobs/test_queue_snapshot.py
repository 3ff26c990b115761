from __future__ import annotations

import pytest

from ft_service.jobs.queue_snapshot import (
    HALF_LIFE_SECONDS,
    accrued,
    is_ahead,
    remembered,
)


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
