"""A sweep of twelve jobs with halving: all of them in an engine against each on ranks of its own.

    python benchmarks/sweep.py [--steps 60]

The sample base in NF4 on the two slots of a server, four learning rates by three ranks of adapters,
halved after a quarter and a half of the steps. The clock starts with the request and ends when the
sweep is over. Each server has a home and a cache of its own. The losses and the adapter of the job
that is best with engines are compared with those of the same job without.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from ft_service.client.client import Client
from ft_service.client.connection import find_connection
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.events import read_segments

ROOT = Path(__file__).parent.parent
BASE = ROOT / "examples/models/tiny-llama"
DATA = ROOT / "examples/data"
RATES = (3e-4, 1e-3, 4e-3, 1e-2)
RANKS = (4, 8, 16)
SECONDS = 3_000.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    result = machine() | {"jobs": len(RATES) * len(RANKS), "steps": options.steps}
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        found: dict[str, dict[str, Any]] = {}
        for name, seats in (("alone", 0), ("engine", 8)):
            home = Path(folder, name)
            with serving(home, seats) as client:
                found[name] = sweep(client, home, options.steps)
            print(name, found[name]["seconds"], found[name]["best"], flush=True)
        values = found["engine"]["best"]
        runs = [RunDir(Path(folder, name, "runs", found[name]["ids"][values])) for name in found]
        same = losses(runs[0]) == losses(runs[1]) and adapter(runs[0]) == adapter(runs[1])
    result |= {
        name: {"seconds": one["seconds"], "best": one["best"], "steps": one["steps"]}
        for name, one in found.items()
    }
    result["time_ratio"] = round(found["engine"]["seconds"] / found["alone"]["seconds"], 3)
    result["best_job_is_the_same_to_the_bit"] = same
    save("sweep", result)


def sweep(client: Client, home: Path, steps: int) -> dict[str, Any]:
    """Seconds of the sweep, the values of its best job, the steps that its jobs made, and the id of
    each job by its values.
    """
    train, valid = (
        client.upload_file(DATA / name).id for name in ("train.jsonl", "validation.jsonl")
    )
    body = {
        "model": BASE.name,
        "training_file": train,
        "validation_file": valid,
        "seed": 7,
        "precision": {"default": "nf4"},
        "training": {"max_steps": steps, "batch_size": 8, "eval_steps": steps // 4},
        "distributed": {"nproc_per_node": 2, "replicate": 1},
        "checkpoint": {"save_steps": steps // 2},
        "sweep": {
            "training.learning_rate": list(RATES),
            "lora.r": list(RANKS),
            "halving": {"eta": 2, "min_share": 0.25},
        },
    }
    began = time.monotonic()
    made = client.create_sweep(body)
    while not (made := client.sweep(made.id)).over:
        assert time.monotonic() < began + SECONDS, made
        time.sleep(0.2)
    seconds = time.monotonic() - began
    assert made.best is not None, made
    return {
        "seconds": round(seconds, 1),
        "best": name_of(made.best["values"]),
        "steps": sum(job["step"] for job in made.jobs),
        "ids": {name_of(job["values"]): job["id"] for job in made.jobs},
    }


def name_of(values: dict[str, Any]) -> str:
    return ", ".join(f"{option} {value:g}" for option, value in sorted(values.items()))


@contextlib.contextmanager
def serving(home: Path, engine_jobs: int) -> Iterator[Client]:
    home.mkdir()
    environment = {
        **os.environ,
        "FT_HOME": str(home),
        "FT_CACHE": str(home / "cache"),
        "FT_MODELS": str(BASE.parent),
        "FT_PORT": "0",
        "FT_SLOTS": "2",
        "FT_ENGINE_JOBS": str(engine_jobs),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ft_service.cli", "serve"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while not (home / "server.json").exists():
            assert process.poll() is None, "the server has ended"
            time.sleep(0.05)
        with Client(find_connection({}, home)) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def losses(run: RunDir) -> list[float | None]:
    """Training losses, in the order of the steps, over all attempts."""
    attempts = sorted(
        int(path.name) for path in run.path("attempts").iterdir() if path.name.isdigit()
    )
    events = [
        event
        for number in attempts
        for segment in read_segments(run, number)
        for event in segment.events
    ]
    by_step = {
        event.metrics.step: event.metrics.train_loss
        for event in events
        if event.metrics is not None
    }
    assert all(Attempt(run, number).has_exit() for number in attempts)
    return [by_step[step] for step in sorted(by_step)]


def adapter(run: RunDir) -> bytes:
    return run.path("adapter/adapter_model.safetensors").read_bytes()


if __name__ == "__main__":
    main()
