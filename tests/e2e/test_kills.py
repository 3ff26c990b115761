"""SIGKILL, each alone, in the middle of training: the job goes on by itself and succeeds, and no rank outlives its attempt."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ft_service.rundir import RunDir, Start, complete_checkpoints, last_attempt
from tests.e2e.service import Server, eventually, nothing_left, processes_of, submit, wait_until, wait_until_step

STEPS = 60


def attempts_alive(run: RunDir) -> set[str]:
    """Attempt numbers that living ranks were started for: the last word of their command line."""
    found = set()
    for pid in processes_of(run)["rank"]:
        try:
            found.add(Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").rsplit("\0", 1)[-1])
        except FileNotFoundError:
            continue
    return found


def kill_one(run: RunDir, kind: str) -> None:
    os.kill(processes_of(run)[kind][0], signal.SIGKILL)


def test_whoever_is_killed_the_job_resumes_from_its_last_checkpoint_and_succeeds(server: Server, data: Path) -> None:
    client = server.client()
    job = submit(client, data, steps=STEPS)
    run = server.run(job.id)
    for attempt, kind in enumerate(["rank", "torchrun", "supervisor"], start=1):
        eventually(lambda attempt=attempt: any(name.endswith(f"-a{attempt}") for name in complete_checkpoints(run)))
        kill_one(run, kind)
        eventually(lambda attempt=attempt: last_attempt(run) > attempt)
        assert str(attempt) not in attempts_alive(run), f"a rank outlived attempt {attempt}, whose {kind} was killed"
        start = run.read(f"attempts/{attempt + 1}/start.json", Start)
        assert start is not None
        assert start.checkpoint is not None, "the next attempt resumes"
        assert start.checkpoint.endswith(f"-a{attempt}"), "from a checkpoint of the one that was killed"

    done: Any = wait_until(client, job.id, "succeeded")
    assert done.attempt == 4, "one attempt more for each kill, and no other"
    steps = [e.data["step"] for e in client.fine_tuning.jobs.list_events(job.id) if e.type == "metrics"]  # pyright: ignore
    assert set(steps) == set(range(1, STEPS + 1))
    eventually(lambda: nothing_left(run))


def test_a_killed_server_leaves_training_alone_and_the_next_one_takes_it_up(server: Server, data: Path) -> None:
    client = server.client()
    job = submit(client, data, steps=STEPS)
    run = server.run(job.id)
    step = wait_until_step(client, job.id, 2)
    before = processes_of(run)
    server.kill()
    eventually(lambda: any(int(name.split("-")[1]) > step for name in complete_checkpoints(run)))
    assert processes_of(run) == before, "training went on without the server"

    server.start()
    done: Any = wait_until(server.client(), job.id, "succeeded")
    assert done.attempt == 1, "taken up, not started again"
    steps = [e.data["step"] for e in server.client().fine_tuning.jobs.list_events(job.id) if e.type == "metrics"]  # pyright: ignore
    assert sorted(steps) == list(range(1, STEPS + 1)), "what was reported meanwhile is there, once"
    eventually(lambda: nothing_left(run))
