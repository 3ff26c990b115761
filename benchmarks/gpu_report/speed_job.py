"""The job whose speed is measured: eight layers of an 8B Llama, made on the device, and samples that fill a micro-batch."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bases import Llama, write_llama
from benchmarks.gpu_report.sections import Context
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef, JobSpec
from tests.support.training.models import save_tokenizer, spec_for

LLAMA = Llama(hidden=4096, intermediate=14336, layers=8, heads=32, vocabulary=128_256)
"""Eight layers of an 8B model. Its 32 heads have keys and values of their own, where the published one has 8 pairs."""
TINY = Llama(hidden=64, intermediate=192, layers=2, heads=4, vocabulary=512)
RANK = 16


@dataclass(frozen=True)
class Shape:
    """Of a step's micro-batches."""

    samples: int
    """A micro-batch."""
    length: int
    """Tokens of every sample."""
    micro_batches: int
    """A step."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.samples * self.length

    def __str__(self) -> str:
        return f"{self.tokens} tokens a micro-batch"


SHAPES = (Shape(samples=4, length=2048, micro_batches=2), Shape(samples=1, length=1024, micro_batches=4))
TINY_SHAPES = (Shape(samples=2, length=32, micro_batches=1),)


def llama_of(context: Context) -> Llama:
    return TINY if context.tiny else LLAMA


def shapes_of(context: Context) -> tuple[Shape, ...]:
    return TINY_SHAPES if context.tiny else SHAPES


def base_of(context: Context) -> Path:
    """The base's folder, written by the first rank to need it, of numbers from the device; in memory where possible."""
    folder = context.scratch / "speed-base"
    if not (folder / "done").exists():
        write_llama(folder, llama_of(context), device=context.device)
        save_tokenizer(folder)
        (folder / "done").touch()
    return folder


def job(context: Context, shape: Shape, precision: str, steps: int, *, compiled: bool = False) -> JobSpec:
    batch = shape.samples * shape.micro_batches
    return spec_for(
        base_of(context),
        long_chats(context.scratch / f"long-{shape.length}.jsonl", shape.length, 2 * batch),
        precision={"default": precision},
        training={
            "max_steps": steps,
            "batch_size": batch,
            "per_device_train_batch_size": shape.samples,
            "tokens_per_micro_batch": shape.tokens,
            "max_length": shape.length,
        },
        lora={"r": RANK},
        distributed={"compile": compiled},
        checkpoint={"save_steps": 10_000},
    )


def long_chats(path: Path, length: int, count: int) -> DataFileRef:
    """Chats of more than `length` tokens (one a letter), nearly all of them the assistant's: they are cut to fill a sample."""
    rng = random.Random(0)
    lines: list[dict[str, Any]] = []
    for _ in range(count):
        answer = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))
        lines.append({"messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
