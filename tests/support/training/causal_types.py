"""Tiny bases of every causal model type that transformers has, made from the names that configs
have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.aria import modeling_aria
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.doge import modeling_doge

from tests.support.training.left_out import leave_out_defaults
from tests.support.training.models import COMMON, FAMILIES, VOCABULARY

LARGEST = 20_000_000
"""Parameters of a base that is still tiny."""
ROWS = 272
"""Of an embedding with rows for the tests' tokenizer, 259 tokens, and for tokens that stand for
images or sounds.
"""
SMALL: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 2,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 128,
    "d_model": 48,
    "n_layers": 2,
    "num_layers": 2,
    "n_heads": 4,
    "d_ff": 96,
    "ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "word_embed_proj_dim": 48,
    "embedding_size": 48,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 6,
    "mamba_num_heads": 6,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "chunk_size": 8,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
    "layer_types": None,
}
"""Of a key's value only what the config knows is taken."""
_INDEXED = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}
"""Fewer keys than samples have tokens."""
SMALL_TYPES: dict[str, dict[str, Any]] = {
    "axk2": _INDEXED,
    "beam": {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 6},
    "bailing_hybrid": {
        "topk_group": 1,
        "num_expert_group": 1,
        "num_experts_per_token": 2,
        "layer_group_size": 2,
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"],
        **{**_INDEXED, "index_topk": 3},
        "sliding_window": 6,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "deepseek_v32": _INDEXED,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _INDEXED,
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_unified_text": {"initializer_range": 0.03},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "glm_moe_dsa": {**_INDEXED, "indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 12},
    "hy_v4": {**_INDEXED, "indexer_types": ["full", "shared"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {
        **{
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2},
    },
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        "layer_types": [
            "linear_attention",
            "full_attention",
        ],  # published so; transformers renames the second
        **{
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 6,
            "indexer_compress_ratio": 2,
        },
        **{
            "eos_token_id": 5,
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 100,
            "make_ngram_vocab_size_divisible_by": 8,
        },
    },
    "opt": {"init_std": 0.2},
    "stablelm": {"partial_rotary_factor": 0.5},
    "xglm": {"init_std": 0.2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs besides them."""
_SEVERAL = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
OF_SEVERAL = sorted(
    {kind for name in _SEVERAL for kind in getattr(modeling_auto, name, {})}
    & CONFIG_MAPPING_NAMES.keys()
)
"""Types that are made of several models, as far as this version of transformers knows them."""
TYPES = sorted(
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())
    - set(OF_SEVERAL)
)
"""Types of one model."""

REFUSED_HERE = {
    kind: words
    for kind, words, there in (
        ("aria", "AriaGroupedExpertsGemm", hasattr(modeling_aria, "AriaGroupedExpertsGemm")),
        ("aria_text", "AriaGroupedExpertsGemm", hasattr(modeling_aria, "AriaGroupedExpertsGemm")),
        (
            "doge",
            "tokens see those behind them",
            "create_masks_for_generate" not in vars(modeling_doge.DogeForCausalLM),
        ),
    )
    if there
}
"""Types that this version of transformers has in a form that the worker refuses, and the words; the
plan knows no versions. 5.17 leaves out the mask that Doge adds its own to.
"""


def small_values(kind: str, known: Mapping[str, Any], rows: int = VOCABULARY) -> dict[str, Any]:
    """What makes a small decoder of a type.

    `known`: what its config says by itself; `rows`: of its embedding.
    """
    latent = {"num_key_value_heads": 4, "head_dim": 8} if "qk_rope_head_dim" in known else {}
    common = {key: value for key, value in {**SMALL, **latent}.items() if key in known}
    values = {**COMMON, **FAMILIES[kind]} if kind in FAMILIES else common
    own = SMALL_TYPES.get(kind, {})
    return {
        **values,
        **own,
        **{key: rows for key in ("vocab_size", *own) if key.startswith("vocab_size")},
    }


def save_type(kind: str, folder: Path, rows: int = VOCABULARY) -> bool:
    """A tiny random base in the published layout; returns whether these values make a model of this
    type.

    Where they do not, there is a config and one tensor: enough to refuse it.
    """
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(
            kind, **small_values(kind, AutoConfig.for_model(kind).to_dict(), rows)
        )
        with torch.device("meta"):
            parameters = sum(
                p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()
            )
        model = (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            if parameters <= LARGEST
            else None
        )
    except Exception:  # configs check themselves in many ways
        model = None
    if model is None:
        save_config_only(kind, folder)
        return False
    show_vectors(model)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    prefix = {"deepseek_v4": "model.", "gpt2": "transformer."}.get(kind)
    if prefix is not None:  # published without it, and saving leaves it
        _without_prefix(folder / "model.safetensors", prefix)
    return True


def save_config_only(kind: str, folder: Path) -> None:
    """A base of which nothing but its config can be looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file(
        {"model.norm.weight": torch.ones(8)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def show_vectors(model: PreTrainedModel) -> None:
    """Give norms, biases and scales, and what else starts as ones and zeros, values that show
    whether they are used.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
                tensor += 0.2 * torch.randn_like(tensor)


def _without_prefix(file: Path, prefix: str) -> None:
    held = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})
