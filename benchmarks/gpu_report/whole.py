"""Whole large models on one GPU, and a sample as long as a base's context.

Their weights are drawn on the GPU, piece by piece, and quantised there: no file of them is written,
which for a 70B would be 141 GB, and nothing holds all of them in bf16. What plans and loading read
of names and shapes is a file of headers whose tensors are holes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_report.experts import QWEN3_30B_A3B, work_of
from benchmarks.gpu_report.jobs import alone, built_once, steps_alone
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed import STEPS, WARM_UP, reset_peak, speed
from benchmarks.gpu_report.speed_job import SHAPES, TINY_SHAPES, Shape, job, log_normal
from benchmarks.step_bytes import shapes_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import BaseOrigin
from ft_service.rundir.manifest import base_of as origin_of
from ft_service.spec import JobSpec
from tests.support.bases import LLAMA_8B, save_base
from tests.support.training.models import ATTENTION, COMMON, FAMILIES, save_tokenizer
from workers.base.parameter_sources import NamedBase
from workers.job import origins

DEVIATION = 0.02
"""Standard deviation of drawn weights, as of those that published models begin with."""


@dataclass(frozen=True)
class WholeJob:
    """A job on a whole model, which is a case of a section."""

    stored: str
    shape: Shape
    checkpointing: str = "none"
    warm_up: int = WARM_UP
    """Steps that do not count."""
    steps: int = STEPS
    """That do."""

    def __str__(self) -> str:
        how = "" if self.checkpointing == "none" else f", checkpointing {self.checkpointing}"
        return f"{self.stored}{how}, {self.shape}"


@dataclass(frozen=True)
class WholeModel:
    """A model by its published shape."""

    config: dict[str, Any]
    cases: tuple[WholeJob, ...]
    target_modules: str | list[str] = "all-linear"


LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
"""Llama-3.3-70B's shape."""
CONTEXT = Shape((131_072,), micro_batches=1)
"""One sample of all tokens that Llama-3.1 takes: a step of most of a minute."""
QUARTER = Shape((32_768,), micro_batches=1)

MODELS = {
    "llama-70b": WholeModel(
        LLAMA_70B,
        (
            # steps of 2 to 7 seconds each
            WholeJob("nf4", Shape(log_normal(4096), micro_batches=1), warm_up=2, steps=3),
            WholeJob("nf4", Shape(log_normal(8192), micro_batches=1), "full", warm_up=2, steps=3),
        ),
    ),
    "qwen3-30b-a3b": WholeModel(
        {
            "model_type": QWEN3_30B_A3B.family,
            "num_hidden_layers": QWEN3_30B_A3B.of_layers,
            **QWEN3_30B_A3B.sizes,
        },
        tuple(WholeJob(stored, SHAPES[0]) for stored in ("nf4", "bf16", "fp8")),
        ATTENTION,
    ),
    "llama-8b": WholeModel(
        LLAMA_8B,
        (
            WholeJob("nf4", QUARTER, "tiled", warm_up=1, steps=1),
            WholeJob("nf4", QUARTER, "offload", warm_up=1, steps=1),
            # after one of the same kernels, since no step of it goes before
            WholeJob("nf4", CONTEXT, "offload", warm_up=0, steps=1),
        ),
    ),
}


def measure(context: Context, name: str) -> None:
    whole = tiny(MODELS[name]) if context.tiny else MODELS[name]
    base = base_of(context, name, whole.config)
    with alone(), steps_alone(), drawn(context.place), built_once(reset_peak):
        for case in whole.cases:
            context.rows.run(
                f"{name}: {case}", lambda c=case: trained(context, base, c, whole.target_modules)
            )


def tiny(whole: WholeModel) -> WholeModel:
    """The smallest form: as many cases, of a small model of the same family."""
    family = whole.config["model_type"]
    config = {"model_type": family, **COMMON, **FAMILIES[family], "vocab_size": 512}
    small = (replace(case, shape=TINY_SHAPES[0], steps=min(2, case.steps)) for case in whole.cases)
    return replace(whole, config=config, cases=tuple(small))


def base_of(context: Context, name: str, config: dict[str, Any]) -> Path:
    """The base's folder: config.json, a tokenizer, and the headers of its weights."""
    folder = context.scratch / f"whole-{name}"
    save_tokenizer(folder)
    return save_base(folder, config, shapes_of(config))


def trained(
    context: Context, base: Path, case: WholeJob, target_modules: str | list[str]
) -> dict[str, Any]:
    if case.checkpointing == "offload" and not context.on_gpu:
        raise SkippedError("on processors there is nowhere to offload to")
    spec = job(
        context,
        case.shape,
        case.stored,
        case.warm_up + case.steps,
        base=base,
        target_modules=target_modules,
        checkpointing=case.checkpointing,
    )
    name = f"{base.name}-{case.stored}-{case.checkpointing}-{case.shape.tokens}"
    return speed(context, spec, work_of(spec, case.shape), name, case.warm_up)


@contextmanager
def drawn(device: torch.device) -> Iterator[None]:
    """Jobs inside get random weights from the device in place of those of their base's files, which
    are holes. What is loaded is asked for in pieces, as from files, and stored as these would be.
    """
    generator = torch.Generator(device).manual_seed(0)

    def rows(base: NamedBase, name: str, start: int, end: int) -> Tensor:
        shape = (end - start, *base.shape(name)[1:])
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        # Vectors are norms' weights.
        return made.fill_(1) if len(shape) == 1 else made.normal_(0, DEVIATION, generator=generator)

    def identify(run: RunDir, spec: JobSpec) -> BaseOrigin:
        """By its name: to hash the holes takes longer than the job."""
        return origin_of(spec.model.name, Path(spec.model.path), {})

    with patch.object(NamedBase, "rows", rows), patch.object(origins, "identify", identify):
        yield
