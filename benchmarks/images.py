"""The second epoch over pictures: ours against transformers' Trainer with PEFT, on the class that
is published.

    python benchmarks/images.py [--repeats 3] [--lines 256] [--no-save]

The sample base that reads images in fp32, the first lines of the gauges, LoRA of rank 16 on every
linear layer of the text part, the tower frozen, AdamW at a constant rate, one process. Both see the
same samples in the same order from the same initial adapters, and a run whose losses differ is an
error. The contenders take turns, each run in a process of its own. Trainer decodes and processes
the pictures of each step and asks the tower about them, as TRL's SFTTrainer does with a data set of
images: its trainer and its optimizer are these. Ours asks the tower once, before the first step.
The seconds of that, its bytes, and the first epochs are told beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.images_trainer import Measured, Settings, Turn
from benchmarks.machine import machine, save
from benchmarks.training import labels, surroundings, watched
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.installation import SAMPLE_DATA, SAMPLE_MODELS
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Start
from ft_service.rundir.events import read_segments
from ft_service.spec import DataFileRef, JobSpec
from workers.data.batches import batch_of_step
from workers.describe import describe
from workers.images.computing import FOLDER, compute_features

ROOT = Path(__file__).parent.parent
BASE = SAMPLE_MODELS / "tiny-vision"
GAUGES = SAMPLE_DATA / "gauges-train.jsonl"
OURS = "ours"
TRAINER = "transformers' Trainer with PEFT"
BATCH = 32
EPOCHS = 2
LORA_RANK = 16
LORA_ALPHA = 32
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
SEED = 7
LIKE_OURS = 1e-4
"""Largest relative difference between a step's losses, which the two compute in another order, and
from which many steps follow.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lines", type=int, default=256, help=f"a multiple of {BATCH}")
    parser.add_argument("--no-save", action="store_true", help="print the results only")
    options = parser.parse_args()
    result: dict[str, Any] = {**machine(), "batch_size": BATCH, **vars(options)}
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as folder:
        bench = Bench(Path(folder), options.lines)
        result["features"] = bench.features(options.repeats)
        result |= bench.compare(options.repeats)
    print(json.dumps({name: result[name] for name in ("features", OURS, TRAINER)}, indent=2))
    if not options.no_save:
        save("images", result)


