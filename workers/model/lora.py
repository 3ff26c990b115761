"""Adapters by PEFT: which modules get one, of which rank, in words that tools which load adapters understand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import LoraOptions, match_pattern
from workers.model.experts import ExpertsLinear
from workers.model.linear import LoraLinear

EXPERT_WORDS = frozenset({"gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "experts"})
"""Last names that PEFT, in a mixture of experts, takes for the experts or their router wherever they stand."""

T = TypeVar("T", int, float)


def add_adapters(model: PreTrainedModel, lora: LoraOptions) -> PeftModel:
    """Wrap by PEFT, on meta, with fp32 adapters. Raises SpecError for names and patterns that match nothing."""
    chosen = adapted_modules(model, lora)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # pyright: ignore[reportArgumentType]  a float is fine: it is only divided by r
        target_modules=shortest_names(model, chosen),
        rank_pattern=_by_module(model, chosen, lora.rank_pattern, lora.r, "lora.rank_pattern"),
        alpha_pattern=_by_module(model, chosen, lora.alpha_pattern, lora.lora_alpha, "lora.alpha_pattern"),
        use_rslora=lora.use_rslora,
        init_lora_weights=True,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: LoraLinear})
    peft_model = get_peft_model(model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=True)
    assert isinstance(peft_model, PeftModel)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32, "adapters are fp32 masters"
    return peft_model


def adapted_modules(model: PreTrainedModel, lora: LoraOptions) -> list[str]:
    """Full names of the linear layers that get an adapter, in the model's order. Raises SpecError where there are none."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    experts = [name for name, module in model.named_modules() if isinstance(module, ExpertsLinear)]
    barred = [name for name in names if experts and _last(name) in EXPERT_WORDS]
    allowed = [name for name in names if name not in barred]
    wanted = lora.target_modules
    if wanted == "all-linear":
        return _matches("all-linear", allowed, allowed)
    if isinstance(wanted, str):
        _refuse_experts(wanted, match_pattern(wanted, experts + barred))
        return _matches(wanted, match_pattern(wanted, allowed), allowed)
    chosen: set[str] = set()
    for word in wanted:
        _refuse_experts(word, [word] if experts and _last(word) in EXPERT_WORDS else [])
        chosen.update(_matches(word, [name for name in allowed if f".{name}".endswith(f".{word}")], allowed))
    return [name for name in allowed if name in chosen]


def shortest_names(model: nn.Module, chosen: list[str]) -> list[str]:
    """Last names where these say the same as full names (as tools that load adapters expect), else the full names."""
    lasts = {_last(name) for name in chosen}
    by_lasts = [name for name, _ in model.named_modules() if _last(name) in lasts]
    return sorted(lasts) if by_lasts == chosen else chosen


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(wanted: str, found: list[str], allowed: list[str]) -> list[str]:
    if found:
        return found
    kinds = ", ".join(sorted({_last(name) for name in allowed})) or "none that an adapter can be put on"
    raise SpecError(
        f"lora.target_modules: {wanted!r} matches no linear layer of this model; it has {kinds}.", param="lora.target_modules"
    )


def _refuse_experts(wanted: str, matched: list[str]) -> None:
    if not matched:
        return
    raise SpecError(
        f"lora.target_modules: {wanted!r} names {matched[0]!r}. In a mixture of experts, adapters on experts, on routers and "
        "on dense layers with an expert's name are not supported: name attention layers, or say all-linear, which leaves "
        "these out.",
        param="lora.target_modules",
    )


def _by_module(model: nn.Module, chosen: list[str], patterns: Mapping[str, T], default: T, field: str) -> dict[str, T]:
    """Patterns → values by module names that no tool can read differently; the first pattern that matches wins, as in PEFT."""
    values: dict[str, T] = {}
    for pattern, value in patterns.items():
        matched = match_pattern(rf"(.*\.)?({pattern})", chosen)
        if not matched:
            raise SpecError(f"{field}: the pattern {pattern!r} matches none of the adapted modules.", param=field)
        for name in matched:
            values.setdefault(name, value)
    found: dict[str, T] = {}
    for value in sorted({value for value in values.values() if value != default}):
        names = [name for name in chosen if values.get(name) == value]
        found.update({re.escape(name): value for name in shortest_names(model, names)})
    return found
