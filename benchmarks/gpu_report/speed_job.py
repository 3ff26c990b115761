"""The job whose speed is measured: an 8B Llama, made on the device, and samples of log-normal
lengths in micro-batches.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bases import Llama, write_llama
from benchmarks.gpu_report.sections import Context
from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef, JobSpec
from tests.support.training.models import save_tokenizer, spec_for

LLAMA = Llama(hidden=4096, intermediate=14336, layers=32, heads=32, vocabulary=128_256, groups=8)
"""Llama-3.1-8B's shape: 16 GB in bf16."""
TINY = Llama(hidden=64, intermediate=192, layers=2, heads=4, vocabulary=512)
RANK = 16
OF_TEMPLATE = 25
"""Tokens of a chat besides its answer."""


@dataclass(frozen=True)
class Shape:
    """Of a step's micro-batches."""

    lengths: tuple[int, ...]
    """Tokens of each sample of a micro-batch."""
    micro_batches: int
    """A step."""

    @property
    def samples(self) -> int:
        """A micro-batch."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return sum(self.lengths)

    @property
    def length(self) -> float:
        """By which attention's work goes: that of samples of one length which cost as much."""
        return sum(length**2 for length in self.lengths) / self.tokens

    def __str__(self) -> str:
        return f"{self.tokens} tokens a micro-batch"


def log_normal(tokens: int) -> tuple[int, ...]:
    """Lengths of samples that have so many tokens together, spread as those of chats are, around
    600 tokens.
    """
    rng = random.Random(0)
    lengths = list[int]()
    while sum(lengths) < tokens:
        length = min(
            max(32, round(rng.lognormvariate(math.log(600), 0.9))), 4096, tokens - sum(lengths)
        )
        lengths.append(length)
    return tuple(lengths)


SHAPES = (Shape(log_normal(8192), micro_batches=2), Shape(log_normal(1024), micro_batches=4))
TINY_SHAPES = (Shape((32, 20), micro_batches=1),)


def llama_of(context: Context) -> Llama:
    return TINY if context.tiny else LLAMA


def shapes_of(context: Context) -> tuple[Shape, ...]:
    return TINY_SHAPES if context.tiny else SHAPES


def base_of(context: Context) -> Path:
    """The base's folder, written by the first rank to need it, of numbers from the device; in
    memory where possible.
    """
    folder = context.scratch / "speed-base"
    if not (folder / "done").exists():
        write_llama(folder, llama_of(context), device=context.device)
        save_tokenizer(folder)
        (folder / "done").touch()
    return folder


def job(
    context: Context,
    shape: Shape,
    precision: str,
    steps: int,
    *,
    compiled: bool = False,
    base: Path | None = None,
    target_modules: str | list[str] = "all-linear",
    checkpointing: str = "none",
) -> JobSpec:
    """`base`: a folder; None: that of the 8B."""
    batch = shape.samples * shape.micro_batches
    return spec_for(
        base or base_of(context),
        long_chats(
            context.scratch / f"long-{shape.tokens}.jsonl", shape.lengths * 2 * shape.micro_batches
        ),
        precision={"default": precision, "compare_served": "off"},
        training={
            "max_steps": steps,
            "batch_size": batch,
            "per_device_train_batch_size": shape.samples,
            "tokens_per_micro_batch": shape.tokens,
            "max_length": max(shape.lengths),
        },
        lora={"r": RANK, "target_modules": target_modules},
        gpus=1,
        distributed={"compile": compiled, "activation_checkpointing": checkpointing},
        checkpoint={"save_steps": 10_000},
    )


def long_chats(path: Path, lengths: Sequence[int]) -> DataFileRef:
    """Chats of these numbers of tokens, of an answer one a letter, the longest of more: they are
    cut. The user says little.
    """
    rng = random.Random(0)
    lines: list[dict[str, Any]] = []
    for length in lengths:
        length = length if length == max(lengths) else max(1, length - OF_TEMPLATE)
        answer = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": "go on"},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))
