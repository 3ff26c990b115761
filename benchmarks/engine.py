"""Jobs on one engine against the same jobs one after the other: each with ranks of its own, and on
an engine that is there.

    python benchmarks/engine.py [--jobs 8] [--steps 20] [--repeats 3]

A Llama of 119 million parameters, NF4, sharded over two ranks; jobs with r 4 to 32 and a sample of
at most 32 tokens a rank and step. The quantised base and the tokens of the data are in their
caches, as a service has them. Each repeat runs all ways; ratios are of one repeat, and their median
counts, since other programs may use the machine.

    engine    all at once; the clock starts with the supervisor and ends with the last result
    cold      one after the other, each with its supervisor and ranks
    warm      one after the other in one engine, which has trained another job before the clock
              starts
    together  all at once in such an engine
    long      two jobs of rows of LONG tokens in an engine that has trained before: at once, and one
              after the other

Memory is the largest sum of PSS of all ranks. `planned_…` is what `ft plan` says of the same jobs
on this host, starts of ranks included, and its ratio to what was measured: below 1 it promised too
much. `seconds_to_first_step`: from a job's order to the end of its first step, in an engine that
waits. The losses of every job are compared between engine and cold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from ft_service.data.examiner import Examiner
from ft_service.plan.job import plan_job
from ft_service.plan.machines import host_cpu
from ft_service.plan.seat import engine_seconds, lanes_of, seconds_alone
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start
from ft_service.rundir.engine import ENGINE, SeatOrder, seat_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.events import Event, read_segments
from ft_service.spec import BaseModelRef, DataFileRef, JobContext, JobSpec, parse_request, resolve
from workers.data.token_sets import tokenise
from workers.describe import describe

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "examples/models/tiny-llama"
DATA = ROOT / "examples/data/train.jsonl"
RANKS = 2
POLL_SECONDS = 0.5
LONG = 512
LONG_STEPS = 4
"""Tokens of the long rows, and steps of the jobs that train on them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    result = machine() | {
        "jobs": options.jobs,
        "steps": options.steps,
        "ranks": RANKS,
        "repeats": options.repeats,
    }
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        base, result["parameters"] = save_base(Path(folder, "base"))
        specs = [spec_of(base, number, options.steps) for number in range(options.jobs)]
        long_rows = save_long_rows(Path(folder, "long.jsonl"))
        long_specs = [
            spec_of(base, 100 + number, LONG_STEPS, long_rows, LONG) for number in range(2)
        ]
        with closing(Examiner(tokens=Path(folder, "tokens"))) as examiner:
            for spec in (specs[0], long_specs[0]):
                tokenise(spec, spec.data_files[0], examiner)
        # Nobody has to quantise the base later.
        supervise(prepared(specs[0], Path(folder, "first", specs[0].job_id)))
        result |= planned(specs)
        rows = []
        for number in range(options.repeats):
            rows.append(repeated(specs, long_specs, Path(folder), number))
            print(json.dumps(rows[-1]), flush=True)
    for name in rows[0]:
        of_repeats = [row[name] for row in rows]
        result[name] = round(statistics.median(of_repeats), 3)
        result[f"{name}_of_repeats"] = of_repeats
    for way in ("engine", "cold"):
        result[f"planned_ratio_of_{way}"] = round(
            result[f"planned_{way}_seconds"] / result[f"{way}_seconds"], 3
        )
    save("engine", result)


def planned(specs: Sequence[JobSpec]) -> dict[str, float]:
    """Seconds of the jobs in one engine, and one after the other, as the planner estimates them."""
    plans = [plan_job(describe(spec.model.path), spec, host_cpu()) for spec in specs]
    steps = [spec.training.max_steps or 0 for spec in specs]
    trainings = [
        (plan.speed, n * plan.speed.step_seconds)
        for plan, n in zip(plans, steps, strict=True)
        if plan.speed is not None
    ]
    lanes = lanes_of([plan.seat for plan in plans], plans[0].batches.tokens, specs[0])
    cold = sum(seconds_alone(seconds) for _, seconds in trainings)
    return {
        "planned_engine_seconds": round(engine_seconds(trainings, lanes), 2),
        "planned_cold_seconds": round(cold, 2),
    }


