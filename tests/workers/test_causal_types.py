"""Every causal model type of transformers as a tiny base: what the plan accepts the worker loads, and of one size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_service.bases.contents import read_contents
from ft_service.errors import SpecError
from ft_service.plan.base import base_shape
from ft_service.plan.storage import adapters_of
from ft_service.spec import JobSpec
from tests.support.training.causal_types import TYPES, save_type
from tests.support.training.models import spec_for
from workers.base.load import adapters, load
from workers.model.build import build

CPU = torch.device("cpu")
REFUSED_LATE = (
    *("apertus", "deepseek_v4", "falcon", "gpt-sw3", "gpt2", "hrm_text", "inkling_text", "openai-gpt", "phimoe"),
    *("recurrent_gemma", "xlnet"),
)
"""Accepted by the plan, and refused by the worker before any weight is read: buffers that no file holds, no linear layers,
experts of their own kind, layers that are not found, randomness."""
OTHER_NAMES = (
    *("bailing_hybrid", "beam", "hy_v3", "hy_v4", "laguna", "modernbert-decoder", "qwen4_exp_text"),
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Of which the plan knows some modules by the names of the files, or heads that it takes for layers; most read both ways."""
SHORT = ("llama", "gpt_oss", "nemotron_h")


def _marks(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    late = (pytest.mark.xfail(reason="the plan does not know it"),) if kind in REFUSED_LATE + OTHER_NAMES else ()
    return late if kind in SHORT else (pytest.mark.slow, *late)


def planned(folder: Path, spec: JobSpec) -> tuple[int, int, set[str]]:
    """Numbers of adapters and of frozen weights, and what has a format."""
    shape = base_shape(read_contents(folder))
    frozen = sum(weight.numel for weight in shape.weights)
    return sum(adapter.numel for adapter in adapters_of(shape, spec)), frozen, set(shape.names().quantizable)


def loaded(folder: Path, spec: JobSpec) -> tuple[int, int, set[str]]:
    """The same of the worker, with its weights read."""
    built = build(spec, CPU)
    load(built.peft_model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    frozen = sum(p.numel() for p in built.peft_model.parameters() if not p.requires_grad)
    return sum(p.numel() for _, p in adapters(built.peft_model)), frozen, set(built.formats)


@pytest.mark.filterwarnings("ignore")  # of architectures that nobody trains here
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_marks(kind)) for kind in TYPES])
def test_what_the_plan_accepts_the_worker_loads(kind: str, tmp_path: Path) -> None:
    folder = save_type(kind, tmp_path / "base")
    if folder is None:
        pytest.skip("the names that configs have in common make no small model of this type")
    spec = spec_for(folder, precision={"default": "nf4", "compute": "fp32"}, lora={"r": 3})
    try:
        expected = planned(folder, spec)
    except SpecError:
        return  # refused when the job is created: no worker ever sees it
    assert loaded(folder, spec) == expected