@dataclass
class Bench:
    folder: Path
    lines: int

    def __post_init__(self) -> None:
        if self.lines % BATCH:
            raise SystemExit(f"--lines {self.lines} is no multiple of {BATCH}")
        texts = GAUGES.read_text(encoding="utf-8").splitlines(keepends=True)[: self.lines]
        file = self.folder / "gauges.jsonl"
        file.write_text("".join(texts), encoding="utf-8")
        self.file = DataFileRef(name=file.name, path=str(file), sha256=sha256_of(file))
        self.samples: TokenSet = load_dataset(load_tokenizer(str(BASE)), self.file, 1024)
        steps = EPOCHS * self.lines // BATCH
        self.order = [
            number
            for step in range(steps)
            for number in batch_of_step(step, self.lines, BATCH, SEED)
        ]
        self.runs = 0

    def features(self, repeats: int) -> dict[str, Any]:
        """Bytes and seconds of what the tower makes of all pictures."""
        described = describe(str(BASE))
        seconds = []
        size = 0
        for _ in range(repeats):
            run = RunDir(self._next_folder())
            began = time.perf_counter()
            count = compute_features(
                run, str(BASE), described, [self.samples], torch.device("cpu"), "fp32"
            )
            seconds.append(time.perf_counter() - began)
            assert count == self.lines, "a picture is in two lines"
            size = sum(file.stat().st_size for file in run.path(FOLDER).rglob("*.safetensors"))
        return {
            "pictures": self.lines,
            "bytes_of_files": size,
            "seconds": round(statistics.median(seconds), 2),
            "all_seconds": [round(own, 2) for own in seconds],
        }

    def compare(self, repeats: int) -> dict[str, Any]:
        """Runs in turns, and their medians."""
        runs: dict[str, list[Measured]] = {OURS: [], TRAINER: []}
        for repeat in range(repeats):
            runs[OURS].append(self.ours())
            runs[TRAINER].append(self.trainer())
            losses = zip(runs[TRAINER][-1].losses, runs[OURS][-1].losses, strict=True)
            apart = max(abs(his - own) / own for his, own in losses)
            if apart > LIKE_OURS:
                raise SystemExit(f"the losses differ by up to {apart:.1e}")
            for name, done in runs.items():
                first, second = self._epochs(done[-1])
                print(f"{repeat + 1}/{repeats}: {name:32} {first:6.2f} s {second:6.2f} s")
        table = {name: self._summary(done) for name, done in runs.items()}
        ratio = table[TRAINER]["second_epoch_seconds"] / table[OURS]["second_epoch_seconds"]
        return {**table, "ours_times_its_speed": round(ratio, 2)}

    def _summary(self, runs: list[Measured]) -> dict[str, Any]:
        firsts, seconds = zip(*(self._epochs(run) for run in runs), strict=True)
        return {
            "second_epoch_seconds": round(statistics.median(seconds), 3),
            "all_second_epochs": [round(own, 3) for own in seconds],
            "first_epoch_seconds_after_its_first_step": round(statistics.median(firsts), 3),
            "first_loss": round(runs[0].losses[0], 6),
            "last_loss": round(runs[0].losses[-1], 6),
        }

    def _epochs(self, run: Measured) -> tuple[float, float]:
        """Seconds of both epochs, of the first from the end of its first step."""
        half = len(run.step_ends) // 2
        first, middle, last = (run.step_ends[step] for step in (0, half - 1, -1))
        return middle - first, last - middle

    def ours(self) -> Measured:
        run = RunDir(self._next_folder())
        run.write("spec.json", self.spec())
        Attempt(run, 1).write_start(self.start)
        command = [sys.executable, "-m", "ft_service.supervisor", str(run.root), "1"]
        watched(command, surroundings(self.start), run.root / "supervisor.log", 1)
        rows = [
            event
            for segment in read_segments(run, 1)
            for event in segment.events
            if event.kind == "metrics"
        ]
        losses = [row.metrics.train_loss or 0.0 for row in rows if row.metrics]
        ends = itertools.accumulate(row.metrics.step_seconds or 0.0 for row in rows if row.metrics)
        if len(losses) * BATCH != len(self.order):
            raise RuntimeError(f"our run ended after {len(losses)} steps; see outcome.json")
        return Measured(list(ends), losses)

    def trainer(self) -> Measured:
        folder = self._next_folder()
        lines = Path(self.file.path).read_text(encoding="utf-8").splitlines()
        samples: list[Tokens] = list(self.samples)
        turns = [
            Turn(
                url_of(json.loads(lines[number])),
                samples[number].ids.tolist(),
                labels(samples[number]),
            )
            for number in self.order
        ]
        settings = Settings(
            base=str(BASE),
            out=str(folder),
            batch=BATCH,
            lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            seed=SEED,
        )
        written = json.dumps({"settings": asdict(settings), "turns": [asdict(t) for t in turns]})
        (folder / "settings.json").write_text(written, encoding="utf-8")
        program = ROOT / "benchmarks/images_trainer.py"
        command = [sys.executable, str(program), str(folder / "settings.json")]
        watched(command, surroundings(self.start), folder / "trainer.log", 1)
        found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        return Measured(**found)

    def spec(self) -> JobSpec:
        from tests.support.training.models import spec_for

        return spec_for(
            BASE,
            self.file,
            training={
                "batch_size": BATCH,
                "n_epochs": EPOCHS,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "max_grad_norm": MAX_GRAD_NORM,
            },
            lora={"r": LORA_RANK, "lora_alpha": LORA_ALPHA},
            precision={"default": "bf16", "compute": "fp32"},
            checkpoint={"save_steps": 10_000},  # the last step's is not counted
        )

    @property
    def start(self) -> Start:
        return Start(job_id="ftjob-test", attempt=1, world_size=1, generation=1, checkpoint=None)

    def _next_folder(self) -> Path:
        self.runs += 1
        folder = self.folder / f"{self.runs}"
        folder.mkdir()
        return folder


def url_of(line: dict[str, Any]) -> str:
    """The `data:` URL of the picture of a chat with one."""
    (url,) = (
        part["image_url"]["url"]
        for part in line["messages"][0]["content"]
        if part["type"] == "image_url"
    )
    return url


if __name__ == "__main__":
    main()
