"""Tiny random bases in the layouts of those that people tune: class, names, prefixes, keys of
config.json, quantisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ft_service.bases.safetensors_header import read_header
from tests.support.training.checks import small_timm
from tests.support.training.composites import AS_PUBLISHED, save_composite
from tests.support.training.left_out import leave_out_defaults
from tests.support.training.models import (
    COMMON,
    DELTA_NET,
    EXPERTS,
    FAMILIES,
    GROUPED,
    save_tokenizer,
)
from tests.support.training.prequantized import (
    fp8_by_blocks,
    fp8_with_stacks,
    int4_experts,
    with_values,
)
from tests.support.training.wrapped import WRAPPERS

ROWS = 272
"""Rows of the embedding: the tests' tokenizer has 259 tokens, without one for images."""
IMAGE = 270
VIDEO = 271

_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXED = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}
_SHARED = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
}
_BLOCKS = {"hidden_size": 288, "moe_intermediate_size": 160, "initializer_range": 0.05}
"""Of bases in FP8 by blocks of 128: several in each matrix both ways, the last ones cut off."""
_HYBRID = {
    **GROUPED,
    **DELTA_NET,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 16,
}
_MISTRAL_4_ROPE = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_PARTLY_LONG = {
    **_LONG,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 1.4],
    "long_factor": [1.0, 2.0, 4.0],
}
_VISION_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


