"""A disk without room: the supervisor waits with its last words, and they are the true ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason
from ft_service.supervisor import supervisor
from tests.support.attempts import new_run, scripted, wait_for

FULL = OSError(28, "No space left on device")


class FullRunDir(RunDir):
    """A run directory whose disk has no room for exit records."""

    is_full = True
    refused = 0

    def put_if_absent(self, key: str, body: bytes) -> bool:
        if self.is_full and key.endswith("exit.json"):
            self.refused += 1
            raise FULL
        return super().put_if_absent(key, body)


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FullRunDir:
    monkeypatch.setattr(supervisor, "ROOM_POLL_SECONDS", 0.01)
    new_run(folder)
    return FullRunDir(folder)


def supervise(run: RunDir, script: str) -> tuple[supervisor.Supervisor, threading.Thread]:
    one = supervisor.Supervisor(run, 1, 0.2, scripted(script))
    thread = threading.Thread(target=one.run)
    thread.start()
    return one, thread


def test_an_exit_record_waits_for_room_and_says_that_there_was_none(run: FullRunDir) -> None:
    _, thread = supervise(run, "event,fail")
    wait_for(lambda: run.refused >= 3)
    assert thread.is_alive()
    run.is_full = False
    thread.join(30)
    ended = run.read("attempts/1/exit.json", Exit)
    assert ended is not None
    assert (ended.reason, ended.error and ended.error.code) == (ExitReason.DISK_FULL, "disk_full")
    assert "the disk is full, and " in ended.message
    assert " bytes are free there. Free some." in ended.message


@pytest.mark.parametrize("how", ["cancel", "SIGTERM"])
def test_who_is_told_to_go_does_not_wait_for_room(run: FullRunDir, how: str) -> None:
    one, thread = supervise(run, "event,fail")
    wait_for(lambda: run.refused >= 1)
    if how == "cancel":
        run.write("attempts/1/control.json", Control(generation=2, desired=Desired.CANCEL))
    else:
        one.ask_to_stop(15, None)
    thread.join(30)
    assert not thread.is_alive()
    assert not run.has("attempts/1/exit.json")


def test_a_success_is_one_though_its_record_has_to_wait(run: FullRunDir) -> None:
    _, thread = supervise(run, "event,succeed")
    wait_for(lambda: run.refused >= 1)
    run.is_full = False
    thread.join(30)
    ended = run.read("attempts/1/exit.json", Exit)
    assert ended is not None
    assert ended.reason is ExitReason.SUCCEEDED
