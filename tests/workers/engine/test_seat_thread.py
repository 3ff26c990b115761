"""What an engine asks a waiting seat ends none of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from ft_service.rundir.attempt import Attempt, AttemptKeys
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.attempt_seal import SealedError
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import ExitReason
from ft_service.rundir.events import read_segments
from workers.engine.seat_thread import SeatThread
from workers.output.report import Reporter

UNREADABLE = UnreadableDocumentError("attempts/1/control.json", "it is no JSON")


def waiting(due: Any, fence: Any = None, attempt: Any = None) -> SeatThread:
    """A seat that waits for its client, without its thread."""
    seat = object.__new__(SeatThread)
    seat._due = due
    seat._fence = fence
    seat._attempt = attempt
    return seat


class Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self) -> bool:
        raise self._error

    seal = __call__


@pytest.mark.parametrize(
    "error", [UNREADABLE, OSError(5, "Input/output error"), SealedError("attempt 1")]
)
def test_a_seat_whose_documents_cannot_be_read_is_not_due(error: Exception) -> None:
    assert not waiting(Raising(error)).is_due()
    assert waiting(lambda: True).is_due()


def test_a_seat_whose_control_is_unreadable_is_over_and_one_whose_disk_is_away_is_not(
    folder: RunDir,
) -> None:
    folder.path("attempts/1").mkdir(parents=True)
    folder.path("attempts/1/control.json").write_text("no json")

    class Unsealed:
        def seal(self) -> None:
            return None

    attempt = Attempt(folder, 1)
    assert waiting(None, Unsealed(), attempt).is_over()
    assert not waiting(None, Raising(OSError(5, "Input/output error")), attempt).is_over()


def test_a_seat_that_goes_on_says_so_however_long_its_step_takes(folder: RunDir) -> None:
    """Beside seven others a step may take longer than the service lets an attempt be silent."""

    def train() -> None:
        parent = getcurrent().parent
        assert parent is not None
        parent.switch("a forward")

    seat: Any = waiting(None)
    seat._base = SimpleNamespace(
        model=SimpleNamespace(resume=lambda lane, thread, *given: thread.switch(*given))
    )
    seat._lane, seat._thread, seat._reporter = (
        None,
        greenlet(train),
        Reporter(folder, 1, active=True),
    )
    seat.resume()
    assert seat._waiting == "a forward"
    assert [len(segment.events) for segment in read_segments(folder, 1)] == [0]
    seat._reporter._flushed_at = float("-inf")
    folder.write(AttemptKeys(1).exit, exit_of(ExitReason.CANCELLED, "cancelled"))
    seat.resume()
    assert seat._thread.dead, (
        "that its attempt is over ends the seat at the engine's next look, and nothing else"
    )


@pytest.fixture
def folder(tmp_path: Any) -> RunDir:
    return RunDir(tmp_path)