def repeated(
    specs: Sequence[JobSpec], long_specs: Sequence[JobSpec], folder: Path, number: int
) -> dict[str, float]:
    """Figures of all ways, once."""
    engine_runs, engine = together(specs, folder / f"engine-{number}")
    cold_runs, cold = one_after_the_other(specs, folder / f"cold-{number}")
    warm, first_step = in_waiting_engine(specs, folder / f"warm-{number}", at_once=False)
    all_at_once, _ = in_waiting_engine(specs, folder / f"together-{number}", at_once=True)
    at_once, _ = in_waiting_engine(long_specs, folder / f"long-{number}", at_once=True)
    in_turn, _ = in_waiting_engine(long_specs, folder / f"turns-{number}", at_once=False)
    equal = [
        losses(one) == losses(other) for one, other in zip(engine_runs, cold_runs, strict=True)
    ]
    return {
        "engine_seconds": engine["seconds"],
        "cold_seconds": cold["seconds"],
        "warm_seconds": warm,
        "together_seconds": all_at_once,
        "ratio_to_cold": round(engine["seconds"] / cold["seconds"], 3),
        "ratio_to_warm": round(all_at_once / warm, 3),
        "engine_pss_mb": engine["pss_mb"],
        "memory_ratio_to_as_many_jobs_at_once": round(
            engine["pss_mb"] / (len(specs) * cold["pss_mb"]), 3
        ),
        "seconds_to_first_step": first_step,
        "long_at_once_seconds": at_once,
        "long_in_turn_seconds": in_turn,
        "speed_of_long_rows_at_once": round(in_turn / at_once, 3),
        "jobs_with_equal_losses": sum(equal),
    }


def save_base(folder: Path) -> tuple[Path, int]:
    """A base with random weights and the sample base's tokenizer, and its number of parameters."""
    sizes = {
        "hidden_size": 896,
        "intermediate_size": 2432,
        "num_hidden_layers": 12,
        "num_attention_heads": 14,
    }
    config = AutoConfig.from_pretrained(SAMPLE, **sizes, num_key_value_heads=14, head_dim=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in SAMPLE.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    return folder, sum(parameter.numel() for parameter in model.parameters())


def save_long_rows(path: Path) -> Path:
    """Samples of more than LONG tokens."""
    words = " ".join(f"{number} is followed by {number + 1}." for number in range(LONG))
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i}."},
                {"role": "assistant", "content": words},
            ]
        }
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def spec_of(base: Path, number: int, steps: int, data: Path = DATA, length: int = 32) -> JobSpec:
    training = {
        "max_steps": steps,
        "batch_size": RANKS,
        "max_length": length,
        "learning_rate": 1e-3,
    }
    body = {
        "model": "base",
        "training_file": "file",
        # Processors without products in bf16 emulate them, at a fifth of the speed.
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": (4, 8, 16, 32)[number % 4]},
        "training": {**training, "tokens_per_micro_batch": 2048},
        "distributed": {
            "nproc_per_node": RANKS,
            "replicate": 1,
            "activation_checkpointing": "none",
            "compile": False,
        },
        "checkpoint": {"save_steps": steps},
    }
    context = JobContext(
        job_id=f"ftjob-{number}",
        organization="local",
        model=BaseModelRef(name="base", path=str(base)),
        training_data=DataFileRef(name=data.name, path=str(data), sha256=sha256_of(data)),
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
        Start(
            job_id=spec.job_id,
            attempt=1,
            world_size=RANKS,
            generation=1,
            checkpoint=None,
            engine=named,
        )
    )
    return run


def together(specs: Sequence[JobSpec], folder: Path) -> tuple[list[RunDir], dict[str, float]]:
    engine = new_engine(folder, specs[0], seats=len(specs), idle_seconds=0.1)
    runs = [ordered(spec, folder, engine) for spec in specs]
    return runs, supervise(engine)


