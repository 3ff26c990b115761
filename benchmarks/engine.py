"""Small jobs on one engine against the same jobs one after the other, each with its own ranks.

    python benchmarks/engine.py [--jobs 8] [--steps 20]

A Llama of 119 million parameters, NF4, sharded over two ranks; jobs with r 4 to 32 and a sample of at most 32 tokens a rank
and step. The quantised base and the tokens of the data are in their caches, as a service has them. The clock starts with the
first supervisor and ends with the last result. Memory is the largest sum of PSS of all ranks. The losses of every job are
compared between both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start
from ft_service.rundir.engine import ENGINE, EngineSpec, SeatOrder, seat_key
from ft_service.rundir.events import read_segments
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, JobSpec, parse_request, resolve

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "examples/models/tiny-llama"
DATA = ROOT / "examples/data/train.jsonl"
RANKS = 2
POLL_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    result = machine()
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        base, parameters = save_base(Path(folder, "base"))
        specs = [spec_of(base, number, options.steps) for number in range(options.jobs)]
        supervise(
            prepared(specs[0], Path(folder, "first", specs[0].job_id))
        )  # so that neither has to quantise the base, or read it from disk
        engine_runs, engine = together(specs, Path(folder, "engine"))
        print("engine", engine, flush=True)
        alone_runs, alone = one_after_the_other(specs, Path(folder, "alone"))
        print("alone", alone, flush=True)
        equal = [losses(one) == losses(other) for one, other in zip(engine_runs, alone_runs, strict=True)]
    result |= {
        "parameters": parameters,
        "jobs": options.jobs,
        "steps": options.steps,
        "ranks": RANKS,
        "engine": engine,
        "alone": alone,
        "time_ratio": round(engine["seconds"] / alone["seconds"], 3),
        "memory_ratio_to_as_many_jobs_at_once": round(engine["pss_mb"] / (options.jobs * alone["pss_mb"]), 3),
        "jobs_with_equal_losses": sum(equal),
    }
    save("engine", result)


def save_base(folder: Path) -> tuple[Path, int]:
    """A base with random weights and the sample base's tokenizer, and its number of parameters."""
    sizes = {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 14}
    config = AutoConfig.from_pretrained(SAMPLE, **sizes, num_key_value_heads=14, head_dim=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in SAMPLE.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    return folder, sum(parameter.numel() for parameter in model.parameters())


def spec_of(base: Path, number: int, steps: int) -> JobSpec:
    training = {"max_steps": steps, "batch_size": RANKS, "max_length": 32, "learning_rate": 1e-3}
    body = {
        "model": "base",
        "training_file": "file",
        # Processors without products in bf16 emulate them, at a fifth of the speed.
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": (4, 8, 16, 32)[number % 4]},
        "training": {**training, "tokens_per_micro_batch": 2048},
        "distributed": {"nproc_per_node": RANKS, "replicate": 1, "activation_checkpointing": "none", "compile": False},
        "checkpoint": {"save_steps": steps},
    }
    context = JobContext(
        job_id=f"ftjob-{number}",
        organization="local",
        model=BaseModelRef(name="base", path=str(base)),
        training_data=DataFileRef(name=DATA.name, path=str(DATA), sha256=sha256_of(DATA)),
        validation_data=None,
        seed=number,
        gpus=0,
    )
    return resolve(parse_request(body), context)


def prepared(spec: JobSpec, folder: Path, engine: RunDir | None = None) -> RunDir:
    """A run directory with what the service writes before an attempt."""
    run = RunDir(folder)
    run.write("spec.json", spec)
    named = None if engine is None else str(engine.root)
    Attempt(run, 1).write_start(
        Start(job_id=spec.job_id, attempt=1, world_size=RANKS, generation=1, checkpoint=None, engine=named)
    )
    return run


def together(specs: Sequence[JobSpec], folder: Path) -> tuple[list[RunDir], dict[str, float]]:
    engine = RunDir(folder / "engine-1")
    limits: dict[str, Any] = {"most_seats": len(specs), "idle_seconds": 0.1}
    engine.write(ENGINE, EngineSpec(engine_id="engine-1", project_id="proj-1", spec=specs[0], **limits))
    Attempt(engine, 1).write_start(Start(job_id="engine-1", attempt=1, world_size=RANKS, generation=1, checkpoint=None))
    runs = [prepared(spec, folder / spec.job_id, engine) for spec in specs]
    for spec, run in zip(specs, runs, strict=True):
        order = SeatOrder(job_id=spec.job_id, attempt=1, run_dir=str(run.root))
        engine.write(seat_key(spec.job_id, 1), order)
    return runs, supervise(engine)


def one_after_the_other(specs: Sequence[JobSpec], folder: Path) -> tuple[list[RunDir], dict[str, float]]:
    runs = [prepared(spec, folder / spec.job_id) for spec in specs]
    figures = [supervise(run) for run in runs]
    seconds = round(sum(one["seconds"] for one in figures), 2)
    return runs, {"seconds": seconds, "pss_mb": max(one["pss_mb"] for one in figures)}


def supervise(run: RunDir) -> dict[str, float]:
    """Run an attempt to its end. Seconds, and the most memory that its ranks took together."""
    most, over = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(POLL_SECONDS):
            most = max(most, pss_of_ranks(run))

    follower = threading.Thread(target=look)
    follower.start()
    began = time.monotonic()
    command = [sys.executable, "-m", "ft_service.supervisor", str(run.root), "1"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "FT_CACHE": str(run.root.parent.parent / "cache"),
        "FT_TOKENS": str(run.root.parent.parent / "tokens"),
    }
    code = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=False).returncode
    seconds = time.monotonic() - began
    over.set()
    follower.join()
    ended = Attempt(run, 1).read_exit()
    assert ended is not None
    assert ended.reason in ("succeeded", "stopped"), f"{code}: {ended.message}"
    return {"seconds": round(seconds, 2), "pss_mb": round(most / 1e6, 1)}


def pss_of_ranks(run: RunDir) -> int:
    """Bytes of memory of the ranks of a run directory, shared pages divided among those that share them."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
            if str(run.root) in words and not {"ft_service.supervisor", "torch.distributed.run"} & set(words):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def losses(run: RunDir) -> str:
    """The losses of all steps, as text."""
    events = [event for segment in read_segments(run, 1) for event in segment.events if event.metrics is not None]
    return json.dumps([event.metrics.train_loss for event in events if event.metrics is not None])


if __name__ == "__main__":
    main()
