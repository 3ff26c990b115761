from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ft_service.host import processes
from ft_service.host.lifetime import try_lock
from ft_service.host.processes import ProcessIdentity
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Absent, Ended, Observation, Running, Unknown
from ft_service.launcher.local_launcher import LocalLauncher, host_id
from ft_service.launcher.protocol import LaunchError
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Result
from tests.support.attempts import (
    all_processes,
    gone,
    new_run,
    process_of,
    scripted,
    starts,
    supervisor_of,
    wait_for,
)
from tests.support.secrets import SECRETS

RESULT = Result(attempt=1, steps=10, trained_tokens=100, train_loss=1.0, valid_loss=None)


def launcher_for(script: str, **options: object) -> LocalLauncher:
    return LocalLauncher(2, worker_command=scripted(script), **options)  # type: ignore[arg-type]


def wait_for_end(launcher: LocalLauncher, run: RunDir, attempt: int = 1) -> Ended:
    def ended() -> Ended | None:
        seen = launcher.observe(Attempt(run, attempt))
        return seen if isinstance(seen, Ended) else None

    return wait_for(ended)


def test_an_attempt_from_its_start_to_its_end(folder: Path) -> None:
    run = new_run(folder)
    launcher = launcher_for("event,checkpoint=3,wait")
    assert launcher.observe(Attempt(run, 1)) == Absent()
    launcher.start(Attempt(run, 1))
    # From this moment on, without a gap.
    assert isinstance(launcher.observe(Attempt(run, 1)), Running)
    wait_for(lambda: run.get("attempts/1/events/00000001.jsonl"))
    seen = launcher.observe(Attempt(run, 1))
    assert isinstance(seen, Running)
    assert seen.reported
    processes.kill(supervisor_of(run), 15)
    ended = wait_for_end(launcher, run)
    assert ended == Ended(
        exit_of(ExitReason.STOPPED, "Training has stopped at checkpoint step-3-a1."),
        checkpoint_step=3,
    )


def test_what_it_starts_is_no_child_of_its_own(folder: Path) -> None:
    """A child that is not reaped would look alive for ever, and would die with its parent."""
    before = children()
    run = new_run(folder)
    launcher = launcher_for("leave")
    launcher.start(Attempt(run, 1))
    wait_for_end(launcher, run)
    assert children() <= before