def new_engine(folder: Path, spec: JobSpec, *, seats: int, idle_seconds: float) -> RunDir:
    engine = RunDir(folder / "engine-1")
    limits: dict[str, Any] = {"most_seats": seats, "idle_seconds": idle_seconds}
    engine.write(ENGINE, EngineSpec(engine_id="engine-1", project_id="proj-1", spec=spec, **limits))
    Attempt(engine, 1).write_start(
        Start(job_id="engine-1", attempt=1, world_size=RANKS, generation=1, checkpoint=None)
    )
    return engine


def ordered(spec: JobSpec, folder: Path, engine: RunDir) -> RunDir:
    """The run directory of a job that the engine is ordered to train."""
    run = prepared(spec, folder / spec.job_id, engine)
    engine.write(
        seat_key(spec.job_id, 1), SeatOrder(job_id=spec.job_id, attempt=1, run_dir=str(run.root))
    )
    return run


def in_waiting_engine(
    specs: Sequence[JobSpec], folder: Path, *, at_once: bool
) -> tuple[float, float]:
    """Seconds of the jobs in an engine that waits for them, at once or one after the other, and the
    median of the seconds from an order to the end of the job's first step.
    """
    engine = new_engine(folder, specs[0], seats=len(specs), idle_seconds=3.0)
    first = specs[0].model_copy(update={"job_id": "ftjob-first"})
    before = ordered(
        first.model_copy(update={"training": first.training.model_copy(update={"max_steps": 1})}),
        folder,
        engine,
    )
    follower = threading.Thread(target=supervise, args=(engine,))
    follower.start()
    wait_for_end(before)
    began = time.monotonic()
    to_first_step = []
    runs = []
    for spec in specs:
        at = time.time()
        runs.append(ordered(spec, folder, engine))
        if not at_once:
            wait_for_end(runs[-1])
            to_first_step.append(metrics_of(runs[-1])[0].time - at)
    for run in runs:
        wait_for_end(run)
    seconds = time.monotonic() - began
    follower.join()
    return round(seconds, 2), round(statistics.median(to_first_step or [0.0]), 2)


def wait_for_end(run: RunDir) -> None:
    while (ended := Attempt(run, 1).read_exit()) is None:
        time.sleep(0.02)
    assert ended.reason == "succeeded", ended.message


def one_after_the_other(
    specs: Sequence[JobSpec], folder: Path
) -> tuple[list[RunDir], dict[str, float]]:
    runs = [prepared(spec, folder / spec.job_id) for spec in specs]
    figures = [supervise(run) for run in runs]
    seconds = round(sum(one["seconds"] for one in figures), 2)
    return runs, {"seconds": seconds, "pss_mb": max(one["pss_mb"] for one in figures)}


def supervise(run: RunDir) -> dict[str, float]:
    """Run an attempt to its end. Seconds, and the most memory that its ranks took together."""
    most = 0
    over = threading.Event()

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
    code = subprocess.run(
        command, env=environment, stderr=subprocess.DEVNULL, check=False
    ).returncode
    seconds = time.monotonic() - began
    over.set()
    follower.join()
    ended = Attempt(run, 1).read_exit()
    assert ended is not None
    assert ended.reason in ("succeeded", "stopped"), f"{code}: {ended.message}"
    return {"seconds": round(seconds, 2), "pss_mb": round(most / 1e6, 1)}


def pss_of_ranks(run: RunDir) -> int:
    """Bytes of memory of the ranks of a run directory, shared pages divided among those that share
    them.
    """
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            words = (
                (entry / "cmdline").read_bytes().decode().split("\0")
                if entry.name.isdigit()
                else []
            )
            if str(run.root) in words and not {
                "ft_service.supervisor",
                "torch.distributed.run",
            } & set(words):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += next(
                    int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")
                )
        except (OSError, StopIteration):
            continue
    return total


def losses(run: RunDir) -> str:
    """The losses of all steps, as text."""
    return json.dumps(
        [event.metrics.train_loss for event in metrics_of(run) if event.metrics is not None]
    )


def metrics_of(run: RunDir) -> list[Event]:
    """The events with metrics, in order."""
    return [
        event
        for segment in read_segments(run, 1)
        for event in segment.events
        if event.metrics is not None
    ]


if __name__ == "__main__":
    main()
