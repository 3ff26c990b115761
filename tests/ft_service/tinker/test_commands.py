from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.tinker import commands
from ft_service.tinker.commands import Command, CommandLog, CommandResult, CommandTooLargeError


@pytest.fixture
def log(tmp_path: Path) -> CommandLog:
    return CommandLog(RunDir(tmp_path))


def test_the_first_of_a_number_stays(log: CommandLog) -> None:
    first = Command(3, "forward_backward", {"a": 1}, b"line\nbytes\0")
    assert log.put(first)
    assert not log.put(Command(3, "optim_step"))
    assert log.command(3) == first
    assert log.command(4) is None
    log.put_result(3, CommandResult({"x": 1}, b"body"))
    log.put_result(3, CommandResult({"x": 2}))
    assert log.result(3) == CommandResult({"x": 1}, b"body")


def test_what_waits(log: CommandLog) -> None:
    assert (log.first_missing(), log.has_unanswered()) == (0, False)
    log.put(Command(0, "create_model"))
    assert log.has_unanswered()
    log.put_result(0, CommandResult({}))
    assert not log.has_unanswered()
    log.put(Command(5, "optim_step"))
    assert (log.first_missing(), log.has_unanswered()) == (1, False), (
        "its client may never send the one before it"
    )
    for seq in range(1, 5):
        log.put(Command(seq, "optim_step"))
    assert log.has_unanswered()
    assert log.last_used() > 0


def test_results_outlive_their_commands(log: CommandLog) -> None:
    for seq in range(4):
        log.put(Command(seq, "optim_step"))
        log.put_result(seq, CommandResult({"seq": seq}))
    log.prune(2, results_before=0.0)
    assert [log.has(seq) for seq in range(4)] == [False, False, False, True]
    assert all(log.has_result(seq) for seq in range(4))
    log.prune(2, results_before=log.last_used() + 1)
    assert [log.has_result(seq) for seq in range(4)] == [False, False, False, True]


def test_the_position_outlives_all_that_is_old(log: CommandLog) -> None:
    """The next number would be one that the ranks have passed, and that they never read."""
    for seq in range(3):
        log.put(Command(seq, "optim_step"))
        log.put_result(seq, CommandResult({}))
    log.prune(2, results_before=log.last_used() - 3600)
    assert (log.first_missing(), log.has_unanswered()) == (3, False), (
        "commands go before their results"
    )
    log.prune(2, results_before=log.last_used() + 3600)
    assert [log.has_result(seq) for seq in range(3)] == [False, False, True]
    assert (log.first_missing(), log.has_unanswered()) == (3, False)
    log.put(Command(3, "finish"))
    assert (log.first_missing(), log.has_unanswered()) == (4, True)


def test_a_file_that_is_none_is_said_to_be_one(log: CommandLog) -> None:
    log.run.put("commands/000000007", b"{nothing")
    with pytest.raises(UnreadableDocumentError):
        log.command(7)


def test_a_command_has_a_limit(log: CommandLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MOST_BYTES", 100)
    with pytest.raises(CommandTooLargeError, match="at most 100"):
        log.put(Command(1, "forward_backward", body=b"x" * 100))
    assert not log.has(1)
