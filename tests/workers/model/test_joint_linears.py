"""Adapted layers are computed together where a model's own forward gives them one tensor, and
nowhere else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.training.models import ATTENTION, save_tiny, spec_for
from workers.base.load import base_tensor_name
from workers.layers.linear import LoraLinear
from workers.model.build import build
from workers.model.probes import Probed

CPU = torch.device("cpu")
KNOWN = Probed(True)
"""So that no copy of the base is tried."""


def joint_layers(base: Path, **options: Any) -> tuple[set[str], set[frozenset[str]]]:
    """The adapted layers of a job, and which of them are computed together."""
    model = build(spec_for(base, **options), CPU, KNOWN).peft_model
    names = {
        own: base_tensor_name(name)
        for name, own in model.named_modules()
        if isinstance(own, LoraLinear)
    }
    groups = {
        frozenset(names[one] for one in own.joint._layers) for own in names if own.joint is not None
    }
    return set(names.values()), groups


def given_one_tensor(base: Path, names: set[str]) -> set[frozenset[str]]:
    """Layers of one module that are given one tensor while the model runs."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given: dict[tuple[str, int], list[str]] = {}
    kept = []

    def look(name: str, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        kept.append(inputs[0])
        given.setdefault((name.rpartition(".")[0], id(inputs[0])), []).append(name)

    for name, module in model.named_modules():
        if name in names:
            assert isinstance(module, nn.Linear)
            module.register_forward_pre_hook(partial(look, name))
    model(input_ids=torch.arange(6)[None])
    return {frozenset(group) for group in given.values() if len(group) > 1}


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 4),
        ("gemma2", 4),
        ("phi", 2),
        ("qwen3_moe", 4),
        ("deepseek_v3", 4),
        ("gpt_oss", 2),
        ("gpt_neox", 0),
    ],
)
def test_layers_that_are_given_one_tensor_are_joint(
    family: str, count: int, tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path / "base")
    names, groups = joint_layers(base)
    assert groups == given_one_tensor(base, names)
    assert len(groups) == count


def test_layers_stay_alone_with_a_magnitude_and_where_they_are_gathered_apart(
    tmp_path: Path,
) -> None:
    base = save_tiny("llama", tmp_path / "base")
    assert not joint_layers(base, lora={"r": 4, "use_dora": True})[1]
    assert not joint_layers(base, distributed={"wrap": {"min_params": 1}})[1]
    _, groups = joint_layers(base, lora={"r": 4, "target_modules": ATTENTION})
    assert groups == {
        frozenset(f"model.layers.{n}.self_attn.{own}_proj" for own in "qkv") for n in range(2)
    }
