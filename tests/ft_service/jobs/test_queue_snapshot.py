from __future__ import annotations

import pytest

from ft_service.jobs.queue_snapshot import (
    HALF_LIFE_SECONDS,
    accrued,
    remembered,
)


def test_use_is_forgotten_by_half_in_three_days() -> None:
    assert remembered(800.0, HALF_LIFE_SECONDS) == 400.0
    assert accrued(2, 60.0) == pytest.approx(120.0, rel=1e-3)
    day = HALF_LIFE_SECONDS / 3
    assert remembered(accrued(3, day), day) + accrued(3, day) == pytest.approx(accrued(3, 2 * day))
