from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ft_service.errors import UnavailableError
from ft_service.launcher.liveness import MAX_REMIND_SECONDS, EventAge, Outage
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_outage_is_a_few_lines_of_the_log_however_often_it_is_met(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = Outage("The cluster cannot be asked", clock)
    outage.over()
    assert outage.seconds == 0
    for _ in range(600):
        outage.failed(OSError("refused"))
        clock.now += 1
    assert outage.seconds == 600
    assert [record.getMessage() for record in caplog.records] == [
        "The cluster cannot be asked: refused",
        "The cluster cannot be asked, for 60 seconds now: refused",
        "The cluster cannot be asked, for 180 seconds now: refused",
        "The cluster cannot be asked, for 420 seconds now: refused",
    ]
    outage.over()
    outage.over()
    assert (
        caplog.records[-1].getMessage()
        == "The cluster cannot be asked: no longer, after 600 seconds"
    )
    assert outage.seconds == 0
    assert len(caplog.records) == 5


def test_an_outage_of_days_is_a_line_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage("The cluster cannot be asked", clock)
    for _ in range(2 * 24 * 60):
        outage.failed(OSError("refused"))
        clock.now += 60
    assert len(caplog.records) < 2 * 24 * 3600 / MAX_REMIND_SECONDS + 8


class Segments(Attempt):
    """An attempt with so many segments, which counts the looks at them."""

    def __init__(self, run: RunDir, number: int) -> None:
        super().__init__(run, 1)
        self.there = number
        self.looks = 0

    def has_segment(self, seq: int) -> bool:
        self.looks += 1
        return seq < self.there


def test_a_new_process_finds_the_newest_of_many_segments_in_few_looks(tmp_path: Path) -> None:
    clock = Clock()
    for number in (*range(20), 50_000):
        attempt = Segments(RunDir(tmp_path), number)
        ages = EventAge(clock)
        assert ages.running(attempt).reported == (number > 0)
        assert attempt.looks <= 2 + 2 * number.bit_length()
        clock.now += 5.0
        assert ages.running(attempt).silent_seconds == 5.0
        attempt.there += 1
        assert ages.running(attempt).silent_seconds == 0.0, "one more was seen"
        attempt.looks = 0
        ages.running(attempt)
        assert attempt.looks == 1


def test_an_outage_of_the_storage_is_no_silence_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    attempt = Segments(RunDir(tmp_path), 3)
    ages = EventAge(clock)
    ages.running(attempt)
    clock.now += 100.0
    with monkeypatch.context() as away:

        def fail(self: Segments, seq: int) -> bool:
            raise UnavailableError("503 Slow Down")

        away.setattr(Segments, "has_segment", fail)
        with pytest.raises(UnavailableError):
            ages.running(attempt)
    clock.now += 30.0
    assert ages.running(attempt).silent_seconds == 30.0
