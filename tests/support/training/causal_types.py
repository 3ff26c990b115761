"""Tiny bases of every causal model type that transformers has, made from the names that configs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.training.models import COMMON, FAMILIES, VOCABULARY

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
    "bailing_hybrid": {"topk_group": 1, "num_expert_group": 1, "num_experts_per_token": 2, "layer_group_size": 2},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "deepseek_v32": _INDEXED,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _INDEXED,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_unified_text": {"initializer_range": 0.05},
    "glm_moe_dsa": {**_INDEXED, "indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 12},
    "hy_v4": {**_INDEXED, "indexer_types": ["full", "shared"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"block_size": 8},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "stablelm": {"partial_rotary_factor": 0.5},
    "xglm": {"init_std": 0.2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs beside them."""
_SEVERAL = "made of several models, of which tests of wrapped and of published bases have those that people tune"
_LARGE = "no small model of it: its parts have sizes of their own"
NOT_MADE: dict[str, str] = {
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "phi4_multimodal", "qwen3_5"), _SEVERAL),
    **dict.fromkeys(("qwen3_5_moe", "qwen4_exp", "mllama", "dots3_note", "moss_transcribe_diarize"), _SEVERAL),
    **dict.fromkeys(("emu3", "fuyu", "git", "got_ocr2", "musicgen", "musicgen_melody"), _SEVERAL),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, and is none by itself"),
    **dict.fromkeys(("blt", "dbrx", "mamba2", "xlm", "zamba"), _LARGE),
    "reformer": "is no decoder unless its config says so",
}
"""Types of which no base is made here, and why."""
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())


def save_type(kind: str, folder: Path) -> Path | None:
    """A tiny random base in the published layout. None: these values make no model of this type."""
    torch.manual_seed(0)
    try:
        known = AutoConfig.for_model(kind).to_dict()
        latent = {"num_key_value_heads": 4, "head_dim": 8} if "qk_rope_head_dim" in known else {}
        values = (
            {**COMMON, **FAMILIES[kind]} if kind in FAMILIES else {k: v for k, v in {**SMALL, **latent}.items() if k in known}
        )
        config = AutoConfig.for_model(kind, **{**values, **SMALL_TYPES.get(kind, {}), "vocab_size": VOCABULARY})
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in _on_meta(config).parameters()) > 20_000_000:
            return None
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    except Exception:  # configs check themselves in many ways
        return None
    if kind == "deepseek_v4":  # published without it, and saving leaves it
        _without_prefix(folder / "model.safetensors", "model.")
    return folder


def _without_prefix(file: Path, prefix: str) -> None:
    held = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


def _on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
