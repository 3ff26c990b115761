"""Adapters by stock PEFT, and what stock PEFT makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

IDS = torch.arange(40).reshape(2, 20) + 60


def save_adapter(
    base: Path,
    folder: Path,
    *,
    model: Any = None,
    save_embedding_layers: bool | str = "auto",
    **options: Any,
) -> Path:
    """An adapter by stock PEFT with no zero in it.

    `model`: the base as it is loaded; None: as transformers does, in fp32. `save_embedding_layers`:
    PEFT's own, whether the base's embedding and head are in the file too.
    """
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
            **options,
        }
    )
    plain = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) if model is None else model
    )
    model = get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder), save_embedding_layers=save_embedding_layers)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> Any:
    """In fp32: the exact sum, before anything is rounded."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
