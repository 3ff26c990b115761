from __future__ import annotations

import pytest

from ft_service.control.checks import check_lanes
from ft_service.data.examiner import Examiner

MIB = 1024**2


def test_the_shortest_goes_first_unless_another_has_waited_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Some:
        is_long = False

        def __init__(self, size: int) -> None:
            self.bytes = size

        def run(self, examiner: Examiner) -> None: ...

    now = 0.0
    monkeypatch.setattr(check_lanes.time, "monotonic", lambda: now)
    large, small = check_lanes._Entry(Some(1024 * MIB)), check_lanes._Entry(Some(1))
    now = 1.0
    assert small.urgency() > large.urgency()
    now = 2000.0
    late = check_lanes._Entry(Some(1))
    now = 2000.5
    assert large.urgency() > late.urgency()
