"""Tiny bases of every causal model type that transformers has, made from the names that configs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
        config = AutoConfig.for_model(kind, **{**values, "vocab_size": VOCABULARY})
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in _on_meta(config).parameters()) > 20_000_000:
            return None
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    except Exception:  # configs check themselves in many ways
        return None
    return folder


def _on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
