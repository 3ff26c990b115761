"""Tokens a second of models of experts, a few layers of what is published, next to the limit of
matrix products and to PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bases import write_mixture
from benchmarks.gpu_report.jobs import alone, built_once, steps_alone
from benchmarks.gpu_report.peft_speed import Stock, step_speed, steps
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed import STEPS, WARM_UP, figures, reset_peak, speed
from benchmarks.gpu_report.speed_job import Shape, job, shapes_of
from ft_service.plan.speed import flops_per_token
from ft_service.plan.weight_storage import adapters_of
from ft_service.spec import JobSpec
from tests.support.bases import describe
from tests.support.training.models import ATTENTION, leave_out_defaults, save_tiny, save_tokenizer


@dataclass(frozen=True)
class Experts:
    """The shape of a published model, with fewer layers."""

    family: str
    layers: int
    of_layers: int
    sizes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}, {self.layers} of {self.of_layers} layers"


QWEN3_30B_A3B = Experts(
    "qwen3_moe",
    6,
    48,
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
    },
)
GPT_OSS_20B = Experts("gpt_oss", 6, 24, {"num_local_experts": 32})
"""Its other sizes are transformers' defaults."""
SMALL = (Experts("gpt_oss", 2, 2), Experts("qwen3_moe", 3, 3))
FORMATS = ("nf4", "bf16")


def measure(context: Context) -> None:
    for experts in SMALL if context.tiny else (GPT_OSS_20B, QWEN3_30B_A3B):
        base = base_of(context, experts)
        shape = shapes_of(context)[0]
        with alone(), steps_alone(), built_once(reset_peak):
            for stored in FORMATS:
                count = WARM_UP + (2 if context.tiny else STEPS)
                spec = job(context, shape, stored, count, base=base, target_modules=ATTENTION)
                name = f"{experts.family}-{stored}"
                work = work_of(spec, shape)
                context.rows.run(
                    f"{experts}: {stored}", lambda s=spec, w=work, n=name: speed(context, s, w, n)
                )
        context.rows.run(f"{experts}: PEFT on bf16", lambda b=base, h=shape: stock(context, b, h))


def base_of(context: Context, experts: Experts) -> Path:
    """The base's folder, of numbers from the device."""
    folder = context.scratch / f"experts-{experts.family}"
    if context.tiny:
        save_tiny(experts.family, folder, vocab_size=512)
    else:
        sizes = {"num_hidden_layers": experts.layers, **experts.sizes}
        write_mixture(folder, experts.family, sizes, context.place)
        leave_out_defaults(folder)
        reset_peak()
    save_tokenizer(folder)
    return folder


def work_of(spec: JobSpec, shape: Shape) -> float:
    """FLOP a token, by the plan."""
    base = describe(spec.model.path)
    return flops_per_token(base, adapters_of(base, spec), round(shape.length), checkpointed=False)


def stock(context: Context, base: Path, shape: Shape) -> dict[str, Any]:
    """transformers' own experts in bf16, and PEFT's adapters on attention."""
    spec = job(context, shape, "bf16", 1, base=base, target_modules=ATTENTION)
    model = Stock(context.device, base, vocabulary=512, target_modules=ATTENTION, quantised=False)
    try:
        tokens_per_second, others = step_speed(context, steps(model)(shape), shape)
    except torch.OutOfMemoryError:  # as its users would
        tokens_per_second, others = step_speed(
            context, steps(replace(model, checkpointed=True))(shape), shape
        )
        others |= {"checkpointed": True}
    return figures(context, tokens_per_second, work_of(spec, shape)) | others
