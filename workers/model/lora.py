"""Adapters by PEFT: which modules get one, and of which rank, written so that tools which load adapters understand it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ft_service.bases.families.known import family_of
from ft_service.bases.module_rules import choose_targets, last_name, values_by_module
from ft_service.errors import SpecError
from ft_service.spec import LoraOptions
from workers.layers.dropout import Dropping
from workers.layers.experts import ExpertsLinear
from workers.layers.linear import FrozenLinear, LoraLinear
from workers.model.wrapped import names_of_towers

T = TypeVar("T", int, float)


def add_adapters(model: PreTrainedModel, lora: LoraOptions) -> PeftModel:
    """Wrap a model on meta by PEFT, with fp32 adapters. Raises SpecError for names and patterns that match nothing."""
    chosen = adapted_modules(model, lora)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # pyright: ignore[reportArgumentType]  a float is fine: it is only divided by r
        target_modules=shortest_names(model, chosen),
        rank_pattern=_by_module(model, chosen, lora.rank_pattern, lora.r, "lora.rank_pattern"),
        alpha_pattern=_by_module(model, chosen, lora.alpha_pattern, lora.lora_alpha, "lora.alpha_pattern"),
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        init_lora_weights=True,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: LoraLinear})
    try:
        peft_model = get_peft_model(model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=True)
    except ValueError as error:  # PEFT knows modules that only look as if they could be adapted
        raise SpecError(f"lora.target_modules: {error}", param="lora.target_modules") from None
    assert isinstance(peft_model, PeftModel)
    if lora.lora_dropout:
        for name, module in model.named_modules():
            if isinstance(module, LoraLinear):
                module.dropping = Dropping(lora.lora_dropout, name)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32, "adapters are fp32 masters"
    return peft_model


def adapted_modules(model: PreTrainedModel, lora: LoraOptions) -> list[str]:
    """Full names of the linear layers that get an adapter, in the model's order. Raises SpecError where there are none.

    Subclasses of linear layers, such as routers, compute something else.
    """
    head = model.get_output_embeddings()
    names = [name for name, m in model.named_modules() if type(m) in (nn.Linear, FrozenLinear) and m is not head]
    experts = [name for name, module in model.named_modules() if isinstance(module, ExpertsLinear)]
    return choose_targets(names, experts, lora.target_modules, family_of(model.config.to_dict()))


def shortest_names(model: nn.Module, chosen: list[str]) -> list[str]:
    """Last parts of module names if they say the same as full names (tools that load adapters expect them), else full names."""
    lasts = {last_name(name) for name in chosen}
    names = [*(name for name, _ in model.named_modules()), *names_of_towers(model)]
    by_lasts = [name for name in names if last_name(name) in lasts]
    return sorted(lasts) if by_lasts == chosen else chosen


def _by_module(model: nn.Module, chosen: list[str], patterns: Mapping[str, T], default: T, field: str) -> dict[str, T]:
    """Patterns → values by module names that no tool can misread. As in PEFT the first pattern that matches wins."""
    values = values_by_module(chosen, patterns, field)
    by_name: dict[str, T] = {}
    for value in sorted({value for value in values.values() if value != default}):
        names = [name for name in chosen if values.get(name) == value]
        by_name.update({re.escape(name): value for name in shortest_names(model, names)})
    return by_name
