from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.presence import LEAVE_AFTER_SECONDS, SIGNS, Presence
from ft_service.settings import Settings
from workers.tinker.attendance import LOOK_SECONDS, MOST_LOOK_SECONDS, Attendance, pause_after


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(RunDir(tmp_path), 1)


def test_ranks_stay_while_signs_come_and_leave_without_one_for_as_long_as_the_service_said(
    attempt: Attempt,
) -> None:
    clock = Clock()
    attendance = Attendance(attempt, clock)
    assert not attendance.is_over
    for sign in range(100):
        attempt.write_presence(Presence(sign=str(sign), leave_after_seconds=60.0))
        clock.now += LEAVE_AFTER_SECONDS / SIGNS if sign == 0 else 30.0
        assert not attendance.is_over, "however long they wait"
    clock.now += 59.0
    assert not attendance.is_over
    attendance.wait()  # a command is a sign, too
    clock.now += 59.0
    assert not attendance.is_over
    clock.now += 2.0
    assert attendance.is_over
    attempt.write_presence(Presence(sign="back", leave_after_seconds=60.0))
    clock.now += 60.0 / SIGNS
    assert not attendance.is_over


def test_without_any_sign_they_leave_too_and_what_cannot_be_read_is_none(attempt: Attempt) -> None:
    assert Settings.model_fields["unattended_seconds"].default == LEAVE_AFTER_SECONDS
    clock = Clock()
    attendance = Attendance(attempt, clock)
    attempt.run.put(attempt.keys.presence, b"{")
    clock.now += LEAVE_AFTER_SECONDS
    assert not attendance.is_over
    clock.now += 1.0
    assert attendance.is_over


def test_the_document_is_read_a_few_times_however_often_it_is_asked_for(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    reads = []
    read = attempt.read_presence
    monkeypatch.setattr(attempt, "read_presence", lambda: reads.append(clock.now) or read())
    attendance = Attendance(attempt, clock)
    for _ in range(10_000):
        clock.now += LEAVE_AFTER_SECONDS / 10_001
        assert not attendance.is_over
    assert len(reads) <= SIGNS + 1


def test_who_waits_for_long_looks_rarely_and_is_late_by_a_hundredth_at_most() -> None:
    for waited in (0.0, 0.1, 1.0, 10.0, 1000.0):
        assert LOOK_SECONDS <= pause_after(waited) <= max(LOOK_SECONDS, waited / 100)
    assert pause_after(3600.0) == MOST_LOOK_SECONDS
    assert sum(1 for _ in looks(3600.0)) < 20_000, "of 720,000 before"


def looks(seconds: float):
    waited = 0.0
    while waited < seconds:
        yield waited
        waited += pause_after(waited)