def children() -> set[str]:
    """Of this process, those among them that ended and were not reaped."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found.update((task / "children").read_text().split())
    return found


def test_nothing_of_an_attempt_has_the_servers_secrets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = new_run(folder)
    launcher = launcher_for("wait")
    launcher.start(Attempt(run, 1))
    for process in all_processes(run):
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"secret-of-the-server" not in environment
    launcher.kill(Attempt(run, 1), Reason.STALLED)


def test_starting_twice_runs_once(folder: Path) -> None:
    run = new_run(folder)
    launcher = launcher_for("wait")
    launcher.start(Attempt(run, 1))
    launcher_for("wait").start(Attempt(run, 1))
    all_processes(run)
    launcher.kill(Attempt(run, 1), Reason.STALLED)
    launcher.start(Attempt(run, 1))
    assert starts(run, 1) == 1
    assert isinstance(launcher.observe(Attempt(run, 1)), Ended)


def test_another_launcher_takes_the_attempt_over(folder: Path) -> None:
    run = new_run(folder)
    launcher_for("event,hang").start(Attempt(run, 1))
    everything = all_processes(run)
    successor = launcher_for("event,hang")
    assert isinstance(successor.observe(Attempt(run, 1)), Running)
    successor.signal(Attempt(run, 1), Control(generation=2, desired=Desired.CANCEL))
    ended = wait_for_end(successor, run)
    assert ended.exit is not None
    assert ended.exit.reason == "cancelled"
    wait_for(lambda: gone(everything))


def test_a_killed_supervisor_is_seen_as_lost_once_nothing_lives(folder: Path) -> None:
    run = new_run(folder)
    launcher = launcher_for("checkpoint=3,hang")
    launcher.start(Attempt(run, 1))
    everything = all_processes(run)
    wait_for(lambda: run.get("checkpoints/step-3-a1/COMPLETE"))
    processes.kill(everything[0])
    seen: list[Observation] = []
    while not seen or not isinstance(seen[-1], Ended):
        seen.append(launcher.observe(Attempt(run, 1)))
        assert isinstance(seen[-1], Running | Unknown | Ended)
    wait_for(lambda: gone(everything))
    assert seen[-1] == Ended(None, checkpoint_step=3)


@pytest.mark.parametrize("name", ["1-torchrun", "1-0", "1-1"])
def test_whatever_is_killed_nothing_is_left(folder: Path, name: str) -> None:
    run = new_run(folder)
    launcher = launcher_for("hang")
    launcher.start(Attempt(run, 1))
    everything = all_processes(run)
    processes.kill(process_of(run, name))
    ended = wait_for_end(launcher, run)
    assert ended.exit is not None
    assert ended.exit.reason == "worker_killed"
    wait_for(lambda: gone(everything))


def test_kill_leaves_no_process_and_says_why(folder: Path) -> None:
    run = new_run(folder)
    launcher = launcher_for("hang")
    launcher.start(Attempt(run, 1))
    everything = all_processes(run)
    launcher.kill(Attempt(run, 1), Reason.STALLED)
    wait_for(lambda: gone(everything))
    seen = launcher.observe(Attempt(run, 1))
    assert isinstance(seen, Ended)
    assert seen.exit is not None
    assert seen.exit.reason == "stalled"


def test_kill_spares_a_process_that_took_over_the_supervisors_id(folder: Path) -> None:
    run = new_run(folder)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with bystander:
        identity = processes.of(bystander.pid)
        earlier = identity.model_copy(update={"start_ticks": identity.start_ticks - 1})
        run.write("attempts/1/supervisor.json", earlier)
        assert launcher_for("hang").observe(Attempt(run, 1)) == Ended(None)
        launcher_for("hang").kill(Attempt(run, 1), Reason.STALLED)
        assert bystander.poll() is None


def test_an_attempt_that_was_given_up_before_its_start_cannot_be_started(folder: Path) -> None:
    run = new_run(folder)
    launcher = launcher_for("succeed")
    launcher.kill(Attempt(run, 1), Reason.USER_CANCELLED)
    launcher.start(Attempt(run, 1))
    seen = launcher.observe(Attempt(run, 1))
    assert isinstance(seen, Ended)
    assert seen.exit is not None
    assert seen.exit.reason == "cancelled"
    assert starts(run, 1) == 0


def test_a_failed_start_is_told_and_cannot_come_to_life_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(folder)
    launcher = launcher_for("succeed")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(LaunchError, match=r"\(exit code 1\)\.$"):
            launcher.start(Attempt(run, 1))
    launcher.start(Attempt(run, 1))
    assert starts(run, 1) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(folder / "none"))
        with pytest.raises(LaunchError, match="could not be started"):
            launcher.start(Attempt(new_run(folder, 2), 2))


def test_a_start_for_which_the_disk_has_no_room_holds_nothing_and_is_tried_again(
    folder: Path,
) -> None:
    run = new_run(folder)
    launcher = launcher_for("succeed")
    full = run.root / "attempts/1/logs"
    full.write_text("")  # a folder cannot be made there
    with pytest.raises(OSError, match="logs"):
        launcher.start(Attempt(run, 1))
    assert launcher.observe(Attempt(run, 1)) == Absent()
    full.unlink()
    launcher.start(Attempt(run, 1))
    assert wait_for_end(launcher, run).exit is not None


def test_silence_is_measured_on_our_clock_from_the_last_new_segment(folder: Path) -> None:
    run = new_run(folder)
    now = 100.0
    launcher = launcher_for("hang", clock=lambda: now)
    lock = try_lock(run.path("attempts/1/supervisor.lock"))
    assert lock is not None
    assert launcher.observe(Attempt(run, 1)) == Running(reported=False, silent_seconds=0.0)
    now = 130.0
    assert launcher.observe(Attempt(run, 1)) == Running(reported=False, silent_seconds=30.0)
    run.put("attempts/1/events/00000000.jsonl", b"")
    assert launcher.observe(Attempt(run, 1)) == Running(reported=True, silent_seconds=0.0)
    now = 135.0
    assert launcher.observe(Attempt(run, 1)) == Running(reported=True, silent_seconds=5.0)
    os.close(lock)


def test_while_a_rank_lives_the_end_is_not_known(folder: Path) -> None:
    run = new_run(folder)
    run.write("attempts/1/supervisor.json", dead_supervisor())
    holding = (
        "import sys; from ft_service.host.lifetime import *; hold_rank_lock(sys.argv[1]); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert isinstance(launcher_for("hang").observe(Attempt(run, 1)), Unknown)
        rank.kill()
    assert launcher_for("hang").observe(Attempt(run, 1)) == Ended(None)


def test_processes_of_another_container_are_told_by_their_locks(folder: Path) -> None:
    """A process id says nothing across namespaces; the lock does, since both see the same file of
    the same kernel.
    """
    run = new_run(folder)
    elsewhere = processes.of(os.getpid()).model_copy(update={"pid_namespace": 1})
    run.write("attempts/1/supervisor.json", elsewhere)
    lock = try_lock(run.path("attempts/1/supervisor.lock"))
    assert lock is not None
    assert isinstance(launcher_for("hang").observe(Attempt(run, 1)), Running)
    os.close(lock)
    assert launcher_for("hang").observe(Attempt(run, 1)) == Ended(None)


def test_a_result_counts_as_success_even_without_an_exit_record(folder: Path) -> None:
    run = new_run(folder)
    run.write("attempts/1/supervisor.json", dead_supervisor())
    run.write("result.json", RESULT)
    seen = launcher_for("hang").observe(Attempt(run, 1))
    assert isinstance(seen, Ended)
    assert seen.exit is not None
    assert seen.exit.reason == "succeeded"
    launcher_for("hang").kill(Attempt(run, 1), Reason.STALLED)
    assert run.read("attempts/1/exit.json", Exit) == seen.exit


def test_the_host_has_a_name_that_stays() -> None:
    assert host_id()
    assert launcher_for("hang").host == host_id()
    assert launcher_for("hang", host="gpu-7").host == "gpu-7"


def dead_supervisor() -> ProcessIdentity:
    return processes.of(os.getpid()).model_copy(update={"boot_id": "an earlier one"})
