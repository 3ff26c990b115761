"""Tiny bases of every type of transformers that is made of several models, from the names that
their configs have in common.

The text part is what `causal_types` makes of its type; towers get small numbers by name. What still
makes no small model is saved as a config and one tensor: enough to refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from tests.support.training.causal_types import ROWS, save_config_only, show_vectors, small_values
from tests.support.training.checks import published_as, small_timm
from tests.support.training.left_out import leave_out_defaults
from tests.support.training.models import HIDDEN

IMAGE = 270
OTHER = 271
LARGEST = 60_000_000
"""Parameters of a base that a test can load: not all towers get small by their numbers' names."""

TOWER: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "embed_dim",
            "d_model",
            "width",
            "projection_dim",
            "hidden_dim",
            "vision_hidden_size",
        ),
        16,
    ),
    **dict.fromkeys(
        ("intermediate_size", "mlp_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 24
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "projector_hidden_size",
            "projection_hidden_size",
            "adapter_input_size",
        ),
        24,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "depth",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "n_layers",
            "num_blocks",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_heads",
            "attention_heads",
            "encoder_attention_heads",
            "n_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "decoder_attention_heads", "resampler_depth", "resampler_n_heads"),
        2,
    ),
    **dict.fromkeys(("head_dim", "dim_head", "resampler_head_dim", "resampler_dim_head"), 8),
    **dict.fromkeys(
        (
            "out_hidden_size",
            "output_dim",
            "text_hidden_size",
            "adapter_out_dim",
            "output_proj_dims",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("vocab_size", "codebook_size", "codebook_vocab_size", "num_embeddings"), 32),
    **dict.fromkeys(
        ("base_channels", "latent_channels", "output_channels", "downsample_hidden_size"), 16
    ),
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "alignment_intermediate_size": 32,
    "num_experts_per_tok": 1,
    "max_source_positions": 16,
    "layer_types": None,
    "mlp_layer_types": None,
}
"""Of a key's value only what the config knows is taken."""
_MROPE = {
    "text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    }
}
_WIDE_MROPE = {
    "text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    }
}
_HALF_MROPE = {
    "text_config": {
        "rope_parameters": {**_MROPE["text_config"]["rope_parameters"], "mrope_section": [1, 1, 1]}
    }
}
_SMALL_ENCODER = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_SMALL_CODES = {"base_channels": 32, "latent_channels": 32, "embed_dim": 32}
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
        _MROPE,
    ),
    "glm4v_moe": _HALF_MROPE,
    **dict.fromkeys(("hunyuan_vl", "paddleocr_vl"), _WIDE_MROPE),
    "chameleon": {"vocabulary_map": {"<image>": 9}, "vq_config": {"base_channels": 32}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
        "vision_config": {"sam_config": {"downsample_channels": [16, 16]}},
    },
    "mistral4": {"head_dim": 16},
    "mistral_large4": {"text_config": {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}},
    "emu3": {"vq_config": _SMALL_CODES, "vocabulary_map": {"<image>": 9}},
    "janus": {"vq_config": _SMALL_CODES},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 16}}},
    "qwen2_5_omni": {
        "thinker_config": _MROPE,
        "talker_config": {"rope_parameters": _MROPE["text_config"]["rope_parameters"]},
        "token2wav_config": {
            "bigvgan_config": {"upsample_initial_channel": 64},
            "dit_config": {"mel_dim": 80},
        },
    },
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": {"shared_expert_intermediate_size": 24},
            "spatial_merge_size": 2,
        },
    },
    "mllama": {"text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1]}},
    "dots3_note": {
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": 16},
        "audio_config": {"adapter_input_size": 16},
    },
    "ernie4_5_vl_moe": {
        "text_config": {**_MROPE["text_config"], "moe_intermediate_size": [32, 32], "moe_k": 2},
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": HIDDEN, "intermediate_size": HIDDEN // 4}},
    "glm5_next": {
        "text_config": {
            **{"qk_rope_head_dim": 0, "head_dim": 0, "linear_num_heads": 2, "linear_head_dim": 16},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 6, "index_kpool": 2},
            **{
                "layer_types": ["linear_attention", "indexed_attention"],
                "mlp_layer_types": ["dense", "sparse"],
            },
        },
    },
    "granite4_vision": {
        "text_config": {
            "model_type": "granite4_vision_text"
        },  # transformers 5.17 takes another if none is named
        "vision_config": {"hidden_size": 64, "projection_dim": 64},
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0],
        "downsample_rate": "1/2",
    },
    "granite_docling": {"text_config": {"logits_scaling": 1.0}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 16, 16]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "ovis2": {"hidden_size": HIDDEN, "vocab_size": ROWS},
    "step3p7": {
        "text_config": {
            **{"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
            **{
                "mlp_layer_types": ["dense", "sparse"],
                "share_expert_dim": 40,
                "moe_router_scaling_factor": 1.5,
            },
            **{"swiglu_limits": [None, 0.05], "swiglu_limits_shared": [None, 0.04]},
        },
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _SMALL_ENCODER,
        "semantic_tokenizer_encoder_config": _SMALL_ENCODER,
    },
}
"""What a type needs besides them: its config's values by key, of parts below their names."""


