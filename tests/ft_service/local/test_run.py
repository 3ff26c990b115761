from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ft_service.errors import ConflictError, SpecError
from ft_service.host.lifetime import try_lock
from ft_service.local.run import STOPPING, run_local
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, Start
from ft_service.rundir.events import Event
from ft_service.spec import DistributedOptions, JobSpec, TrainingOptions
from ft_service.supervisor.command_line import SupervisorOptions
from tests.support.attempts import all_processes, gone, scripted, starts, wait_for
from tests.support.reconciling import spec_of

RUN_LOCAL = """
import sys
from pathlib import Path
from ft_service.local.run import STOPPING, run_local
from ft_service.spec import JobSpec
from ft_service.supervisor.command_line import SupervisorOptions
from tests.support.attempts import scripted
options = SupervisorOptions(grace_seconds=60, worker_command=scripted(sys.argv[2]))
spec = JobSpec.model_validate_json(sys.argv[3])
sys.exit(run_local(spec, Path(sys.argv[1]), lambda event: None, options=options).code)
"""


def supervisor(script: str) -> SupervisorOptions:
    return SupervisorOptions(grace_seconds=60, worker_command=scripted(script))


def local(
    folder: Path,
    script: str,
    events: list[Event] | None = None,
    spec: JobSpec | None = None,
    **options,
) -> Exit:
    on_event = (events if events is not None else []).append
    return run_local(spec or spec_of("j"), folder, on_event, options=supervisor(script), **options)


def foreground(folder: Path, script: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }
    command = [sys.executable, "-c", RUN_LOCAL, str(folder), script, spec_of("j").model_dump_json()]
    return subprocess.Popen(command, env=environment)


def test_a_run_and_every_event_of_it(folder: Path) -> None:
    events: list[Event] = []
    assert local(folder, "event,checkpoint=3,event,succeed", events).code == 0
    assert [event.message for event in events] == ["step 1", "checkpoint step-3-a1", "step 3"]
    assert RunDir(folder).read("spec.json", JobSpec) == spec_of("j")


def test_a_run_that_is_done_is_not_trained_again(folder: Path) -> None:
    local(folder, "succeed")
    found = local(folder, "fail")
    assert found.code == 0
    assert "is done already: attempt 1" in found.message
    assert starts(RunDir(folder), 2) == 0


def test_a_stopped_run_goes_on_from_its_checkpoint_on_another_number_of_ranks(folder: Path) -> None:
    stop = threading.Event()
    found = run_local(
        spec_of("j"),
        folder,
        lambda event: stop.set(),
        stop,
        options=supervisor("checkpoint=3,wait"),
    )
    assert (found.code, found.message) == (75, "Training has stopped at checkpoint step-3-a1.")
    others = DistributedOptions(nproc_per_node=4, activation_checkpointing="full", compile=True)
    budget = TrainingOptions(tokens_per_micro_batch=4096)
    more = spec_of(
        "drawn-anew", distributed=others, training=budget, chosen={"distributed.compile": "it pays"}
    )
    assert local(folder, "succeed", spec=more).code == 0
    start = RunDir(folder).read("attempts/2/start.json", Start)
    assert start is not None
    assert (start.checkpoint, start.world_size) == ("step-3-a1", 4)


def test_a_stop_that_comes_before_everything_else_is_a_stop_too(folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    events: list[Event] = []
    assert local(folder, "wait", events, stop=stop).code == 75
    assert [event.message for event in events].count(STOPPING[1]) == 1


def test_a_failure_is_told(folder: Path) -> None:
    found = local(folder, "fail")
    assert (found.code, found.message) == (1, "Rank 0 failed: ValueError: the loss is not a number")
    assert local(folder, "refuse").code == 64


def test_another_spec_is_refused_by_name(folder: Path) -> None:
    local(folder, "succeed")
    with pytest.raises(
        SpecError, match=r"another spec, which differs in seed, training\.max_steps\."
    ):
        local(folder, "succeed", spec=spec_of("j", seed=2, training=TrainingOptions(max_steps=3)))


def test_a_directory_in_use_is_refused(folder: Path) -> None:
    local(folder, "fail")
    lock = try_lock(folder / "attempts/1/supervisor.lock")
    assert lock is not None
    with pytest.raises(ConflictError, match="Attempt 1 is running"):
        local(folder, "succeed")
    os.close(lock)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_stops_at_a_checkpoint(folder: Path, number: int) -> None:
    with foreground(folder, "checkpoint=3,wait") as process:
        everything = all_processes(RunDir(folder))
        process.send_signal(number)
        assert process.wait() == 75
    wait_for(lambda: gone(everything))


def test_a_second_interrupt_kills(folder: Path) -> None:
    run = RunDir(folder)
    with foreground(folder, "hang") as process:
        everything = all_processes(run)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: run.get("attempts/1/stop.json"))
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
    found = run.read("attempts/1/exit.json", Exit)
    assert found is not None
    assert found.reason == "cancelled"
    wait_for(lambda: gone(everything))


def test_a_killed_command_takes_its_attempt_to_a_checkpoint_and_leaves_nothing(
    folder: Path,
) -> None:
    run = RunDir(folder)
    with foreground(folder, "checkpoint=3,wait") as process:
        everything = all_processes(run)
        process.kill()
    found = wait_for(lambda: run.read("attempts/1/exit.json", Exit))
    assert found.reason == "stopped"
    wait_for(lambda: gone(everything))


def test_a_killed_supervisor_is_told_and_the_next_run_goes_on(folder: Path) -> None:
    run = RunDir(folder)
    with foreground(folder, "checkpoint=3,hang") as process:
        everything = all_processes(run)
        wait_for(lambda: run.get("checkpoints/step-3-a1/COMPLETE"))
        os.kill(everything[0].pid, signal.SIGKILL)
        assert process.wait() == 1
    wait_for(lambda: gone(everything))
    assert local(folder, "succeed").code == 0
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint == "step-3-a1"


def test_an_error_in_the_callback_does_not_leave_training_behind(folder: Path) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        run_local(spec_of("j"), folder, broken, options=supervisor("event,wait"))
    run = RunDir(folder)
    found = run.read("attempts/1/exit.json", Exit)
    assert found is not None
    assert found.reason == "stopped"
