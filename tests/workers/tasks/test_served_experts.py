"""Adapters on experts as vLLM's loader reads them: names, shapes, and what its arithmetic makes of
them.

The loader's steps are those of vLLM's sources (its package vllm.lora). vLLM itself has no
kernels for adapters on experts outside of GPUs, and is not run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from tests.support.training.adapters import merged_by_peft, save_adapter
from tests.support.training.models import save_tiny
from workers.tasks.pad_ranks import pad_ranks

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PREFIX = "base_model.model.model.layers.0."
APART = {
    "mixtral": (PREFIX + "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "qwen3_moe": (PREFIX + "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
}
"""Model type → vLLM's names of an expert's gate, up and down projection: those of the published
files.
"""


def exported(
    family: str, folder: Path, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The export's tensors, what PEFT merges into the stacks of layer 0, and the export's
    configuration.
    """
    base = save_tiny(family, folder / "base")
    given = {
        "target_modules": ["q_proj"],
        "target_parameters": STACKS,
        "r": 3,
        "lora_alpha": 6,
        **options,
    }
    adapter = save_adapter(base, folder / "adapter", **given)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    merged = merged_by_peft(base, adapter).state_dict()
    changes = {
        stack: merged[name] - plain[name] for stack in STACKS if (name := f"model.layers.0.{stack}")
    }
    (folder / "out").mkdir()
    pad_ranks(adapter, folder / "out", base)
    config = json.loads((folder / "out/adapter_config.json").read_text())
    return load_file(folder / "out/adapter_model.safetensors"), changes, config


@pytest.mark.parametrize("family", APART)
@pytest.mark.parametrize(
    "options", [{}, {"rank_pattern": {"q_proj": 5}, "use_rslora": True}], ids=["plain", "patterns"]
)
def test_experts_that_files_hold_one_by_one_have_their_names(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    tensors, changes, config = exported(family, tmp_path, **options)
    rank = 5 if options else 3
    assert (config["r"], config["lora_alpha"], config["target_parameters"]) == (rank, rank, None)
    assert {"q_proj", *APART[family][1]} == set(config["target_modules"])
    name, projections = APART[family]
    gate_up, down = (changes[stack] for stack in STACKS)
    count, high, wide = gate_up.shape
    for expert in range(count):
        of_expert = []
        for projection in projections:
            a, b = (
                tensors[f"{name.format(expert)}{projection}.{part}.weight"]
                for part in ("lora_A", "lora_B")
            )
            inside, outside = (
                (high // 2, wide) if projection == projections[2] else (wide, high // 2)
            )
            assert (a.shape, b.shape) == ((rank, inside), (outside, rank))
            of_expert.append(b @ a)
        torch.testing.assert_close(torch.cat(of_expert[:2]), gate_up[expert], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(of_expert[2], down[expert], rtol=1e-4, atol=1e-6)
    assert tensors[f"{PREFIX}self_attn.q_proj.lora_A.weight"].shape[0] == rank


@pytest.mark.parametrize("stacks", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "first", "last"])
def test_stacks_that_files_hold_as_one_have_pefts_layout(stacks: list[str], tmp_path: Path) -> None:
    tensors, changes, config = exported(
        "gpt_oss", tmp_path, target_parameters=stacks, rank_pattern={"q_proj": 5}
    )
    assert config["r"] == 5
    for stack, name in zip(STACKS, ("mlp.experts.base_layer", "mlp.experts"), strict=True):
        a, b = (tensors[f"{PREFIX}{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        count, wide, high = changes[stack].shape  # this class holds [experts, in, out]
        assert (a.shape, b.shape) == ((count * 5, wide), (high, 5 * count))
        per_expert = a.reshape(count, -1, wide), b.reshape(high, -1, count).permute(2, 0, 1)
        change = torch.einsum("ehr,erw->ewh", per_expert[1], per_expert[0])
        torch.testing.assert_close(change, changes[stack], rtol=1e-4, atol=1e-6)
        assert bool(change.any()) == (stack in stacks), (
            "zeros stand for what has no adapter, since the loader wants both"
        )


def test_without_its_base_it_is_refused(tmp_path: Path) -> None:
    base = save_tiny("mixtral", tmp_path / "base")
    adapter = save_adapter(
        base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=STACKS
    )
    (tmp_path / "out").mkdir()
    with pytest.raises(SpecError, match="ft export --format vllm"):
        pad_ranks(adapter, tmp_path / "out")
