from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Exit, Outcome, Result, Stop
from ft_service.supervisor import supervisor
from tests.support.attempts import (
    all_processes,
    gone,
    new_run,
    process_of,
    scripted,
    starts,
    supervisor_of,
    wait_for,
    write_start,
)


def supervise(
    run: RunDir, script: str, attempt: int = 1, grace: float = 60.0
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "ft_service.supervisor",
        str(run.root),
        str(attempt),
        "--grace",
        str(grace),
    ]
    return subprocess.Popen([*command, "--command", *scripted(script)], stderr=subprocess.DEVNULL)


def exit_of(run: RunDir, attempt: int = 1) -> Exit:
    found = run.read(f"attempts/{attempt}/exit.json", Exit)
    assert found is not None
    return found


def test_success(folder: Path) -> None:
    run = new_run(folder)
    assert supervise(run, "event,succeed").wait() == 0
    assert exit_of(run).reason == "succeeded"


def test_a_permanent_failure(folder: Path) -> None:
    run = new_run(folder)
    assert supervise(run, "refuse").wait() == 64
    assert exit_of(run).error == run.read("attempts/1/outcome.json", Outcome).error  # type: ignore[union-attr]


def test_an_error_without_a_word_shows_the_ranks_log(folder: Path) -> None:
    run = new_run(folder)
    assert supervise(run, "fail").wait() == 1
    found = exit_of(run)
    assert (found.reason, found.message) == (
        "worker_error",
        "Rank 0 failed: ValueError: the loss is not a number",
    )
    assert found.error is not None
    assert found.error.rank == 0
    assert "Traceback" in (found.error.traceback or "")


def test_a_rank_that_nccl_ended_waited_for_another_one(folder: Path) -> None:
    run = new_run(folder)
    assert supervise(run, "abort").wait() == 1
    found = exit_of(run)
    assert found.error is not None
    assert (found.reason, found.error.code, found.error.rank) == (
        "worker_error",
        "collective_timeout",
        0,
    )
    assert (
        "aborted it (SIGABRT): Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        in found.message
    )


def test_sigterm_stops_at_a_checkpoint(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "checkpoint=3,wait")
    everything = all_processes(run)
    process.terminate()
    assert process.wait() == 75
    assert run.read("attempts/1/stop.json", Stop) is not None
    assert (exit_of(run).reason, exit_of(run).message) == (
        "stopped",
        "Training has stopped at checkpoint step-3-a1.",
    )
    wait_for(lambda: gone(everything))


def test_a_pause_is_the_workers_own_to_obey(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "checkpoint=3,wait")
    all_processes(run)
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.PAUSE))
    assert process.wait() == 75
    assert run.read("attempts/1/stop.json", Stop) is None


def test_ranks_that_do_not_stop_in_time_are_killed(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang", grace=0.1)
    everything = all_processes(run)
    process.terminate()
    assert process.wait() == 1
    assert exit_of(run).reason == "stop_timeout"
    wait_for(lambda: gone(everything))


def test_a_pause_is_held_to_the_same_grace(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang", grace=0.1)
    all_processes(run)
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.PAUSE))
    assert process.wait() == 1
    assert exit_of(run).reason == "stop_timeout"


def test_cancel_leaves_no_process(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang")
    everything = all_processes(run)
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.CANCEL))
    process.wait()
    wait_for(lambda: gone(everything))
    assert exit_of(run).reason == "cancelled"


def test_an_attempt_that_was_cancelled_before_it_started_does_not_start(folder: Path) -> None:
    run = new_run(folder)
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.CANCEL))
    assert supervise(run, "succeed").wait() == 1
    assert exit_of(run).reason == "cancelled"
    assert starts(run, 1) == 0


