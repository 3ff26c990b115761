from __future__ import annotations

import logging
import threading

import pytest

from ft_service.errors import NotFoundError, UnavailableError
from ft_service.host.loops import MOST_SECONDS, every, log_errors


class Stop(threading.Event):
    """Notes the pauses instead of waiting, and is set after some."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._after = after

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) == self._after:
            self.set()
        return self.is_set()


def test_work_is_done_until_the_stop() -> None:
    stop = Stop(3)
    done = list[int]()
    every(2.0, lambda: done.append(1), stop, "counting")
    assert len(done) == 3
    assert stop.pauses == [2.0, 2.0, 2.0]


def test_nothing_is_done_after_the_stop() -> None:
    stop = threading.Event()
    stop.set()
    every(2.0, lambda: pytest.fail("it was stopped before"), stop, "counting")


def test_errors_are_logged_and_lengthen_the_pause_until_one_turn_is_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = Stop(10)
    turns = iter([True] * 7 + [False, True, False])

    def work() -> None:
        if next(turns):
            raise ValueError("broken")

    with caplog.at_level(logging.WARNING):
        every(2.0, work, stop, "counting")
    assert stop.pauses == [2.0, 4.0, 8.0, 16.0, 32.0, MOST_SECONDS, MOST_SECONDS, 2.0, 2.0, 2.0]
    assert len(caplog.records) == 8
    assert all(record.exc_info for record in caplog.records)
    assert "counting has failed" in caplog.text


def test_a_pause_is_never_shorter_than_the_usual_one() -> None:
    stop = Stop(2)

    def work() -> None:
        raise ValueError("broken")

    every(900.0, work, stop, "counting")
    assert stop.pauses == [900.0, 900.0]


def test_what_is_away_is_logged_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise UnavailableError("the database is away")

    every(1.0, work, Stop(1), "counting")
    assert [record.exc_info for record in caplog.records] == [None]
    assert "the database is away" in caplog.text


def test_an_items_error_is_logged_and_what_is_away_or_a_mistake_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (
        OSError(13, "Permission denied", "/a"),
        NotFoundError("There is no job ftjob-1."),
    ):
        with log_errors("removing run 7"):
            raise error
    assert [record.getMessage() for record in caplog.records] == [
        "removing run 7 has failed: [Errno 13] Permission denied: '/a'",
        "removing run 7 has failed: There is no job ftjob-1.",
    ]
    for error in (UnavailableError("The database is away."), ValueError("broken")):
        with pytest.raises(type(error)), log_errors("removing run 7"):
            raise error
    assert len(caplog.records) == 2
