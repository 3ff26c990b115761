"""Bases of a published size of which config.json and the index are here: a plan needs no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
_MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
}


def save_gpt_oss(folder: Path, **changes: Any) -> Path:
    """gpt-oss 20B, its experts in MXFP4."""
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}

    def names(name: str) -> list[str]:
        return (
            [f"{name}_blocks", f"{name}_scales"]
            if name.endswith(("up_proj", "down_proj"))
            else [name]
        )

    return _save(folder, {**GPT_OSS_20B, **changes}, quantization, names)


def save_qwen3(folder: Path, **changes: Any) -> Path:
    """Qwen3 30B-A3B, its linear layers and experts in modelopt's NVFP4."""

    def coded(stem: str) -> list[str]:
        return [
            f"{stem}.{part}" for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")
        ]

    def names(name: str) -> list[str]:
        before, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            experts = range(int(config["num_experts"]))
            return [
                tensor
                for expert in experts
                for part in parts
                for tensor in coded(f"{before}.{expert}.{part}")
            ]
        return coded(before) if before.endswith("_proj") else [name]

    config = {**QWEN3_30B, **changes}
    return _save(folder, config, _MODELOPT, names)


def _save(
    folder: Path,
    config: dict[str, Any],
    quantization: dict[str, Any],
    names: Callable[[str], list[str]],
) -> Path:
    """`names`: a parameter's name → those of the tensors that hold it."""
    import torch  # seconds, for tests that need it
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    held = [tensor for name, _ in model.named_parameters() for tensor in names(name)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    index = dict.fromkeys(held, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