def test_a_killed_torchrun_ends_the_attempt_and_its_ranks(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang")
    everything = all_processes(run)
    processes.kill(process_of(run, "1-torchrun"))
    assert process.wait() == 1
    assert (exit_of(run).reason, exit_of(run).message) == (
        "worker_killed",
        "torchrun was killed by SIGKILL.",
    )
    wait_for(lambda: gone(everything))


def test_a_killed_rank_ends_the_attempt(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang")
    everything = all_processes(run)
    processes.kill(process_of(run, "1-1"))
    assert process.wait() == 1
    assert (exit_of(run).reason, exit_of(run).message) == (
        "worker_killed",
        "Rank 1 was killed by SIGKILL.",
    )
    wait_for(lambda: gone(everything))


def test_a_killed_supervisor_takes_everything_with_it(folder: Path) -> None:
    run = new_run(folder)
    process = supervise(run, "hang")
    everything = all_processes(run)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(everything))
    assert run.get("attempts/1/exit.json") is None


def test_of_two_supervisors_one_runs_the_attempt(folder: Path) -> None:
    run = new_run(folder)
    pair = [supervise(run, "wait") for _ in range(2)]
    first = supervisor_of(run)
    winner, loser = sorted(pair, key=lambda process: process.pid != first.pid)
    assert loser.wait() == 1
    process_of(run, "1-0")
    winner.terminate()
    assert winner.wait() == 75
    assert starts(run, 1) == 1


def test_an_attempt_is_never_run_again(folder: Path) -> None:
    run = new_run(folder)
    killed = supervise(run, "hang")
    all_processes(run)
    killed.kill()
    killed.wait()
    assert supervise(run, "succeed").wait() == 1
    assert starts(run, 1) == 1
    write_start(run, 2)
    assert supervise(run, "succeed", attempt=2).wait() == 0
    assert supervise(run, "succeed", attempt=2).wait() == 0
    assert starts(run, 2) == 1


@contextlib.contextmanager
def leftover_rank(run: RunDir) -> Iterator[None]:
    """A rank that lives on, whatever has become of its attempt."""
    holding = (
        "import sys; from ft_service.host.lifetime import *; hold_rank_lock(sys.argv[1]); "
        "print(flush=True); input()"
    )
    command = [sys.executable, "-c", holding, str(run.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        yield
        rank.kill()


def test_an_attempt_waits_for_the_ranks_of_an_earlier_one(folder: Path) -> None:
    run = new_run(folder, attempt=2)
    with leftover_rank(run):
        process = supervise(run, "succeed", attempt=2)
        supervisor_of(run, 2)
    assert process.wait() == 0


def test_nothing_starts_while_a_rank_of_an_earlier_attempt_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "EARLIER_RANKS_SECONDS", 0.1)
    run = new_run(folder, attempt=2)
    with leftover_rank(run):
        assert supervisor.Supervisor(run, 2, 60.0, scripted("succeed")).run() == 1
    assert "earlier attempt are still alive after 0.1 seconds" in exit_of(run, 2).message
    assert starts(run, 2) == 0


def test_the_exit_is_not_told_before_the_last_rank_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "LEFTOVER_LOG_SECONDS", 0.05)
    run = new_run(folder)
    watching = threading.Thread(target=supervisor.Supervisor(run, 1, 60.0, scripted("hang")).run)
    watching.start()
    torchrun = process_of(run, "1-torchrun")
    with leftover_rank(run):
        processes.kill(torchrun)
        wait_for(lambda: "torchrun is gone and a rank is still alive" in caplog.text)
        assert run.get("attempts/1/exit.json") is None
    watching.join(30)
    assert exit_of(run).reason == "worker_killed"


@pytest.mark.parametrize(
    ("script", "reason"),
    [("refuse,linger", "permanent_error"), ("event,succeed,linger", "succeeded")],
)
def test_a_torchrun_that_outstays_its_ranks_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(supervisor, "LINGER_SECONDS", 0.1)
    run = new_run(folder)
    supervisor.Supervisor(run, 1, 60.0, scripted(script)).run()
    assert exit_of(run).reason == reason
    assert not Path(f"/proc/{int(run.get('pids/1-torchrun') or b'')}").exists()


def test_a_job_that_is_done_already_is_not_trained_again(folder: Path) -> None:
    run = new_run(folder, attempt=2)
    run.write(
        "result.json",
        Result(attempt=1, steps=10, trained_tokens=100, train_loss=1.0, valid_loss=None),
    )
    assert supervise(run, "fail", attempt=2).wait() == 0
    assert starts(run, 2) == 0


def test_a_program_that_cannot_be_started_is_named(folder: Path) -> None:
    run = new_run(folder)
    command = [
        sys.executable,
        "-m",
        "ft_service.supervisor",
        str(run.root),
        "1",
        "--command",
        str(folder / "none"),
    ]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 1
    assert "could not be started" in exit_of(run).message


@pytest.mark.parametrize("program", ["torchrun", "rank"])
def test_a_missing_package_is_named_and_permanent(folder: Path, program: str) -> None:
    """That of `python -m torch.distributed.run`, and one that a rank imports."""
    run = new_run(folder)
    lacking = (
        [sys.executable, "-m", "ft_no_such_package.run"]
        if program == "torchrun"
        else scripted("lack")
    )
    command = [
        sys.executable,
        "-m",
        "ft_service.supervisor",
        str(run.root),
        "1",
        "--command",
        *lacking,
    ]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 64
    found = exit_of(run)
    assert found.message.startswith(
        "The package ft_no_such_package is not installed where the workers run."
    )
    assert found.error is not None
    assert (found.reason, found.error.code) == ("permanent_error", "missing_package")


def test_the_supervisor_imports_no_torch() -> None:
    code = "import sys, ft_service.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