@dataclass(frozen=True)
class Published:
    """A base as it is published.

    `title`: as people call it; `kind`: model type of its config.json.
    """

    title: str
    kind: str
    config: dict[str, Any]
    holds: str
    """A tensor that its files hold by this very name."""
    quantized: Callable[[Path], object] | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys that its config.json has besides those that transformers writes today."""
    as_saved: bool = False
    """Whether its files are laid out as saving does it, unlike others of its kind
    (`AS_PUBLISHED`).
    """


def _wrapped(family: str, **text: Any) -> dict[str, Any]:
    """The tests' tiny config of several models with other values in its text part, and without a
    token for images.
    """
    config = WRAPPERS[family]
    tokens = {
        name: IMAGE if "image" in name else VIDEO
        for name in config
        if name.endswith(("token_id", "token_index"))
    }
    return {
        **config,
        **tokens,
        "text_config": {**config["text_config"], **text, "vocab_size": ROWS},
    }


_GEMMA4_TEXT = {
    **COMMON,
    **GROUPED,
    "head_dim": 16,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}


_GEMMA_3N = {
    "text_config": {
        **COMMON,
        **GROUPED,
        "vocab_size": ROWS,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "intermediate_size": [112] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": ROWS - 2,
        "laurel_rank": 8,
    },
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 16, "vocab_size": 8, "vocab_offset": ROWS},
    "audio_config": {
        "hidden_size": 16,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [4, 4],
        "input_feat_size": 16,
        "vocab_size": 8,
        "vocab_offset": ROWS + 8,
    },
}


def _gemma4(**text: Any) -> dict[str, Any]:
    config = _wrapped("gemma4")
    return {
        **config,
        "text_config": {
            **_GEMMA4_TEXT,
            "vocab_size": ROWS,
            "vocab_size_per_layer_input": ROWS,
            **text,
        },
    }


_QWEN_35_MOE = {
    **_wrapped("qwen3_5"),
    "text_config": {
        **COMMON,
        **_HYBRID,
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
        "vocab_size": ROWS,
    },
}


Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.4.down_proj.weight"
BASES: dict[str, Published] = {
    "llama-3": Published("Llama 3.1 to 3.3", "llama", {**GROUPED, "rope_parameters": _LLAMA3}, Q),
    "mistral": Published(
        "Mistral 7B, Nemo", "mistral", {**GROUPED, "head_dim": 16, "sliding_window": None}, Q
    ),
    "mixtral": Published(
        "Mixtral 8x7B",
        "mixtral",
        FAMILIES["mixtral"],
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
    ),
    "qwen-2.5": Published(
        "Qwen2.5",
        "qwen2",
        {**GROUPED, "tie_word_embeddings": True},
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "qwen-3": Published(
        "Qwen3", "qwen3", FAMILIES["qwen3"], "model.layers.0.self_attn.q_norm.weight"
    ),
    "qwen-3-moe": Published(
        "Qwen3 MoE (30B-A3B)", "qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 12}, EXPERT
    ),
    "qwen-3-next": Published(
        "Qwen3-Next",
        "qwen3_next",
        FAMILIES["qwen3_next"],
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
    ),
    "gemma-2": Published(
        "Gemma 2",
        "gemma2",
        {**FAMILIES["gemma2"], "attn_logit_softcapping": 50.0},
        "model.layers.0.pre_feedforward_layernorm.weight",
    ),
    "gemma-3-1b": Published(
        "Gemma 3 1B",
        "gemma3_text",
        FAMILIES["gemma3_text"],
        "model.layers.0.self_attn.q_norm.weight",
    ),
    "phi-3": Published(
        "Phi-3, 3.5 and Phi-4 mini",
        "phi3",
        {
            **GROUPED,
            "sliding_window": None,
            "rope_parameters": _LONG,
            "original_max_position_embeddings": 16,
        },
        "model.layers.0.self_attn.qkv_proj.weight",
    ),
    "phi-4": Published("Phi-4", "phi3", FAMILIES["phi3"], "model.layers.0.mlp.gate_up_proj.weight"),
    "deepseek-v3": Published(
        "DeepSeek V3, R1",
        "deepseek_v3",
        {**FAMILIES["deepseek_v3"], "rope_parameters": _YARN},
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "deepseek-v3-fp8": Published(
        "DeepSeek V3 in FP8",
        "deepseek_v3",
        {
            **FAMILIES["deepseek_v3"],
            **_BLOCKS,
            "intermediate_size": 320,
            "q_lora_rank": 144,
            "kv_lora_rank": 136,
        },
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        quantized=with_values(fp8_by_blocks),
    ),
    "glm-4.5": Published(
        "GLM-4.5 to 4.7",
        "glm4_moe",
        {
            **GROUPED,
            **_SHARED,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "smollm-3": Published(
        "SmolLM3", "smollm3", {**GROUPED, "no_rope_layers": [1, 0], "tie_word_embeddings": True}, Q
    ),
    "olmo-2": Published(
        "OLMo 2", "olmo2", GROUPED, "model.layers.0.post_feedforward_layernorm.weight"
    ),
    "olmo-3": Published(
        "OLMo 3",
        "olmo3",
        {**GROUPED, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "model.layers.0.self_attn.q_norm.weight",
        # Published in the form in which all layers have one; the class gives it to those that see
        # everything.
        extra={
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {k: v for k, v in _YARN.items() if k != "rope_theta"},
        },
    ),
    "granite-4": Published(
        "Granite 4",
        "granitemoehybrid",
        {
            **FAMILIES["granitemoehybrid"],
            "position_embedding_type": "nope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        "model.layers.0.block_sparse_moe.input_linear.weight",
    ),
    "minimax-m2": Published(
        "MiniMax M2",
        "minimax_m2",
        {
            **GROUPED,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
    ),
    "minimax-text-01": Published(
        "MiniMax-Text-01-hf",
        "minimax",
        {
            **GROUPED,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "block_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.7,
        },
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
    ),
    "lfm-2": Published("LFM2", "lfm2", FAMILIES["lfm2"], "model.layers.0.conv.in_proj.weight"),
    "exaone-4": Published(
        "EXAONE 4",
        "exaone4",
        {
            **GROUPED,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _LLAMA3,
        },
        "model.layers.0.post_feedforward_layernorm.weight",
    ),
    "qwen-3.5": Published(
        "Qwen3.5, 3.6 (dense)",
        "qwen3_5",
        _wrapped("qwen3_5"),
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    ),
    "qwen-3.5-moe": Published(
        "Qwen3.5, 3.6 MoE (35B-A3B)",
        "qwen3_5_moe",
        _QWEN_35_MOE,
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
    ),
    "qwen-3.5-moe-fp8": Published(
        "Qwen3.5, 3.6 MoE in FP8",
        "qwen3_5_moe",
        {
            **_QWEN_35_MOE,
            "text_config": {
                **_QWEN_35_MOE["text_config"],
                **_BLOCKS,
                "shared_expert_intermediate_size": 144,
            },
        },
        "model.language_model.layers.0.mlp.experts.4.down_proj.weight_scale_inv",
        quantized=with_values(fp8_by_blocks),
        as_saved=True,
    ),
    "gemma-3": Published(
        "Gemma 3 4B, 12B, 27B",
        "gemma3",
        _wrapped("gemma3"),
        "language_model.model.layers.0.self_attn.q_proj.weight",
    ),
    "gemma-4-31b": Published(
        "Gemma 4 31B",
        "gemma4",
        _gemma4(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
        "model.language_model.layers.0.self_attn.q_proj.weight",
    ),
    "gemma-4-26b-a4b": Published(
        "Gemma 4 26B-A4B",
        "gemma4",
        _gemma4(
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=40,
        ),
        "model.language_model.layers.0.router.per_expert_scale",
    ),
    "gemma-4-e4b": Published(
        "Gemma 4 E2B, E4B",
        "gemma4",
        _gemma4(
            hidden_size_per_layer_input=8,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "model.language_model.layers.0.per_layer_input_gate.weight",
    ),
    "gemma-3n": Published(
        "Gemma 3n E2B, E4B",
        "gemma3n",
        _GEMMA_3N,
        "model.language_model.layers.0.altup.modality_router.weight",
    ),
    "mistral-small-3": Published(
        "Mistral Small 3.1, 3.2",
        "mistral3",
        _wrapped("mistral3"),
        "language_model.model.layers.0.self_attn.q_proj.weight",
    ),
    "ministral-3": Published(
        "Ministral 3",
        "mistral3",
        _wrapped(
            "mistral3",
            model_type="ministral3",
            rope_parameters={**_YARN, "llama_4_scaling_beta": 0.1},
        ),
        "language_model.model.layers.0.self_attn.q_proj.weight",
    ),
    "qwen-2.5-vl": Published(
        "Qwen2.5-VL", "qwen2_5_vl", _wrapped("qwen2_5_vl"), "model.layers.0.self_attn.q_proj.weight"
    ),
    "qwen-3-vl": Published(
        "Qwen3-VL",
        "qwen3_vl",
        _wrapped("qwen3_vl"),
        "model.language_model.layers.0.self_attn.q_proj.weight",
    ),
    "qwen-3-vl-moe": Published(
        "Qwen3-VL MoE (30B-A3B)",
        "qwen3_vl_moe",
        _wrapped("qwen3_vl", **EXPERTS, num_local_experts=5),
        "model.language_model.layers.1.mlp.experts.gate_up_proj",
    ),
    "mistral-small-4": Published(
        "Mistral Small 4",
        "mistral3",
        _wrapped(
            "mistral3",
            model_type="mistral4",
            num_key_value_heads=4,
            head_dim=16,
            **_SHARED,
            **_MLA,
            rope_parameters=_MISTRAL_4_ROPE,
        ),
        "language_model.model.layers.1.mlp.experts.gate_up_proj_scale_inv",
        quantized=with_values(fp8_with_stacks),
    ),
    "kimi-k2.5": Published(
        "Kimi K2.5, K2.6",
        "kimi_k25",
        {
            "text_config": {
                **COMMON,
                **FAMILIES["deepseek_v3"],
                "model_type": "kimi_k2",
                "hidden_size": 64,
                "vocab_size": ROWS,
            }
            | {
                "moe_intermediate_size": 32,
                "n_shared_experts": 1,
                "n_group": 1,
                "rope_parameters": _YARN,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "projection_hidden_size": 24,
            **dict.fromkeys(
                (
                    "image_token_id",
                    "video_token_id",
                    "vision_start_token_id",
                    "vision_end_token_id",
                ),
                IMAGE,
            ),
            "tie_word_embeddings": False,
        },
        "language_model.model.layers.1.mlp.experts.3.down_proj.weight_packed",
        quantized=int4_experts,
    ),
    "llama-4": Published(
        "Llama 4 Scout, Maverick",
        "llama4",
        _wrapped("llama4", attention_chunk_size=8, num_hidden_layers=2, no_rope_layers=[1, 0]),
        "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
    ),
    "gpt-oss": Published(
        "gpt-oss 20B, 120B",
        "gpt_oss",
        {**FAMILIES["gpt_oss"], "hidden_size": 64},
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
    ),
    "nemotron-3": Published(
        "Nemotron 3 Nano",
        "nemotron_h",
        FAMILIES["nemotron_h"],
        "backbone.layers.1.mixer.experts.4.up_proj.weight",
    ),
    "kimi-linear": Published(
        "Kimi Linear",
        "kimi_linear",
        FAMILIES["kimi_linear"],
        "model.layers.0.self_attn.q_conv1d.weight",
    ),
    "olmo-hybrid": Published(
        "OLMo hybrid",
        "olmo_hybrid",
        FAMILIES["olmo_hybrid"],
        "model.layers.0.linear_attn.q_conv1d.weight",
    ),
    "ernie-4.5-moe": Published(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        FAMILIES["ernie4_5_moe"],
        "model.layers.1.mlp.moe_statics.e_score_correction_bias",
    ),
    "falcon-h1": Published(
        "Falcon-H1",
        "falcon_h1",
        FAMILIES["falcon_h1"],
        "model.layers.0.feed_forward.gate_proj.weight",
    ),
    "deepseek-v3.2": Published(
        "DeepSeek V3.2",
        "deepseek_v32",
        {**_SHARED, **_MLA, **_INDEXED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "model.layers.0.self_attn.indexer.wk.weight",
    ),
    "glm-5": Published(
        "GLM-5",
        "glm_moe_dsa",
        {**_SHARED, **_MLA, **_INDEXED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "model.layers.0.self_attn.indexer.wk.weight",
    ),
    "jamba": Published(
        "Jamba",
        "jamba",
        FAMILIES["jamba"],
        "model.layers.1.feed_forward.experts.4.down_proj.weight",
    ),
    "phi-4-multimodal": Published(
        "Phi-4 multimodal",
        "phi4_multimodal",
        {
            "vision_config": {},
            "rope_parameters": _PARTLY_LONG,
            "original_max_position_embeddings": 16,
        },
        "model.embed_tokens_extend.image_embed.img_projection_up.weight",
    ),
    "llama-3.2-vision": Published(
        "Llama 3.2 Vision 11B, 90B",
        "mllama",
        {"text_config": {"model_type": "mllama_text_model", "rope_parameters": _LLAMA3}},
        "language_model.model.layers.1.cross_attn.q_proj.weight",
    ),
    "qwen-2.5-omni": Published(
        "Qwen2.5-Omni",
        "qwen2_5_omni",
        {"thinker_config": {"text_config": {"model_type": "qwen2_5_omni_text"}}},
        "thinker.model.layers.0.self_attn.q_proj.weight",
    ),
}
"""Every base that the documentation says works."""
WRAPPED = frozenset(WRAPPERS) | {"gemma3n", "kimi_k25", "qwen3_5_moe", "qwen3_vl_moe"}
COMPOSITES = frozenset({"mllama", "phi4_multimodal", "qwen2_5_omni"})
"""Types whose towers are made small by the names of their numbers."""


RELEASED_TEMPLATES: dict[str, str] = {
    "llama-3": "llama 3.2",
    "mistral": "mistral nemo",
    **dict.fromkeys(("qwen-3", "qwen-3-moe"), "qwen 3"),
    "phi-4": "phi 4",
    **dict.fromkeys(("deepseek-v3", "deepseek-v3-fp8"), "deepseek r1"),
    "glm-4.5": "glm 4.5",
    "granite-4": "granite 4",
    "minimax-m2": "minimax m2",
    **dict.fromkeys(("qwen-3.5", "qwen-3.5-moe", "qwen-3.5-moe-fp8"), "qwen 3.5"),
    "gemma-4-31b": "gemma 4",
    "mistral-small-3": "mistral small",
    "gpt-oss": "gpt-oss",
    "nemotron-3": "nemotron 3",
}
"""Base → its chat template as it was released, which tests of data render
(tests/support/chat_templates_by_family).
"""
NO_TOKENIZER: dict[str, str] = dict.fromkeys(("kimi-k2.5", "kimi-linear"), "tiktoken.model")
"""Base → the vocabulary that it is released with in place of a tokenizer.json: as released it
cannot be trained on.
"""


def save_published(name: str, folder: Path) -> Path:
    """A random model in the layout that the base is published in, with a tokenizer of 259
    tokens.
    """
    base = BASES[name]
    torch.manual_seed(0)
    if base.kind in COMPOSITES:
        assert save_composite(base.kind, folder, base.config)
        save_tokenizer(folder)
        _write_as_published(folder / "config.json", base)
        return folder
    if base.kind in WRAPPED:
        # Some write into what they are given.
        config = AutoConfig.for_model(base.kind, **deepcopy(base.config))
        with small_timm():
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    else:
        config = AutoConfig.for_model(base.kind, **{**COMMON, **base.config, "vocab_size": ROWS})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    if base.kind in AS_PUBLISHED and not base.as_saved:
        file = folder / "model.safetensors"
        save_file(AS_PUBLISHED[base.kind](load_file(file)), file, metadata={"format": "pt"})
    if base.kind == "gpt_oss":
        mxfp4_experts(folder)
    if base.quantized is not None:
        base.quantized(folder)
    assert base.holds in read_header(folder / "model.safetensors").tensors
    save_tokenizer(folder)
    _write_as_published(folder / "config.json", base)
    return folder


def mxfp4_experts(folder: Path) -> None:
    """Put codes and powers of two in place of a tiny gpt-oss' experts, and say so in its config."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        powers = torch.randint(
            119, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": powers}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_as_published(path: Path, base: Published) -> None:
    """Give a config.json the keys of its time: most bases were published before `rope_parameters`
    and `dtype`.
    """
    config = json.loads(path.read_text())
    for section in (config, config.get("text_config")):
        rope = section.pop("rope_parameters", None) if isinstance(section, dict) else None
        if rope is not None and "rope_theta" in rope:
            section["rope_theta"] = rope.pop("rope_theta")
            if rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
                section["rope_scaling"] = rope
        elif rope is not None:
            section["rope_parameters"] = rope  # one of each kind of layer
        if section is not None and "dtype" in section:
            section["torch_dtype"] = section.pop("dtype")
    if "model_type" in base.config.get("text_config", {}):
        config["text_config"]["model_type"] = base.config["text_config"]["model_type"]
    path.write_text(
        json.dumps({**config, "transformers_version": "4.56.0", **base.extra}, indent=2)
    )
