"""Jobs with real processes, any of which is killed at any moment: nothing runs twice, nothing is
left, nothing is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.control.jobs.reconciler import TOLD_LOSSES
from ft_service.host import processes
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.store.sql import Store
from tests.support.attempts import (
    all_processes,
    gone,
    process_of,
    scripted,
    starts,
    supervisor_of,
    wait_for,
)
from tests.support.reconciling import (
    PROJECT,
    add_job,
    get,
    messages,
    new_reconciler,
    new_store,
    step_until,
)

RECONCILE = Path(__file__).parents[3] / "support/programs/reconcile.py"


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = new_store(folder)
    yield store
    store.close()


@pytest.fixture
def run(folder: Path) -> RunDir:
    return RunDir(folder / "runs" / "ftjob-1")


def steps(folder: Path, store: Store, script: str):
    launcher = LocalLauncher(2, worker_command=scripted(script))
    return new_reconciler(folder, store, launcher)


def wait_while_stepping(reconciler, what):
    return wait_for(lambda: (reconciler.step() or True) and what())


def test_a_job_with_real_processes(folder: Path, store: Store, run: RunDir) -> None:
    add_job(store)
    job = step_until(steps(folder, store, "event,checkpoint=3,event,succeed"), store)
    assert (job.state, job.trained_tokens) == (State.SUCCEEDED, 100)
    assert [
        checkpoint.name for checkpoint in store.jobs.list_checkpoints(PROJECT, job.id).data
    ] == ["step-3-a1"]
    assert messages(store)[-4:] == [
        "step 1",
        "checkpoint step-3-a1",
        "step 3",
        "The job has succeeded.",
    ]
    assert starts(run, 1) == 1


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("supervisor", Reason.SUPERVISOR_LOST),
        ("1-torchrun", Reason.WORKER_KILLED),
        ("1-0", Reason.WORKER_KILLED),
        ("1-1", Reason.WORKER_KILLED),
    ],
)
def test_whatever_is_killed_the_next_attempt_goes_on_from_the_checkpoint(
    folder: Path, store: Store, run: RunDir, victim: str, reason: Reason
) -> None:
    add_job(store)
    reconciler = steps(folder, store, "checkpoint=3,hang/checkpoint=4,succeed")
    wait_while_stepping(
        reconciler, lambda: run.get("pids/1-1") and run.get("checkpoints/step-3-a1/COMPLETE")
    )
    everything = all_processes(run)
    processes.kill(supervisor_of(run) if victim == "supervisor" else process_of(run, victim))
    job = step_until(reconciler, store)
    assert (job.state, job.attempt) == (State.SUCCEEDED, 2)
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint == "step-3-a1"
    assert (starts(run, 1), starts(run, 2)) == (1, 1)
    assert any(reason.text in message for message in messages(store))
    wait_for(lambda: gone(everything))


def test_a_killed_service_finds_its_attempt_again(folder: Path, store: Store, run: RunDir) -> None:
    add_job(store)
    command = [sys.executable, str(RECONCILE), str(folder), "event,checkpoint=3,wait"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment) as service:
        wait_for(lambda: run.get("pids/1-1"))
        everything = all_processes(run)
        service.kill()
    assert not gone(everything)
    reconciler = steps(folder, store, "never")

    def adopted() -> Job | None:
        job = get(store)
        return job if job.phase is Phase.TRAINING else None

    wait_while_stepping(reconciler, adopted)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    job = step_until(reconciler, store, State.PAUSED)
    assert (job.attempt, starts(run, 1), run.get("attempts/2/start.json")) == (1, 1, None)
    assert messages(store).count("step 1") == 1
    wait_for(lambda: gone(everything))


def test_two_services_of_one_host_start_one_attempt(
    folder: Path, store: Store, run: RunDir
) -> None:
    add_job(store)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(RECONCILE), str(folder), "event,succeed"]
    pair = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        wait_for(lambda: get(store).state is State.SUCCEEDED)
    finally:
        for service in pair:
            service.kill()
            service.wait()
    assert (starts(run, 1), run.get("attempts/2/start.json")) == (1, None)
    assert messages(store).count("step 1") == 1


def test_cancel_leaves_no_process(folder: Path, store: Store, run: RunDir) -> None:
    add_job(store)
    reconciler = steps(folder, store, "hang")
    wait_while_stepping(reconciler, lambda: run.get("pids/1-0") and run.get("pids/1-1"))
    everything = all_processes(run)
    assert store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL).state is State.CANCELLED
    step_until(reconciler, store, State.CANCELLED)
    wait_for(lambda: gone(everything))
    assert store.leases.free_slots(LocalLauncher(2).host, 2) == [0, 1]


def test_pause_and_resume(folder: Path, store: Store, run: RunDir) -> None:
    add_job(store)
    reconciler = steps(folder, store, "checkpoint=3,wait/succeed")
    wait_while_stepping(reconciler, lambda: run.get("checkpoints/step-3-a1/COMPLETE"))
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    job = step_until(reconciler, store, State.PAUSED)
    assert job.failures == 0
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME)
    assert step_until(reconciler, store).state is State.SUCCEEDED
    start = run.read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint == "step-3-a1"


def test_a_job_that_keeps_failing_is_given_up_with_its_error(folder: Path, store: Store) -> None:
    add_job(store)
    job = step_until(steps(folder, store, "fail"), store)
    assert (job.state, job.attempt, job.reason) == (
        State.FAILED,
        decisions.MAX_FAILURES,
        Reason.WORKER_ERROR,
    )
    assert job.error is not None
    assert "ValueError: the loss is not a number" in job.error["message"]


def test_a_supervisor_that_is_killed_while_it_starts_costs_time_alone(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_job(store)
    reconciler = steps(folder, store, "event,succeed")
    killed = folder / "killed"
    killed.write_text(f'#!/bin/sh\nkill -KILL $$ & exec {sys.executable} "$@"\n')
    killed.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(killed))
        wait_while_stepping(reconciler, lambda: get(store).losses > decisions.MAX_FAILURES)
    job = get(store)
    assert (job.failures, job.reason) == (0, Reason.LAUNCH_FAILED)
    assert any("SIGKILL" in message for message in messages(store))
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == job.losses - TOLD_LOSSES + 1, (
        "the operator is told, though not of the first ones"
    )
    assert step_until(reconciler, store).state is State.SUCCEEDED


def test_kills_before_the_first_checkpoint_end_no_job(
    folder: Path, store: Store, run: RunDir
) -> None:
    add_job(store)
    victims = ["supervisor", "torchrun", "0", "1"]
    assert len(victims) > decisions.MAX_FAILURES
    reconciler = steps(folder, store, "/".join(["event,hang"] * len(victims) + ["event,succeed"]))
    for attempt, victim in enumerate(victims, 1):
        wait_while_stepping(reconciler, lambda: run.get(f"pids/{attempt}-1"))  # noqa: B023
        everything = all_processes(run, attempt)
        name = f"{attempt}-{victim}"
        processes.kill(
            supervisor_of(run, attempt) if victim == "supervisor" else process_of(run, name)
        )
        wait_while_stepping(reconciler, lambda: gone(everything))  # noqa: B023
    job = step_until(reconciler, store)
    assert (job.state, job.failures, job.losses) == (State.SUCCEEDED, 0, len(victims))


def test_a_job_that_crashes_again_and_again_is_given_up(folder: Path, store: Store) -> None:
    add_job(store)
    job = step_until(steps(folder, store, "event,crash"), store)
    assert (job.state, job.attempt, job.reason) == (
        State.FAILED,
        decisions.MAX_FAILURES,
        Reason.WORKER_KILLED,
    )
    assert job.error is not None
    assert job.error["code"] == "worker_crashed"
