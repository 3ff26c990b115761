"""Adapters that the preview refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions
from tests.support.training.models import OF_EXPERTS, adapter_value, save_tiny
from workers.serving.batched_adapters import Adapters
from workers.serving.model import ServedModel

FP32 = PrecisionOptions(compute="fp32")


def saved_adapter(
    base: Path, family: str, folder: Path, seed: int, **options: Any
) -> torch.nn.Module:
    """A random adapter by plain PEFT, saved; with the model that it is on."""
    capped = AutoConfig.from_pretrained(base).to_dict().get("attn_logit_softcapping")
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager" if capped else None
    )
    targets = OF_EXPERTS.get(family, "all-linear")
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **options
    )
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter_value(name, parameter.shape, seed))
    tuned.save_pretrained(str(folder))
    return tuned.eval()


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    saved_adapter(save_tiny("llama", tmp_path / "wide", hidden_size=64), "llama", tmp_path / "a", 1)
    served = ServedModel(
        str(save_tiny("llama", tmp_path / "base")), FP32, torch.device("cpu"), None
    )
    with pytest.raises(SpecError, match="of another base"):
        served.adapters.get(str(tmp_path / "a"))


def test_adapters_on_stacks_of_experts_are_refused_by_name() -> None:
    files: Any = SimpleNamespace(
        replaced={}, config=SimpleNamespace(target_parameters=["mlp.experts.down_proj"])
    )
    with pytest.raises(SpecError, match=r"stacks of experts \(lora.target_parameters\)"):
        Adapters(torch.nn.Linear(2, 2), torch.float32, torch.device("cpu"))._load(files)