def _turned_experts(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.mT.contiguous() if tensor.ndim == 3 and ".experts." in name else tensor
        for name, tensor in held.items()
    }


_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.\d+\.(?P<matrix>gate|up|down)_proj\.weight")


def _stacked_experts(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts in stacks, gate above up; and a layer that predicts a further token, which nothing
    here reads.
    """
    kept = {name: tensor for name, tensor in held.items() if not _EXPERT.fullmatch(name)}
    for stack in {match["stack"] for name in held if (match := _EXPERT.fullmatch(name))}:
        count = sum(
            name.startswith(f"{stack}.") and name.endswith(".down_proj.weight") for name in held
        )
        gate, up, down = (
            torch.stack([held[f"{stack}.{i}.{matrix}_proj.weight"] for i in range(count)])
            for matrix in ("gate", "up", "down")
        )
        kept |= {f"{stack}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stack}.down_proj": down}
        kept[f"mtp.layers.0.mlp.experts.{len(kept)}.down_proj.weight"] = down[0].clone()
    return kept


def _with_keys_of_all_layers(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of layers too that take those of others."""
    first = "model.language_model.layers.0.self_attn."
    own = {
        name.removeprefix(first): t
        for name, t in held.items()
        if re.match(rf"{re.escape(first)}[kv]_(proj|norm)\.", name)
    }
    return {
        **held,
        **{
            f"{first.replace('.0.', f'.{n}.')}{name}": t.clone()
            for n in (2, 3)
            for name, t in own.items()
        },
    }


AS_PUBLISHED: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "gemma3n": _with_keys_of_all_layers,
    "kimi_k25": lambda held: {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): t
        for name, t in held.items()
    },
    "qwen3_5_moe": _stacked_experts,
    "qwen3_vl_moe": _turned_experts,
}
"""Type → its files as they were published, where saving writes them otherwise."""


EXACT = frozenset(
    {
        *(
            "aria",
            "aya_vision",
            "blip-2",
            "chameleon",
            "cohere2_vision",
            "cohere_compass",
            "cosmos3_edge",
            "cosmos3_omni",
        ),
        *(
            "deepseek_ocr2",
            "deepseek_vl",
            "deepseek_vl_hybrid",
            "dots3_note",
            "emu3",
            "evolla",
            "exaone4_5",
            "fast_vlm",
        ),
        *(
            "fun_asr_nano",
            "fuyu",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_unified",
            "git",
            "glm46v",
            "glm4v",
            "glm4v_moe",
        ),
        *(
            "glm5_next",
            "glm_ocr",
            "glmasr",
            "glmga",
            "got_ocr2",
            "granite4_vision",
            "granite_docling",
            "granite_speech",
        ),
        *(
            "granite_speech_plus",
            "hunyuan_vl",
            "hyperclovax_vision_v2",
            "idefics2",
            "idefics3",
            "instructblip",
        ),
        *(
            "instructblipvideo",
            "internvl",
            "janus",
            "kimi_k25",
            "lfm2_vl",
            "lfm3_vl",
            "lighton_ocr",
            "llama4",
            "llava",
        ),
        *(
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
        ),
        *(
            "minimax_m3_vl",
            "mistral3",
            "mistral4",
            "mistral_large4",
            "mllama",
            "moss_transcribe_diarize",
            "muse_glimmer",
        ),
        *(
            "muse_spark",
            "nemotron_h_omni",
            "ovis2",
            "paddleocr_vl",
            "perception_lm",
            "phi4_multimodal",
            "pp_chart2table",
        ),
        *(
            "qianfan_ocr",
            "qwen2_5_omni",
            "qwen2_5_omni_thinker",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_vl",
            "qwen3_5",
        ),
        *(
            "qwen3_5_moe",
            "qwen3_asr",
            "qwen3_omni_moe",
            "qwen3_omni_moe_thinker",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen4_exp",
        ),
        *(
            "smolvlm",
            "step3p7",
            "vibevoice_asr",
            "video_llama_3",
            "video_llava",
            "vipllava",
            "voxtral",
        ),
    }
)
"""Types whose text part trains exactly; all others are refused."""
_WITH_INNER_MODEL = {
    "qwen2_5_omni": hasattr(modeling_qwen2_5_omni, "Qwen2_5OmniThinkerModel"),
    "qwen3_omni_moe": hasattr(modeling_qwen3_omni_moe, "Qwen3OmniMoeThinkerModel"),
}
NAMED_OTHERWISE = frozenset(
    name
    for kind, there in _WITH_INNER_MODEL.items()
    if not there
    for name in (kind, f"{kind}_thinker")
)
"""Types whose decoder this version of transformers (5.17) has in another place than later ones,
after which the plan names it: as many adapters, under other names.
"""


