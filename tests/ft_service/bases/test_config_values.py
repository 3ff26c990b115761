"""Values in a config.json that make no model are refused before any weight is read, naming field, value and what it may be."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.bases.families.acceptance import refuse_untunable
from ft_service.errors import SpecError

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
    {"rope_theta": [1e4, 1e6]},
    {"head_dim": None, "num_key_value_heads": None, "pad_token_id": None, "rope_scaling": None},
    {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16},
    {"hidden_act": "gelu_pytorch_tanh", "dtype": "torch.float32"},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}},
    {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
    {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    {"model_type": "step3p5", "layer_types": ["full_attention"] * 3},
    {"head_dim": 0, "kv_lora_rank": 16},
    {"num_attention_heads": 4, "num_key_value_heads": 128, "kv_lora_rank": 16},
    {"model_type": "gpt_neox", "pad_token_id": 256},
    {"model_type": "gpt_oss", "hidden_act": "swiglu"},
    {"model_type": "new", "layer_types": ["new", "new"]},
    {"intermediate_size": [112, 96], "sliding_window": None, "pad_token_id": -1},
    {"num_experts": 0, "num_experts_per_tok": 8},
    {"num_experts": 8, "num_experts_per_tok": 8},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "48"}, "hidden_size = '48', .* it is a whole number above zero"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": True}, "vocab_size = True"),
    ({"head_dim": -2}, "head_dim = -2"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads = 5, .* hidden_size, 48, is a multiple"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3, .* num_attention_heads, 4, is a multiple"),
    ({"attention_bias": "yes"}, "attention_bias = 'yes', .* true or false"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5', .* a number"),
    ({"hidden_act": "swiglu"}, "hidden_act = 'swiglu', .* transformers has .*silu"),
    ({"hidden_act": ["silu"]}, "hidden_act = "),
    ({"torch_dtype": "int4"}, "torch_dtype = 'int4', .* bfloat16"),
    ({"layer_types": ["full_attention"]}, "layer_types = .* names 1 layers and num_hidden_layers is 2"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types = .* names 3 layers and num_hidden_layers is 2"),
    ({"layer_types": ["full_attention", "sparkling"]}, "layer_types = 'sparkling', .* transformers has .*full_attention"),
    ({"pad_token_id": 256}, "pad_token_id = 256, .* one of the 256 tokens of vocab_size, or null"),
    ({"pad_token_id": "<pad>"}, "pad_token_id = '<pad>', .* a whole number"),
    ({"head_dim": 0}, "head_dim = 0, .* above zero"),
    ({"sliding_window": "none"}, "sliding_window = 'none'"),
    ({"num_experts": "four"}, "num_experts = 'four'"),
    ({"layer_types": "full"}, "layer_types = 'full', .* a list of names"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear', .* an object"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type = 'spiral', .* transformers has .*yarn"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = None, .* 'linear' it is a number"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "rope_scaling.high_freq_factor = None"),
    ({"rope_scaling": {"type": "longrope", "short_factor": 2.0}}, "rope_scaling.short_factor = 2.0, .* a list of numbers"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.factor = None"),
    ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok = 8, .* at most the 4 experts that num_experts"),
]


@pytest.mark.parametrize("values", WORKS, ids=str)
def test_what_bases_say_is_no_fault(values: dict[str, Any]) -> None:
    refuse_untunable({**LLAMA, **values})
    refuse_untunable({"model_type": "llava", "text_config": {**LLAMA, **values}})


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_model_is_refused_by_its_name(values: dict[str, Any], words: str) -> None:
    for config in ({**LLAMA, **values}, {"model_type": "llava", "text_config": {**LLAMA, **values}}):
        with pytest.raises(SpecError, match=words) as caught:
            refuse_untunable(config)
        assert caught.value.param == "model"


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(SpecError) as caught:
        refuse_untunable({**LLAMA, "hidden_act": "x" * 10_000})
    assert len(caught.value.message) < 1000
