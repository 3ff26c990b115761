"""Tiny random bases of several models, saved by the class that they are published as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.training.left_out import leave_out_defaults
from tests.support.training.models import COMMON, GROUPED

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT: dict[str, Any] = {**COMMON, **GROUPED, "head_dim": 12}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
}

WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 6},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 250,
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 250,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": _QWEN_VISION,
        "image_token_id": 250,
        "video_token_id": 251,
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {
            **_QWEN_VISION,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        "image_token_id": 250,
        "video_token_id": 251,
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 250,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 12,
        },
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
        "image_token_id": 250,
        "video_token_id": 251,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **VISION,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "position_embedding_size": 16,
        },
        "image_token_id": 250,
        "tie_word_embeddings": True,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 250,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": 250,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "intermediate_size_mlp": 56,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "use_qk_norm": False,
        },
        "vision_config": {
            **VISION,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        "image_token_index": 250,
        "tie_word_embeddings": False,
    },
}
"""Model type of the published config → its tiny config."""


def save_wrapped(family: str, folder: Path, **changes: Any) -> Path:
    """A random model in bf16 safetensors in the published layout, whose norms and biases show
    whether they are used.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**WRAPPERS[family], **changes})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    return folder
