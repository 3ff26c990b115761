"""Adapters by PEFT: which modules get one, and of which rank, written so that tools which load
adapters understand it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import PreTrainedModel

from ft_service.bases.adapter_names import is_lora, peft_name
from ft_service.bases.module_rules import (
    NOTHING,
    choose_parameters,
    choose_targets,
    choose_tower_targets,
    last_name,
    named_apart,
    refuse_dora,
    refuse_dropout,
    values_by_module,
)
from ft_service.errors import SpecError
from ft_service.spec import LoraOptions, ServedAs
from workers.base.parameter_sources import turned_weights
from workers.layers.dropout import Dropping
from workers.layers.experts import ExpertsLinear, FrozenExperts, adapt_experts
from workers.layers.linear import FrozenLinear, LoraLinear
from workers.layers.served import ServedLinear
from workers.model.multimodal import has_unseen_towers, linears_of_towers, names_of_towers
from workers.model.renamed_adapters import settle_names
from workers.model.whole_modules import modules_trained_whole, outer_modules, train_whole

T = TypeVar("T", int, float)
_TOWERS = "_ft_towers"
"""Attribute of an adapter's config: full names of the modules of towers that may have adapters."""


def add_adapters(
    model: PreTrainedModel,
    lora: LoraOptions,
    *,
    shared_experts: bool,
    not_adapted: Mapping[str, str] = NOTHING,
    served_as: ServedAs | None = None,
) -> PeftModel:
    """Wrap a model on meta by PEFT, with fp32 adapters.

    `shared_experts`: the job's; `not_adapted`: as in `choose_targets`; `served_as`: the form to
    which linear layers round base and adapter together.

    Raises SpecError for names and patterns that match nothing, and for a base whose adapters PEFT
    could not load again.
    """
    chosen = adapted_modules(model, lora, shared_experts=shared_experts, not_adapted=not_adapted)
    stacks = adapted_stacks(model, lora, chosen)
    whole = modules_trained_whole(model, lora.modules_to_save)
    apart: list[str] = named_apart(chosen, expert_stacks(model))
    by_peft = [name for name in chosen if name not in apart]
    ranks = values_by_module([*chosen, *stacks], lora.rank_pattern, "lora.rank_pattern")
    alphas = values_by_module([*chosen, *stacks], lora.alpha_pattern, "lora.alpha_pattern")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # pyright: ignore[reportArgumentType]  a float is fine: it is only divided by r
        target_modules=shortest_names(model, by_peft) if by_peft else DUMMY_TARGET_MODULES,
        rank_pattern=_by_module(model, by_peft, ranks, lora.r),
        alpha_pattern=_by_module(model, by_peft, alphas, lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        init_lora_weights=True,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: LoraLinear if served_as is None else ServedLinear})
    try:
        peft_model = get_peft_model(
            model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=True
        )
    except ValueError as error:  # PEFT knows modules that only look as if they could be adapted
        raise SpecError(f"lora.target_modules: {error}", param="lora.target_modules") from None
    assert isinstance(peft_model, PeftModel)
    apart += [
        name for name in by_peft if not isinstance(model.get_submodule(name), LoraLayer)
    ]  # it took them for experts
    by_peft = [name for name in by_peft if name not in apart]
    refuse_dropout(lora.lora_dropout, apart)
    refuse_dora(lora.use_dora, apart)
    if stacks or apart:  # only now: PEFT would wrap other modules, and freeze what it does not know
        config.rank_pattern = _by_module(model, [*chosen, *stacks], ranks, lora.r)
        config.alpha_pattern = _by_module(model, [*chosen, *stacks], alphas, lora.lora_alpha)
        _adapt_apart(peft_model, config, apart)
        _adapt_stacks(model, stacks, lora, ranks, alphas)
        config.target_parameters = [
            *shortest_parameters(model, stacks),
            *(f"{name}.weight" for name in apart),
        ]
    # Of the published class, on which the adapter is put.
    config.fan_in_fan_out = bool(turned_weights(model))
    # PEFT shortens long lists by a model that has no towers.
    config.target_modules = shortest_names(model, by_peft)
    if lora.use_dora:  # only now: PEFT would compute the norms of weights that are on meta
        config.use_dora = True
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.add_magnitude()
    if served_as is not None:
        for module in model.modules():
            if isinstance(module, ServedLinear):
                module.served_as = served_as
    if lora.lora_dropout:
        for name, module in model.named_modules():
            if isinstance(module, LoraLinear):
                module.dropping = Dropping(lora.lora_dropout, name)
    tied = train_whole(model, whole)
    if whole:  # only now: PEFT would copy the modules
        config.modules_to_save = shortest_names(model, whole)
        config.ensure_weight_tying = bool(tied)
    trained = {
        name: parameter
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad
    }
    assert all(parameter.dtype == torch.float32 for parameter in trained.values()), (
        "adapters are fp32 masters"
    )
    tensors = {peft_name(name): p.detach() for name, p in trained.items()}
    in_towers = adapted_in_towers(model, lora)
    vars(config)[_TOWERS] = frozenset(in_towers)
    for name in in_towers:
        for matrix in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{matrix}.weight"] = torch.empty(1, 1, device="meta")
    settle_names(peft_model, config, tensors, tied)
    return peft_model


