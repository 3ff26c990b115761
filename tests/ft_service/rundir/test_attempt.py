from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.rundir.attempt import Attempt, AttemptKeys
from ft_service.rundir.attempt_outcome import AttemptRecords, conclude
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import (
    Control,
    Desired,
    Exit,
    ExitReason,
    Launched,
    Outcome,
    OutcomeKind,
    Start,
    Stop,
)
from tests.support.unreadable import put_garbage

START = Start(job_id="ftjob-1", attempt=3, world_size=4, generation=1, checkpoint=None, nodes=2)
STOPPED = Exit(code=75, reason=ExitReason.STOPPED, message="Stopped.")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(RunDir(tmp_path), 3)


def test_names_on_disk() -> None:
    """Attempts that run outlive the service that started them: what these names are, they stay."""
    keys = AttemptKeys(12)
    names = ("start", "control", "stop", "outcome", "exit", "launched")
    assert [getattr(keys, name) for name in names] == [f"attempts/12/{name}.json" for name in names]
    assert (keys.folder, keys.events, keys.logs) == (
        "attempts/12",
        "attempts/12/events",
        "attempts/12/logs",
    )
    assert keys.segment(7) == "attempts/12/events/00000007.jsonl"


@pytest.mark.parametrize(
    ("index", "nodes", "folder", "logs"),
    [
        (0, 1, "attempts/3", "attempts/3/logs"),
        (0, 2, "attempts/3/nodes/0", "attempts/3/logs/node-0"),
        (5, 8, "attempts/3/nodes/5", "attempts/3/logs/node-5"),
    ],
)
def test_a_nodes_names_on_disk(index: int, nodes: int, folder: str, logs: str) -> None:
    keys = AttemptKeys(3).node(index, nodes)
    assert (keys.folder, keys.logs) == (folder, logs)
    assert [keys.supervisor, keys.exit, keys.lock] == [
        f"{folder}/supervisor.json",
        f"{folder}/exit.json",
        f"{folder}/supervisor.lock",
    ]
    assert (keys.rendezvous, keys.supervisor_log) == (
        f"{folder}/rendezvous",
        f"{logs}/supervisor.log",
    )


def test_documents_that_are_written_once(attempt: Attempt) -> None:
    outcome = Outcome(kind=OutcomeKind.SUCCEEDED)
    stop = Stop(reason="SIGTERM")
    launched = Launched(job="ft-1", uid="u")
    assert (attempt.has_exit(), attempt.has_outcome(), attempt.has_launched()) == (
        False,
        False,
        False,
    )
    for write, read, document in (
        (partial(attempt.write_start, START), attempt.read_start, START),
        (partial(attempt.write_stop, stop), attempt.read_stop, stop),
        (partial(attempt.write_outcome, outcome), attempt.read_outcome, outcome),
        (partial(attempt.write_exit, STOPPED), attempt.read_exit, STOPPED),
        (
            partial(attempt.write_launched, launched),
            partial(attempt.run.read, attempt.keys.launched, Launched),
            launched,
        ),
    ):
        assert read() is None
        assert [write(), write()] == [True, False]
        assert read() == document
    assert (attempt.has_exit(), attempt.has_outcome(), attempt.has_launched()) == (True, True, True)


def test_control_is_rewritten(attempt: Attempt) -> None:
    for desired in (Desired.PAUSE, Desired.CANCEL):
        attempt.write_control(Control(generation=2, desired=desired))
    assert attempt.read_control() == Control(generation=2, desired=Desired.CANCEL)


def test_nodes_keep_their_own(attempt: Attempt) -> None:
    first, second = (attempt.node(index, 2) for index in range(2))
    assert second.write_exit(STOPPED)
    assert second.write_supervisor(processes.of(os.getpid()))
    assert (first.has_exit(), first.has_supervisor()) == (False, False)
    assert second.read_supervisor() == processes.of(os.getpid())
    assert attempt.read_node_exits(2) == {1: STOPPED}
    assert not attempt.has_exit()
    assert attempt.node().write_exit(STOPPED)
    assert attempt.read_exit() == STOPPED, "the only node's exit record is the attempt's"


def test_locks_of_all_nodes_are_found(attempt: Attempt) -> None:
    assert attempt.locks() == []
    held = [attempt.node(index, 2).lock for index in range(2)]
    for lock in held:
        lock.parent.mkdir(parents=True)
        lock.touch()
    assert sorted(attempt.locks()) == held


def test_the_jobs_id_is_never_guessed_from_a_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "ftjob-folder")
    assert Attempt(run, 3, job_id="ftjob-2").job_id == "ftjob-2"
    with pytest.raises(FileNotFoundError, match=r"attempts/3/start\.json"):
        _ = Attempt(run, 3).job_id
    Attempt(run, 3).write_start(START)
    assert Attempt(run, 3).job_id == "ftjob-1"


@pytest.mark.parametrize("kind", ["no_json", "pipe"])
def test_an_attempt_has_an_end_though_its_record_cannot_be_read(tmp_path: Path, kind: str) -> None:
    attempt = Attempt(RunDir(tmp_path), 1)
    for key in (
        attempt.keys.exit,
        attempt.keys.outcome,
        "attempts/1/nodes/1/exit.json",
        "result.json",
    ):
        put_garbage(tmp_path / key, kind)
    ended = attempt.read_exit()
    outcome = attempt.read_outcome()
    of_node = attempt.read_node_exits(2)[1]
    assert ended is not None
    assert outcome is not None
    assert (ended.reason, of_node.reason) == (ExitReason.UNREADABLE, ExitReason.UNREADABLE)
    assert ended.message.startswith("attempts/1/exit.json cannot be read: it is no")
    assert of_node.message.startswith("attempts/1/nodes/1/exit.json cannot be read: it is no")
    concluded = conclude(AttemptRecords(1, {}, outcome, attempt.read_result()))
    assert concluded.reason is ExitReason.UNREADABLE
    assert concluded.message.startswith("attempts/1/outcome.json cannot be read: it is no")
