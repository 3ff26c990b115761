"""Embedding and output head trained whole, next to PEFT's own on the whole dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import reference, save_tiny_llama, spec_for
from tests.support.training.parity import CPU, MIXED, assert_parity, assert_parity_in_bf16, full, reference_steps, train_steps
from workers.base.load import adapters
from workers.model.build import build
from workers.output.served_probes import without_adapter
from workers.ranks.sharding import make_mesh
from workers.train import construct

BOTH = ["embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def whole(base: Path, world: int, names: list[str], compute: str = "fp32", **options: Any) -> JobSpec:
    lora = {"r": 5, "modules_to_save": names}
    return spec_for(base, ranks=world, lora=lora, precision={**MIXED, "compute": compute}, **options)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("names", [BOTH, ["embed_tokens"], ["lm_head"]], ids=["both", "embedding", "head"])
def test_loss_and_every_gradient_are_those_of_peft(world: int, names: list[str], base: Path) -> None:
    truth = reference_steps(base, whole(base, 1, names))
    assert sum("lora" not in name for name in truth[0].grads) == len(names)
    # Several micro-batches, the gradients of which add up.
    spec = whole(base, world, names, training={"per_device_train_batch_size": 2})
    for ours in run_on_ranks(train_steps, world, spec):
        assert_parity(ours, truth)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tied_they_are_one_weight_with_both_gradients(world: int, tied: Path) -> None:
    truth = reference_steps(tied, whole(tied, 1, ["lm_head"]))
    assert [name for name in truth[0].grads if "lora" not in name] == ["base_model.model.model.embed_tokens.weight"]
    for ours in run_on_ranks(train_steps, world, whole(tied, world, ["lm_head"])):
        assert_parity(ours, truth)