def linear_names(model: PreTrainedModel) -> list[str]:
    """Full names of the linear layers but the output head, in the model's order.

    Subclasses of linear layers, such as routers, compute something else.
    """
    head = model.get_output_embeddings()
    return [
        name
        for name, m in model.named_modules()
        if type(m) in (nn.Linear, FrozenLinear) and m is not head
    ]


def expert_stacks(model: nn.Module) -> list[str]:
    """Full names of the stacks of experts, in the model's order."""
    return [name for name, module in model.named_modules() if isinstance(module, ExpertsLinear)]


def adapted_modules(
    model: PreTrainedModel,
    lora: LoraOptions,
    *,
    shared_experts: bool,
    not_adapted: Mapping[str, str] = NOTHING,
) -> list[str]:
    """Full names of the linear layers that get an adapter, in the model's order.

    Raises SpecError where there are none, and for the name of one that cannot have any.
    """
    names = linear_names(model)
    experts = expert_stacks(model)
    return choose_targets(
        names,
        experts,
        lora.target_modules,
        shared_experts=shared_experts,
        not_adapted=not_adapted,
        outer=outer_modules(model),
        towers=linears_of_towers(model),
    )


def adapted_in_towers(model: PreTrainedModel, lora: LoraOptions) -> list[str]:
    """Full names of the linear layers outside the text part that get an adapter too, in jobs whose
    samples have pictures.
    """
    return choose_tower_targets(linears_of_towers(model), lora.target_modules, linear_names(model))


def name_towers(config: PeftConfig, tensors: Iterable[str]) -> None:
    """Let an adapter's config name the modules of towers that are among its tensors.

    `config`: as `add_adapters` made it; `tensors`: PEFT's names. Modules then have full names, by
    which PEFT finds no others.
    """
    modules = list(dict.fromkeys(name.partition(".lora_")[0] for name in tensors if is_lora(name)))
    plain = [name.removeprefix("base_model.model.") for name in modules]
    if set(plain) & vars(config).get(_TOWERS, frozenset()):
        config.target_modules = plain  # pyright: ignore[reportAttributeAccessIssue]


def adapted_stacks(model: PreTrainedModel, lora: LoraOptions, modules: list[str]) -> list[str]:
    """Full names of the stacks of experts that get an adapter besides `modules`.

    Raises SpecError for one that cannot.
    """
    experts = expert_stacks(model)
    return choose_parameters(experts, lora.target_parameters, lora.lora_dropout, modules)


def _adapt_apart(peft_model: PeftModel, config: LoraConfig, names: list[str]) -> None:
    """Put adapters on linear layers that PEFT would take for experts if they were named to it."""
    model = peft_model.get_base_model()
    for name in names:
        block, _, last = name.rpartition(".")
        parent = model.get_submodule(block)
        target = model.get_submodule(name)
        with torch.device("meta"):
            peft_model.base_model._create_and_replace(
                config, "default", target, last, parent, current_key=name
            )  # pyright: ignore


def _adapt_stacks(
    model: PreTrainedModel,
    stacks: list[str],
    lora: LoraOptions,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> None:
    for name in dict.fromkeys(stack.rpartition(".")[0] for stack in stacks):
        experts = model.get_submodule(name)
        assert isinstance(experts, FrozenExperts)
        own = [projection for projection in experts.projections if f"{name}.{projection}" in stacks]
        r = {projection: ranks.get(f"{name}.{projection}", lora.r) for projection in own}
        alpha = {
            projection: alphas.get(f"{name}.{projection}", lora.lora_alpha) for projection in own
        }
        scales = {
            projection: alpha[projection]
            / (math.sqrt(r[projection]) if lora.use_rslora else r[projection])
            for projection in own
        }
        adapt_experts(experts, r, scales)


def shortest_parameters(model: nn.Module, stacks: list[str]) -> list[str]:
    """Names of parameters by which PEFT finds these stacks and no others: without the layer's
    number if that says the same.
    """
    ends = {stack: re.sub(r"^.*?\.\d+\.", "", stack) for stack in stacks}
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, ExpertsLinear) and name not in stacks
    ]
    same = not any(f".{other}".endswith(f".{end}") for other in others for end in ends.values())
    return sorted(set(ends.values())) if same else stacks


def shortest_names(model: nn.Module, chosen: list[str]) -> list[str]:
    """Last parts of module names if they say the same as full names (tools that load adapters
    expect them), else full names.
    """
    lasts = {last_name(name) for name in chosen}
    names = [*(name for name, _ in model.named_modules()), *names_of_towers(model)]
    by_lasts = [name for name in names if last_name(name) in lasts]
    return sorted(lasts) if by_lasts == chosen and not has_unseen_towers(model) else chosen


def _by_module(
    model: nn.Module, chosen: list[str], values: Mapping[str, T], default: T
) -> dict[str, T]:
    """Values by names of modules and stacks that no tool can misread."""
    by_name: dict[str, T] = {}
    for value in sorted({value for value in values.values() if value != default}):
        names = [name for name in chosen if values.get(name) == value]
        by_name.update({re.escape(name): value for name in shortest_names(model, names)})
    return by_name