def save_composite(
    kind: str, folder: Path, values: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """A random base in bf16, in the layout in which its type is published; returns whether these
    values make one. `values`: of its config, besides the small ones.

    Where they do not, there is a config and one tensor: enough to refuse it.
    """
    torch.manual_seed(0)
    try:
        model = small_model(small_config(kind, values))
    except (
        Exception
    ):  # configs check themselves in many ways, and some classes need packages that are not here
        model = None
    if model is None:
        save_config_only(kind, folder)
        return False
    show_vectors(model)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    if kind == "qwen2_5_omni":  # its class asks for the voices
        torch.save({}, folder / "spk_dict.pt")
    if kind in AS_PUBLISHED:
        file = folder / "model.safetensors"
        save_file(AS_PUBLISHED[kind](load_file(file)), file, metadata={"format": "pt"})
    return True


def small_config(kind: str, values: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    """A config of a type of several models with small numbers in all its parts.

    `values`: others, part by part.
    """
    known = AutoConfig.for_model(kind)
    text = known.get_text_config(decoder=True)
    small = _joined(_small(known, text), BESIDE.get(kind, {}))
    return AutoConfig.for_model(kind, **_joined(small, values))


def small_model(config: PreTrainedConfig) -> PreTrainedModel | None:
    """A random model of the class that a config is published as. None: it is too large."""
    published = published_as(config)
    with small_timm():
        with torch.device("meta"):
            model = published._from_config(config, dtype=torch.bfloat16)
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            return None
        return published._from_config(config, dtype=torch.bfloat16)


def _small(config: PreTrainedConfig, text: PreTrainedConfig) -> dict[str, Any]:
    known = config.to_dict()
    if config is text:
        values = small_values(config.model_type, known, ROWS)
    else:
        values = {key: _like(known[key], value) for key, value in TOWER.items() if key in known}
    for key, value in known.items():
        if (
            isinstance(value, int)
            and value >= ROWS
            and key.endswith(("token_id", "token_index", "_id"))
        ):
            values[key] = min(
                IMAGE if "image" in key else OTHER, values.get("vocab_size", ROWS) - 1
            )
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if isinstance(inner, PreTrainedConfig):
            values[part] = {"model_type": inner.model_type, **_small(inner, text)}
    if "tie_word_embeddings" in known:
        values.setdefault("tie_word_embeddings", False)
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        width = values.get("head_dim") or HIDDEN // 4
        values["rope_parameters"] = {**rope, "mrope_section": [width // 2 - 4, 2, 2]}
    return values


def _like(known: Any, value: Any) -> Any:
    """A value in the form that a config has it in."""
    if isinstance(known, (list, tuple)) and isinstance(value, int):
        return [value] * len(known)
    return value


def _joined(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others, part by part, in their place."""
    joined = dict(values)
    for key, value in other.items():
        joined[key] = _joined(joined.get(key) or {}, value) if isinstance(value, Mapping) else value
    return joined
