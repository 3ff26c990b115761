from __future__ import annotations

from pathlib import Path

from ft_service.host import disk
from ft_service.rundir.attempt_outcome import Evidence, FailedRank, decide_exit
from ft_service.rundir.documents import ErrorInfo, ExitReason, Outcome, OutcomeKind


def failed(
    exitcode: int = 1, room: str | None = "no room", outcome: Outcome | None = None
) -> ExitReason:
    rank = FailedRank(0, exitcode)
    return decide_exit(
        Evidence(outcome=outcome, result=None, returncode=1, failed_rank=rank, room=room)
    ).reason


def test_what_a_disk_without_room_explains() -> None:
    assert failed() is ExitReason.DISK_FULL
    assert failed(exitcode=-7) is ExitReason.DISK_FULL, "SIGBUS, of a file that is mapped"
    assert failed(room=None) is ExitReason.WORKER_ERROR
    own = Outcome(
        kind=OutcomeKind.FAILED,
        error=ErrorInfo(code="training_failed", message="the loss is not a number"),
    )
    assert failed(outcome=own) is ExitReason.WORKER_ERROR, "what a rank has said stays"
    told = Outcome(kind=OutcomeKind.FAILED, error=ErrorInfo(code=disk.DISK_FULL, message="no room"))
    assert failed(outcome=told, room=None) is ExitReason.DISK_FULL


def test_a_reserve_takes_room_and_leaves_nothing(tmp_path: Path) -> None:
    reserve = disk.UnnamedReserve(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []
    reserve.free()
    reserve.free()
    (tmp_path / "file").touch()
    disk.UnnamedReserve(tmp_path / "file" / "below").free()
