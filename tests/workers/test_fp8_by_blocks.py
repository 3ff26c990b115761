"""Bases published in FP8 by blocks: trained on, resumed, cached and served as the values that their
blocks stand for.

The reference is the same base with those values in plain fp32. Matrices have several blocks both
ways, the last ones cut off, and three ranks divide their rows inside of blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ft_service.bases.cache_folder import Cache
from ft_service.spec import JobSpec, PrecisionOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.checks import resume_all
from tests.support.training.loading import load_on_rank
from tests.support.training.models import ATTENTION, save_tiny, save_tokenizer, spec_for
from tests.support.training.parity import (
    CPU,
    Step,
    assert_parity,
    reference_steps,
    relative_error,
    train_steps,
)
from tests.support.training.prequantized import VALUES, fp8_by_blocks, with_values
from workers.model.build import build
from workers.model.precision import choose_products
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.model import ServedModel, TokenSpan

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 160, "intermediate_size": 288},
    "qwen3_moe": {
        "hidden_size": 160,
        "intermediate_size": 288,
        "moe_intermediate_size": 144,
        "head_dim": 40,
    },
}
TARGETS = {"llama": "all-linear", "qwen3_moe": ATTENTION}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family, sizes in SIZES.items():
        folders[family] = save_tiny(
            family, tmp_path_factory.mktemp(family), initializer_range=0.05, vocab_size=259, **sizes
        )
        with_values(fp8_by_blocks)(folders[family])
        save_tokenizer(folders[family])
    return folders


def exact(folder: Path, family: str, ranks: int, **precision: Any) -> JobSpec:
    return spec_for(
        folder,
        ranks=ranks,
        precision={"default": "fp8", "compute": "fp32", **precision},
        training={"per_device_train_batch_size": 2},
        lora={"r": 4, "target_modules": TARGETS[family]},
    )


def steps_of_each(rank: int, world: int, specs: list[JobSpec]) -> list[list[Step]]:
    return [train_steps(rank, world, spec, steps=1) for spec in specs]


@pytest.mark.parametrize(
    "world", [*(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2)), 3]
)
def test_loss_and_every_gradient_are_those_of_the_values_on_any_number_of_ranks(
    world: int, bases: dict[str, Path]
) -> None:
    specs = [exact(folder, family, world) for family, folder in bases.items()]
    found = run_on_ranks(steps_of_each, world, specs)
    for number, (family, folder) in enumerate(bases.items()):
        truth = reference_steps(
            folder / VALUES, exact(folder / VALUES, family, 1, default="bf16"), steps=1
        )
        for of_rank in found:
            assert_parity(of_rank[number], truth)


@pytest.mark.slow  # test_train.py has it of NF4
def test_an_interrupted_job_ends_with_bitwise_the_adapter_of_an_uninterrupted_one(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    assert resume_all({"qwen3_moe": bases["qwen3_moe"]}, tmp_path) == {"qwen3_moe": True}


def test_the_cache_holds_blocks_beside_what_was_quantised(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """A base of which one weight is plain, which the job stores in NF4: that is work, and all
    weights are cached.
    """
    folder = tmp_path / "base"
    folder.mkdir()
    tensors, plain = (
        load_file(f / "model.safetensors") for f in (bases["llama"], bases["llama"] / VALUES)
    )
    query = "model.layers.0.self_attn.q_proj.weight"
    tensors.pop(f"{query}_scale_inv")
    save_file({**tensors, query: plain[query].bfloat16()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((bases["llama"] / "config.json").read_bytes())
    precision = {"default": "fp8", "overrides": {r".*layers\.1.*down_proj": "nf4"}}
    first, second, third = (
        run_on_ranks(
            load_on_rank,
            world,
            spec_for(folder, ranks=world, precision=precision),
            Cache(tmp_path / "cache"),
        )
        for world in (2, 2, 3)
    )
    assert [outcomes[0].loaded.cached for outcomes in (first, second, third)] == [False, True, True]
    kinds = first[0].kinds
    assert (kinds[query], kinds["model.layers.1.mlp.down_proj.weight"]) == (
        "FP8Weight",
        "NF4Weight",
    )
    assert list(kinds.values()).count("FP8BlocksWeight") == 12
    for later in (second, third):
        for name in kinds:
            for part, _ in enumerate(first[0].parts[name]):
                was, now = (
                    torch.cat([outcome.parts[name][part] for outcome in outcomes])
                    for outcomes in (first, later)
                )
                assert torch.equal(was, now), name
        assert later[0].loaded.kept == first[0].loaded.kept
        assert later[0].loaded.converted == first[0].loaded.converted
        assert set(first[0].loaded.converted) == {"model.layers.1.mlp.down_proj.weight"}


def test_a_preview_answers_from_the_blocks(bases: dict[str, Path]) -> None:
    ids = list(range(3, 15))
    for folder in bases.values():
        served = ServedModel(
            str(folder), PrecisionOptions(default="fp8", compute="fp32"), CPU, None
        )
        answer = served.forward([TokenSpan(ids, Span(KeyValueCache(), 0, len(ids)), 0, None)])[0]
        stock = AutoModelForCausalLM.from_pretrained(folder / VALUES, dtype=torch.float32)
        with torch.no_grad():
            logits = stock(input_ids=torch.tensor([ids])).logits[0, -1]
        assert relative_error(answer, logits) < 1e-5


def test_layers_by_blocks_are_said_to_be_dequantised_on_gpus_too(bases: dict[str, Path]) -> None:
    built = build(spec_for(bases["llama"], precision={"default": "fp8"}), CPU)
    assert (
        built.arithmetic.products
        == "The 14 layers stored in fp8_blocks are dequantised to multiply."
    )
    base: Any = built.peft_model.get_base_model()
    said = choose_products(
        base, PrecisionOptions(default="fp8"), torch.bfloat16, torch.device("cuda")
    )
    assert said == built.arithmetic.products
    assert not any(getattr(module, "in_fp8", False) for module in base.modules())
