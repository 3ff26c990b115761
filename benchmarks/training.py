"""Tokens per second, peak memory and loss of whole training runs: ours against TRL's SFTTrainer
with PEFT.

    python benchmarks/training.py [--repeats 3] [--steps 16] [--only padded,packed] [--ranks 1,2]

The same random Llama in fp32, the same 192 chats of log-normal lengths with the assistants' tokens
as targets, LoRA of rank 16 on every linear layer, AdamW at a constant rate, the same number of
samples a step and rank, the same threads and malloc. Every run has processes of its own, and the
contenders take turns: ours, TRL as it pads by default, TRL with packing; on one rank, then on two
with FSDP2. The first steps are not counted, and neither is padding. Ours is a supervised attempt,
as the service runs it, with its default options.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bases import Llama
from benchmarks.chats import write_base, write_chats
from benchmarks.machine import machine, save
from benchmarks.peak_memory import PeakMemory
from benchmarks.training_trl import Measured, Settings
from ft_service.data.tokens.sample import Tokens
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.rundir.events import read_segments
from ft_service.spec import JobSpec
from ft_service.supervisor import torchrun
from ft_service.supervisor.torchrun import Node

ROOT = Path(__file__).parent.parent
LLAMA = Llama(hidden=256, intermediate=688, layers=4, heads=8, vocabulary=8192)
CHATS = 192
SAMPLES_PER_RANK = 8
MAX_LENGTH = 1024
LORA_RANK = 16
LORA_ALPHA = 32
LEARNING_RATE = 5e-3
MAX_GRAD_NORM = 1.0
SEED = 7
OURS = "ours"
PADDED = "TRL, padded"
PACKED = "TRL, packed"
LIKE_OURS = 1e-5
"""Largest relative difference between a step's loss under TRL's padding and ours, which compute the
same in another order.
"""
SECONDS = 900


@dataclass(frozen=True)
class Run:
    """What one run of a contender showed, over all its ranks."""

    tokens: list[int]
    """Of every step, without padding."""
    targets: list[int]
    losses: list[float]
    step_ends: list[float]
    """Seconds since some moment, of rank 0."""
    peak: int
    """Bytes of anonymous memory, of the rank that had most."""
    sharded: float | None = None
    """With several ranks: the share of the parameters that are really sharded, where it is
    known.
    """

    def tokens_per_second(self, warm_up: int) -> float:
        return sum(self.tokens[warm_up:]) / (self.step_ends[-1] - self.step_ends[warm_up - 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=16, help="optimizer steps of every run, the warm-up included"
    )
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps at the beginning that are not counted"
    )
    parser.add_argument(
        "--only", default="padded,packed", help="of TRL's two ways; none: only ours"
    )
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument(
        "--spec", default="{}", help="JSON: options of our job in place of the defaults"
    )
    parser.add_argument("--no-save", action="store_true", help="print the results only")
    options = parser.parse_args()
    contenders = [
        OURS,
        *(name for name in (PADDED, PACKED) if name.split()[-1] in options.only.split(",")),
    ]
    result: dict[str, Any] = {
        **machine(),
        "llama": vars(LLAMA),
        "samples_per_rank": SAMPLES_PER_RANK,
        **vars(options),
    }
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        bench = Bench(Path(folder), options.steps, options.warm_up, json.loads(options.spec))
        result["data"] = bench.about_the_data()
        for ranks in map(int, options.ranks.split(",")):
            result[ranks_name(ranks)] = bench.compare(contenders, ranks, options.repeats)
    if not options.no_save:
        save("training", result)


def ranks_name(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks, FSDP2"


@dataclass
class Bench:
    folder: Path
    steps: int
    warm_up: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer

        self.base = self.folder / "base"
        write_base(self.base, LLAMA)
        self.file = write_chats(self.folder / "chats.jsonl", CHATS)
        self.samples: list[Tokens] = list(
            load_dataset(load_tokenizer(str(self.base)), self.file, MAX_LENGTH)
        )
        self.runs = 0

    def about_the_data(self) -> dict[str, Any]:
        lengths = sorted(len(sample.ids) for sample in self.samples)
        return {
            "chats": len(lengths),
            "tokens": sum(lengths),
            "targets": sum(sample.target_count for sample in self.samples),
            "shortest_median_longest": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        }

    def compare(self, contenders: list[str], ranks: int, repeats: int) -> dict[str, Any]:
        """Runs in turns, and their medians.

        A contender that cannot be run as it should is left out by name.
        """
        runs: dict[str, list[Run]] = {name: [] for name in contenders}
        left_out: dict[str, str] = {}
        for repeat in range(repeats):
            for name in contenders:
                if name in left_out:
                    continue
                run = self.run(name, ranks)
                if why := self.why_not(name, ranks, run, runs[OURS][-1] if runs[OURS] else run):
                    left_out[name] = why
                    print(f"{ranks_name(ranks)}: {name} is left out: {why}", flush=True)
                    continue
                runs[name].append(run)
                print(
                    f"{ranks_name(ranks)}, {repeat + 1}/{repeats}: {name:12} {self.line(run)}",
                    flush=True,
                )
        table = {name: self.summary(done) for name, done in runs.items() if name not in left_out}
        ours = table[OURS]
        for row in table.values():
            row["ours_times_its_speed"] = round(
                ours["tokens_per_second"] / row["tokens_per_second"], 2
            )
            row["ours_times_its_memory"] = round(ours["peak_mib"] / row["peak_mib"], 2)
        print_table(ranks_name(ranks), table)
        return {**table, "left_out": left_out}

    def line(self, run: Run) -> str:
        return (
            f"{run.tokens_per_second(self.warm_up):7.0f} tokens/s {run.peak / 2**20:6.0f} MiB, "
            f"last loss {run.losses[-1]:.4f}"
        )

    def summary(self, runs: list[Run]) -> dict[str, Any]:
        speeds = [run.tokens_per_second(self.warm_up) for run in runs]
        return {
            "tokens_per_second": round(statistics.median(speeds)),
            "peak_mib": round(statistics.median(run.peak for run in runs) / 2**20),
            "first_loss": round(runs[0].losses[0], 6),
            "mean_loss": round(statistics.mean(runs[0].losses), 6),
            "last_loss": round(runs[0].losses[-1], 6),
            "tokens": sum(runs[0].tokens),
            "targets": sum(runs[0].targets),
            "all_tokens_per_second": [round(speed) for speed in speeds],
            **({"sharded": runs[0].sharded} if runs[0].sharded is not None else {}),
        }

    def why_not(self, name: str, ranks: int, run: Run, ours: Run) -> str | None:
        """Why a run of TRL's cannot be compared with one of ours; None if it can."""
        if name != OURS and ranks > 1 and (run.sharded or 0) < 0.99:
            return (
                f"only {run.sharded:.0%} of the parameters are sharded DTensors: this is DDP, "
                "not FSDP2"
            )
        if name == PADDED:
            counted, expected = (
                [*zip(which.tokens, which.targets, strict=True)] for which in (run, ours)
            )
            if counted != expected:
                return (
                    f"its steps have other tokens and targets than ours: {counted} and {expected}"
                )
            apart = max(abs(a - b) / b for a, b in zip(run.losses, ours.losses, strict=True))
            if apart > LIKE_OURS:
                return (
                    f"its losses differ from ours by up to {apart:.1e}: {run.losses} and "
                    f"{ours.losses}"
                )
        return None

    def expected(self, ranks: int) -> list[tuple[int, int]]:
        """Tokens and targets of each of our steps."""
        batches = [[self.samples[i] for i in batch] for batch in self.batches(ranks)]
        return [
            (sum(len(s.ids) for s in batch), sum(s.target_count for s in batch))
            for batch in batches
        ]

    def batches(self, ranks: int) -> list[list[int]]:
        from workers.data.batches import batch_of_step

        return [
            batch_of_step(step, len(self.samples), SAMPLES_PER_RANK * ranks, SEED)
            for step in range(self.steps)
        ]

    def run(self, name: str, ranks: int) -> Run:
        self.runs += 1
        folder = self.folder / f"{self.runs}"
        return (
            self.ours(folder, ranks)
            if name == OURS
            else self.trl(folder, ranks, packed=name == PACKED)
        )

    def ours(self, folder: Path, ranks: int) -> Run:
        run = RunDir(folder)
        start = self.start(ranks)
        run.write("spec.json", self.spec(ranks))
        Attempt(run, 1).write_start(start)
        command = [sys.executable, "-m", "ft_service.supervisor", str(run.root), "1"]
        peak = watched(command, surroundings(start), folder / "supervisor.log", ranks)
        metrics = [
            event
            for segment in read_segments(run, 1)
            for event in segment.events
            if event.kind == "metrics"
        ]
        if len(metrics) != self.steps:
            raise RuntimeError(
                f"our run ended after {len(metrics)} of {self.steps} steps; see outcome.json"
            )
        losses = [event.metrics.train_loss or 0.0 for event in metrics if event.metrics]
        tokens, targets = zip(*self.expected(ranks), strict=True)
        assert list(tokens) == [event.metrics.tokens for event in metrics if event.metrics], (
            "the job has other samples"
        )
        seconds = [event.metrics.step_seconds or 0.0 for event in metrics if event.metrics]
        # A GPU's steps are told of late, in times of its own.
        ends = (
            list(accumulate(seconds))
            if torch.cuda.is_available()
            else [event.time for event in metrics]
        )
        return Run(list(tokens), list(targets), losses, ends, peak)

    def trl(self, folder: Path, ranks: int, *, packed: bool) -> Run:
        folder.mkdir()
        order = (
            range(len(self.samples))
            if packed
            else [i for batch in self.batches(ranks) for i in batch]
        )
        samples = [
            {"input_ids": s.ids.tolist(), "labels": labels(s)}
            for s in (self.samples[i] for i in order)
        ]
        (folder / "samples.json").write_text(json.dumps(samples))
        mean = sum(len(sample.ids) for sample in self.samples) / len(self.samples)
        settings = Settings(
            base=str(self.base),
            samples=str(folder / "samples.json"),
            out=str(folder),
            steps=self.steps,
            ranks=ranks,
            packed=packed,
            samples_per_rank=SAMPLES_PER_RANK,
            rows_per_rank=max(1, round(SAMPLES_PER_RANK * mean / MAX_LENGTH)),
            max_length=MAX_LENGTH,
            lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            seed=SEED,
        )
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            if ranks > 1
            else []
        )
        command = [
            sys.executable,
            *launcher,
            str(ROOT / "benchmarks/training_trl.py"),
            str(folder / "settings.json"),
        ]
        peak = watched(command, surroundings(self.start(ranks)), folder / "trl.log", ranks)
        of_ranks = [
            Measured(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(ranks)
        ]
        forwards = settings.rows_per_rank if packed else 1
        return Run(
            tokens=per_step([rank.tokens for rank in of_ranks], forwards, self.steps),
            targets=per_step([rank.targets for rank in of_ranks], forwards, self.steps),
            losses=of_ranks[0].losses[: self.steps],
            step_ends=of_ranks[0].step_ends,
            peak=peak,
            sharded=min(rank.sharded for rank in of_ranks) if ranks > 1 else None,
        )

    def spec(self, ranks: int) -> JobSpec:
        from tests.support.training.models import spec_for

        given = dict(self.options)
        training = {
            "batch_size": SAMPLES_PER_RANK * ranks,
            "per_device_train_batch_size": SAMPLES_PER_RANK,
            "max_steps": self.steps,
            "max_length": MAX_LENGTH,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            **given.pop("training", {}),
        }
        return spec_for(
            self.base,
            self.file,
            ranks=ranks,
            training=training,
            lora={"r": LORA_RANK, "lora_alpha": LORA_ALPHA},
            precision={"compute": "fp32", **given.pop("precision", {})},
            checkpoint={"save_steps": 10_000},  # the last step's is not counted
            **given,
        )

    def start(self, ranks: int) -> Start:
        return Start(
            job_id="ftjob-test", attempt=1, world_size=ranks, generation=1, checkpoint=None
        )


def labels(sample: Tokens) -> list[int]:
    return [
        int(token) if target else -100
        for token, target in zip(sample.ids, sample.targets, strict=True)
    ]


def per_step(of_ranks: list[list[int]], forwards: int, steps: int) -> list[int]:
    """Counts of every forward of every rank → those of every step.

    What was put together ahead and never used is left out.
    """
    return [
        sum(sum(counts[step * forwards : (step + 1) * forwards]) for counts in of_ranks)
        for step in range(steps)
    ]


SHARED = ("OMP_", "GLOO_", "NCCL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""What names of variables begin with that every contender gets alike."""


def surroundings(start: Start) -> dict[str, str]:
    """The environment of every contender: threads, interfaces, and what of malloc our supervisor or
    the caller sets. What our ranks tell malloc themselves, TRL's processes tell it too.
    """
    inherited = {
        **os.environ,
        "FT_CACHE": "",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        ours = torchrun.environment(inherited, start, RunDir(Path(folder)), Node())
    return {**inherited, **{key: value for key, value in ours.items() if key.startswith(SHARED)}}


def watched(command: list[str], environment: dict[str, str], log: Path, ranks: int) -> int:
    """Run a command to its end.

    Returns the largest anonymous memory that one of its ranks had, in bytes.
    """
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        with PeakMemory(process.pid) as memory:
            code = process.wait(SECONDS)
    if code:
        raise RuntimeError(
            f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-4000:]}"
        )
    return memory.largest(ranks)[0]


def print_table(title: str, table: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{title:20} {'tokens/s':>9} {'peak MiB':>9} {'loss, first, mean, last':>28}   ours: "
        "speed, memory"
    )
    for name, row in table.items():
        losses = f"{row['first_loss']:.4f}  {row['mean_loss']:.4f}  {row['last_loss']:.4f}"
        ratios = (
            ""
            if name == OURS
            else f"{row['ours_times_its_speed']:.2f} x  {row['ours_times_its_memory']:.2f} x"
        )
        print(f"{name:20} {row['tokens_per_second']:9} {row['peak_mib']:9} {losses:>28}   {ratios}")
    print(flush=True)


if __name__ == "__main__":
    main()
