"""The answers of a tiny base to samples, packed, padded, and one by one by its class as
transformers loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.training.models import spec_for
from tests.support.training.parity import CPU, samples
from workers.base.load import load
from workers.data.batches import collate
from workers.model.build import build
from workers.training.step import logits_of

QUICK = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "gptj", "minimax")


def loaded(base: Path) -> nn.Module:
    spec = spec_for(base, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2})
    model = build(spec, CPU).peft_model
    load(model, base, seed=1, compute_dtype=torch.float32, device=CPU)
    return model.eval()


def alone(base: Path, data: list[Any]) -> list[Tensor]:
    """The answers of the class as transformers loads it, to one sample after the other."""
    stock: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        return [stock(input_ids=collate([sample], CPU).ids).logits[0] for sample in data]


def shuffled() -> list[Any]:
    """Long samples, some that are no longer than what is chosen or a block, and a long one
    again.
    """
    data = samples(5)
    short = samples(2, longest=6)
    return [data[0], short[0], data[3], short[1], data[1]]


def of_kinds(kinds: Iterable[str]) -> pytest.MarkDecorator:
    params = [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds
    ]
    return pytest.mark.parametrize("kind", params)


def padded_answers(model: nn.Module, data: list[Any]) -> list[Tensor]:
    """The logits of each sample, in one padded micro-batch."""
    with torch.no_grad():
        rows = logits_of(model, collate(data, CPU))
    return [row[: len(sample.ids)] for row, sample in zip(rows, data, strict=True)]


def error(own: Tensor, truth: Tensor) -> float:
    """Of the token whose answer is farthest from the truth, relative."""
    return float(((own - truth).norm(dim=-1) / truth.norm(dim=-1)).max())
