"""Seconds from submitting a job to its first optimizer step, against bare `torchrun` on the same
spec; and to its cancellation.

    python benchmarks/first_step.py [--repeats 5]

The sample base in NF4 on two ranks. The clock starts with the request, or with torchrun's command,
and ends when the first step was done, by the worker's own clock on the same machine. Contenders
take turns: torchrun on a prepared run directory, and the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from ft_service.client.client import Client
from ft_service.client.connection import find_connection
from ft_service.client.responses import RemoteJob
from ft_service.host.lifetime import RANKS_LOCK, is_locked
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start
from ft_service.rundir.events import read_segments
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, parse_request, resolve
from ft_service.store.sql import open_store
from ft_service.supervisor import torchrun
from ft_service.supervisor.torchrun import Node

ROOT = Path(__file__).parent.parent
BASE = ROOT / "examples/models/tiny-llama"
DATA = ROOT / "examples/data/train.jsonl"
SECONDS = 300.0
SETTLED_SECONDS = 5.0
"""After a server's start, before its first job: what reads data files is loaded by then, as it is
on any server in use.
"""
Found = TypeVar("Found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result = machine()
    runs: dict[str, list[dict[str, float]]] = {"torchrun": [], "server": []}
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        for repeat in range(options.repeats):
            runs["torchrun"].append(bare_torchrun(Path(folder, f"bare-{repeat}")))
            with serving(Path(folder, f"server-{repeat}")) as home:
                time.sleep(SETTLED_SECONDS)
                runs["server"].append(served(home))
            print({name: of_contender[-1] for name, of_contender in runs.items()}, flush=True)
    result["median"] = {
        name: {
            key: round(statistics.median(run[key] for run in of_contender), 3)
            for key in of_contender[0]
        }
        for name, of_contender in runs.items()
    }
    base = result["median"]["torchrun"]["first_step_seconds"]
    result["later_than_torchrun"] = round(
        result["median"]["server"]["first_step_seconds"] - base, 3
    )
    result["runs"] = runs
    print(result["median"], result["later_than_torchrun"], flush=True)
    save("first_step", result)


def options_of_the_job() -> dict[str, Any]:
    return {
        "precision": {"default": "nf4"},
        "lora": {"r": 16},
        "training": {"max_steps": 100_000, "batch_size": 8},
        "distributed": {"nproc_per_node": 2},
        "seed": 7,
    }


def bare_torchrun(folder: Path) -> dict[str, float]:
    """On a run directory that is ready, with the command and the environment that a supervisor
    uses.
    """
    run = RunDir(folder)
    data = DataFileRef(name=DATA.name, path=str(DATA), sha256=sha256_of(DATA))
    spec = resolve(
        parse_request({"model": "tiny-llama", "training_file": "file", **options_of_the_job()}),
        JobContext(
            job_id="ftjob-bare",
            organization="local",
            model=BaseModelRef(name="tiny-llama", path=str(BASE)),
            training_data=data,
            validation_data=None,
            seed=7,
            gpus=0,
        ),
    )
    start = Start(job_id=spec.job_id, attempt=1, world_size=2, generation=1, checkpoint=None)
    run.write("spec.json", spec)
    Attempt(run, 1).write_start(start)
    logs = Attempt(run, 1).node().logs
    logs.mkdir()
    environment = torchrun.environment({**os.environ, **surroundings(folder)}, start, run, Node())
    del environment["FT_SUPERVISOR_PID"]  # torchrun's parent is this process
    began = time.time()
    with (logs / "torchrun.log").open("wb") as log:
        command = [*torchrun.command(start, run, Node()), str(run.root), "1"]
        process = subprocess.Popen(command, env=environment, cwd=run.root, stdout=log, stderr=log)
    try:
        return {"first_step_seconds": first_step_at(run) - began}
    finally:
        process.kill()
        process.wait()
        until(lambda: not is_locked(run.path(RANKS_LOCK)))


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Path]:
    home.mkdir()
    environment = {**os.environ, **surroundings(home), "FT_PORT": "0", "FT_SLOTS": "2"}
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ft_service.cli", "serve"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        until((home / "server.json").exists)
        yield home
    finally:
        process.terminate()
        process.wait()


def served(home: Path) -> dict[str, float]:
    with Client(find_connection({}, home)) as client:
        file_id = client.upload_file(DATA).id
        began = time.time()
        job = client.create_job(
            {"model": "tiny-llama", "training_file": file_id, **options_of_the_job()}
        )
        run = RunDir(home / "runs" / job.id)
        seconds = first_step_at(run) - began
        spawned = run.path(Attempt(run, 1).keys.start).stat().st_mtime - queued_at(home, job)
        began = time.time()
        client.cancel(job.id)
        until(lambda: client.job(job.id).phase is None)
        cancelled = time.time() - began
    return {
        "first_step_seconds": seconds,
        "queued_to_start_seconds": spawned,
        "cancel_seconds": cancelled,
    }


def queued_at(home: Path, job: RemoteJob) -> float:
    store = open_store(f"sqlite:///{home / 'ft.db'}")
    try:
        return store.jobs.get_job("default", job.id).queued_at or 0.0
    finally:
        store.close()


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of every contender; each has a cache of its own, so that all of them quantise
    the base.
    """
    return {
        "FT_HOME": str(folder),
        "FT_CACHE": str(folder / "cache"),
        "FT_MODELS": str(BASE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }


def first_step_at(run: RunDir) -> float:
    """When the first optimizer step was done, seconds since the epoch."""

    def look() -> float | None:
        events = [event for segment in read_segments(run, 1) for event in segment.events]
        return next((event.time for event in events if event.kind == "metrics"), None)

    return until(look)


def until(what: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"did not happen within {SECONDS:g} seconds")


if __name__ == "__main__":
    main()
