"""Bases of which only the config, or the config and the index, are here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.contents import read_contents
from ft_service.bases.described import contents_or_description, described
from ft_service.errors import SpecError
from ft_service.plan.logical import logical_tensors
from tests.support.bases import LLAMA_8B, SAMPLE, TINY, llama_shapes, save_base


def save_config(folder: Path, config: Mapping[str, Any], names: list[str] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if names is not None:
        files = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("config", [TINY, LLAMA_8B, {**TINY, "tie_word_embeddings": True}])
@pytest.mark.parametrize("with_index", [False, True])
def test_a_config_describes_what_the_weights_hold(tmp_path: Path, config: dict[str, Any], with_index: bool) -> None:
    whole = read_contents(save_base(tmp_path / "whole", config))
    names = list(llama_shapes(config)) if with_index else None
    alone = described(save_config(tmp_path / "alone", config, names))
    assert sorted(alone.tensors, key=lambda t: t.name) == sorted(whole.tensors, key=lambda t: t.name)


def test_the_sample_base_is_described_as_it_is(tmp_path: Path) -> None:
    """A head size of its own, and fewer keys than queries."""
    config = json.loads((SAMPLE / "config.json").read_text())
    shapes = {tensor.name: tensor.shape for tensor in described(save_config(tmp_path / "x", config)).tensors}
    assert shapes == {tensor.name: tensor.shape for tensor in read_contents(SAMPLE).tensors}


def test_experts_and_norms_of_heads_follow_from_the_index(tmp_path: Path) -> None:
    config = {
        **TINY,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "num_experts_per_tok": 2,
    }
    layer = "model.layers.0"
    wanted = {
        "model.embed_tokens.weight": (1024, 64),
        f"{layer}.self_attn.q_proj.weight": (128, 64),
        f"{layer}.self_attn.k_norm.weight": (32,),
        f"{layer}.mlp.gate.weight": (4, 64),
        f"{layer}.mlp.experts.3.down_proj.weight": (64, 48),
        f"{layer}.mlp.experts.3.up_proj.weight": (48, 64),
    }
    found = described(save_config(tmp_path / "x", config, [*wanted, "model.layers.2.mlp.gate.weight"])).tensors
    assert {tensor.name: tensor.shape for tensor in found} == wanted


@pytest.mark.parametrize(
    ("config", "held", "others"),
    [
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": TINY}},
            "thinker.model.layers.1.mlp.up_proj.weight",
            ["thinker.visual.blocks.0.mlp.up_proj.weight", "talker.model.layers.0.mlp.up_proj.weight"],
        ),
        (
            {"model_type": "mllama", "text_config": {**TINY, "cross_attention_layers": [0]}},
            "language_model.model.layers.1.mlp.up_proj.weight",
            ["language_model.model.layers.0.cross_attn.q_proj.weight", "vision_model.global_transformer.layers.0.fc1.bias"],
        ),
    ],
)
def test_of_a_base_of_several_models_the_text_part_is_described(
    tmp_path: Path, config: dict[str, Any], held: str, others: list[str]
) -> None:
    found = described(save_config(tmp_path / "x", config, [held, *others])).tensors
    assert {tensor.name: tensor.shape for tensor in found} == {held: (192, 64)}


def test_codes_in_fp8_are_told_by_their_scales(tmp_path: Path) -> None:
    config = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    name = "model.layers.0.mlp.up_proj.weight"
    folder = save_config(tmp_path / "x", config, ["model.norm.weight", name, f"{name}_scale_inv"])
    assert {t.name: t.dtype for t in described(folder).tensors}[name] == "F8_E4M3"


def test_scales_of_blocks_are_as_many_as_the_config_says(tmp_path: Path) -> None:
    """The last ones are of blocks that are cut off. Those of activations are none of them."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**TINY, "hidden_size": 320, "intermediate_size": 200, "quantization_config": quantization}
    module = "model.layers.0.mlp.up_proj"
    names = [f"{module}.weight", f"{module}.weight_scale_inv", f"{module}.input_scale"]
    found = {tensor.name: tensor for tensor in described(save_config(tmp_path / "x", config, names)).tensors}
    assert [found[name].shape for name in names] == [(200, 320), (2, 3), (1,)]
    assert [tensor.held for tensor in logical_tensors(described(tmp_path / "x"))] == ["fp8_blocks"]


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({**TINY, "model_type": "olmo2"}, None, "of model_type 'olmo2' the plan needs model.safetensors.index.json as well"),
        ({**TINY, "vocab_size": None}, None, "config.json names no vocab_size"),
        (TINY, ["model.layers.0.mixer.in_proj.weight"], "the shape of model.layers.0.mixer.in_proj.weight does not follow"),
        (
            {**TINY, "quantization_config": {"quant_method": "bitsandbytes"}},
            ["model.norm.weight"],
            "of a base quantised by bitsandbytes the plan needs the files with the weights",
        ),
    ],
)
def test_what_says_too_little_is_refused(tmp_path: Path, config: dict[str, Any], names: list[str] | None, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        described(save_config(tmp_path / "x", config, names))
    assert message in str(caught.value)


def test_weights_that_are_here_are_read(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "x")
    assert contents_or_description(folder) == (read_contents(folder), True)
