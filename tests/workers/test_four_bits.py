"""Bases published in NVFP4 and MXFP4: trained on, resumed and served as the values that their bytes
stand for.

The reference is the same base with those values in plain fp32. Three ranks do not divide its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ft_service.spec import JobSpec, PrecisionOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.checks import resume_all
from tests.support.training.models import ATTENTION, save_tiny, save_tokenizer, spec_for
from tests.support.training.parity import (
    CPU,
    Step,
    assert_parity,
    reference_steps,
    relative_error,
    train_steps,
)
from tests.support.training.prequantized import VALUES, mxfp4, nvfp4, nvfp4_of_modelopt, with_values
from tests.support.training.published import mxfp4_experts
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.model import ServedModel, TokenSpan

SIZES = {"hidden_size": 64, "intermediate_size": 160}
MIXTURE = {**SIZES, "moe_intermediate_size": 96}


def gpt_oss(folder: Path) -> None:
    """Experts in MXFP4, and the same base with the values that transformers makes of them."""
    plain = folder / VALUES
    plain.mkdir()
    config = (folder / "config.json").read_text()
    tensors = load_file(folder / "model.safetensors")
    mxfp4_experts(folder)
    coded = load_file(folder / "model.safetensors")
    for name in tensors.keys() - coded.keys():
        tensors[name] = convert_moe_packed_tensors(
            coded[f"{name}_blocks"], coded[f"{name}_scales"]
        ).contiguous()
    (plain / "config.json").write_text(config)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})


BASES: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any], Any]] = {
    "nvfp4": ("llama", SIZES, with_values(nvfp4), "all-linear"),
    "mxfp4": ("llama", SIZES, with_values(mxfp4), "all-linear"),
    "experts in nvfp4": ("qwen3_moe", MIXTURE, with_values(nvfp4_of_modelopt), ATTENTION),
    "gpt-oss": ("gpt_oss", {"hidden_size": 64}, gpt_oss, ATTENTION),
}
"""Model type, sizes, how it is published, and the modules with adapters."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (family, sizes, publish, _) in BASES.items():
        folders[name] = save_tiny(
            family, tmp_path_factory.mktemp(family), initializer_range=0.05, vocab_size=259, **sizes
        )
        publish(folders[name])
        save_tokenizer(folders[name])
    return folders


def spec_of(name: str, folder: Path, ranks: int, default: str = "as_published") -> JobSpec:
    return spec_for(
        folder,
        ranks=ranks,
        precision={"default": default, "compute": "fp32"},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4, "target_modules": BASES[name][3]},
    )


def steps_of_each(rank: int, world: int, specs: list[JobSpec]) -> list[list[Step]]:
    return [train_steps(rank, world, spec, steps=1) for spec in specs]


@pytest.mark.parametrize(
    "world", [*(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2)), 3]
)
def test_loss_and_every_gradient_are_those_of_the_values_on_any_number_of_ranks(
    world: int, bases: dict[str, Path]
) -> None:
    found = run_on_ranks(
        steps_of_each, world, [spec_of(name, folder, world) for name, folder in bases.items()]
    )
    for number, (name, folder) in enumerate(bases.items()):
        truth = reference_steps(folder / VALUES, spec_of(name, folder / VALUES, 1, "bf16"), steps=1)
        for of_rank in found:
            assert_parity(of_rank[number], truth)


@pytest.mark.slow  # test_train.py has it of NF4: a checkpoint holds nothing of the base
@pytest.mark.parametrize("name", ["gpt-oss", "experts in nvfp4"])
def test_an_interrupted_job_ends_with_bitwise_the_adapter_of_an_uninterrupted_one(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    assert resume_all({name: bases[name]}, tmp_path, "as_published") == {name: True}


def test_a_preview_answers_from_the_published_bytes(bases: dict[str, Path]) -> None:
    ids = list(range(3, 15))
    for folder in bases.values():
        served = ServedModel(
            str(folder), PrecisionOptions(default="as_published", compute="fp32"), CPU, None
        )
        answer: Tensor = served.forward(
            [TokenSpan(ids, Span(KeyValueCache(), 0, len(ids)), 0, None)]
        )[0]
        stock = AutoModelForCausalLM.from_pretrained(folder / VALUES, dtype=torch.float32)
        with torch.no_grad():
            expected = stock(input_ids=torch.tensor([ids])).logits[0, -1]
        assert relative_error(answer[-1] if answer.ndim == 2 else answer, expected) < 1e-5
