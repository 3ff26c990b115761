"""Bases that are refused by their config.json, in words, when the model is built: by transformers,
or by a rule of ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ft_service.errors import SpecError
from tests.support.training.models import COMMON, FAMILIES
from workers.model.build import base_on_meta
from workers.model.special_types import NOT_TUNED

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WORKS: list[dict[str, Any]] = [
    {},
    {"head_dim": None, "num_key_value_heads": None, "pad_token_id": None, "rope_scaling": None},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"architectures": None},
    {"architectures": ["LlavaLlamaForCausalLM"]},
    {"architectures": ["LlamaModel"]},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "48"}, "hidden_size = '48', .* must be int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0, .* must be above zero"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, .* below 10,000"),
    (
        {"max_position_embeddings": 10**30},
        "max_position_embeddings = 10{30}, .* below 2,147,483,648",
    ),
    ({"vocab_size": True}, "vocab_size = True, .* must be int"),
    ({"head_dim": -2}, "negative dimension"),
    ({"head_dim": 0}, "makes no model"),
    ({"num_attention_heads": 0}, "names no attention heads|makes no model"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"hidden size \(48\) is not a multiple"),
    (
        {"num_key_value_heads": 3},
        "num_key_value_heads = 3, .* num_attention_heads, 4, must be a multiple",
    ),
    ({"attention_bias": "yes"}, "attention_bias = 'yes', .* must be bool"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5', .* must be float"),
    ({"hidden_act": "swiglu"}, "hidden_act = 'swiglu', .* name of an activation function"),
    ({"layer_types": ["full_attention"]}, r"num_hidden_layers` \(2\) must be equal"),
    ({"layer_types": ["full_attention", "sparkling"]}, "layer_types` entries"),
    ({"pad_token_id": 256}, "pad_token_id = 256, .* must be below vocab_size, 256"),
    ({"pad_token_id": "<pad>"}, "pad_token_id = '<pad>', .* must be a token id"),
    ({"rope_scaling": "linear"}, "'rope_parameters'"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "KeyError: 'spiral'"),
    ({"rope_scaling": {"type": "linear"}}, "Missing required keys in `rope_parameters`"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "published as LlamaForSequenceClassification, whose head writes no",
    ),
    (
        {"architectures": ["AnyForRewardModel"]},
        "published as AnyForRewardModel, whose head writes no text",
    ),
    (
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention: its tokens see those behind them",
    ),
    ({"is_encoder_decoder": True}, "what an encoder makes of the input"),
    ({"quantization_config": "fp8"}, "quantization_config = 'fp8', and that must be an object"),
]


def save(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("values", WORKS, ids=str)
def test_what_published_bases_say_makes_a_model(values: dict[str, Any], tmp_path: Path) -> None:
    assert base_on_meta(save(tmp_path, {**LLAMA, **values})).config.num_hidden_layers == 2


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_model_is_refused_in_words(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for config in (
        {**LLAMA, **values},
        {"model_type": "llava", "text_config": {**LLAMA, **values}, **values},
    ):
        if config["model_type"] == "llava" and values.keys() & {
            "architectures",
            "is_encoder_decoder",
        }:
            continue
        with pytest.raises(SpecError) as caught:
            base_on_meta(save(tmp_path, config))
        assert caught.value.param == "model"
        if config["model_type"] == "llama":
            caught.match(words)


def test_a_long_value_is_not_repeated_whole(tmp_path: Path) -> None:
    for values in (
        {"hidden_act": "x" * 10_000},
        {"vocab_size": 10**4000},
        {"architectures": ["AnyForReward" + "x" * 10_000]},
    ):
        with pytest.raises(SpecError) as caught:
            base_on_meta(save(tmp_path, {**LLAMA, **values}))
        assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("t5", "what an encoder makes of the input"),
        ("trocr", "what an encoder makes of the input"),
        ("roberta-prelayernorm", None),
        ("distilbert", "no class of it that writes text"),
        ("colpali", "has no text part that reads from left to right"),
        ("pi0", "has no text part that reads from left to right"),
        ("mamba2", "names no attention heads"),
    ],
)
def test_what_a_class_is_transformers_says(kind: str, words: str | None, tmp_path: Path) -> None:
    """None: nothing is wrong with the class; what its tokens see is tried before training."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    if words is None:
        base_on_meta(str(tmp_path))
        return
    with pytest.raises(SpecError, match=words):
        base_on_meta(str(tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in NOT_TUNED if not kind.endswith("_assistant")])
def test_an_exception_is_refused_with_its_reason(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(SpecError) as caught:
        base_on_meta(str(tmp_path))
    assert NOT_TUNED[kind] in caught.value.message


def test_layers_that_share_a_block_are_refused(tmp_path: Path) -> None:
    """Zamba2 has as many attention blocks as its config says, and takes turns with them."""
    values = {
        **COMMON,
        **FAMILIES.get("zamba2", {}),
        "layers_block_type": ["hybrid", "hybrid"],
        "mamba_headdim": 16,
        "tie_word_embeddings": True,
    }
    folders = [tmp_path / "one", tmp_path / "two"]
    for blocks, folder in enumerate(folders, start=1):
        AutoConfig.for_model("zamba2", **values, num_mem_blocks=blocks).save_pretrained(folder)
    with pytest.raises(SpecError, match="several of its layers are one block"):
        base_on_meta(str(folders[0]))
    base_on_meta(str(folders[1]))
