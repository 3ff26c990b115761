"""The model on meta: architecture from the Hugging Face config, storage formats, adapters. No weight is touched here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import JobSpec, LoraOptions, PrecisionOptions, match_pattern
from workers.model.linear import FrozenLinear, LoraLinear
from workers.model.source import Safetensors
from workers.model.stored import Base
from workers.quant.weights import QUANTIZED, StorageFormat

STORAGE_DTYPE = torch.bfloat16
"""What frozen weights without a quantised format are stored in, and the face dtype of the quantised ones."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (buffers excepted), ready to be sharded."""

    peft_model: PeftModel
    layers: list[nn.Module]
    """The decoder layers, in order: the units of sharding."""
    formats: Mapping[str, StorageFormat]
    """Base module name → format of its weight, for every linear layer of the decoder layers and every quantised one."""


def build(spec: JobSpec, device: torch.device) -> BuiltModel:
    """Config → modules → storage formats → adapters. Raises SpecError naming the option that does not fit the model."""
    base = base_on_meta(spec.model.path)
    restore_buffers(base, device)
    layers = decoder_layers(base)
    formats = precision_map(base, layers, spec.precision, formats_of_base(base, spec.model.path))
    _swap_linears(base, formats)
    peft_model = add_adapters(base, spec.lora)
    return BuiltModel(peft_model, layers, formats)


def base_on_meta(path: str) -> PreTrainedModel:
    """The architecture that `path`/config.json describes, every tensor on meta. Code from the folder is never run."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            delattr(part, "quantization_config")  # a quantised base has the modules of a plain one; see `formats_of_base`
    config.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=STORAGE_DTYPE, attn_implementation="sdpa")


def restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, embedding scales) by the architecture's own rules.

    Parameters are still on meta, where initialising is free, so each module's initialiser can be called as it is.
    """
    persistent = set(model.state_dict(keep_vars=True))
    for module_name, module in model.named_modules():
        computed = {n: b for n, b in module.named_buffers(recurse=False) if f"{module_name}.{n}".lstrip(".") not in persistent}
        for name, buffer in computed.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if computed:
            model._init_weights(module)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the architecture itself names them. Raises SpecError for one that names none."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise SpecError(f"{type(model).__name__} names no decoder layers, so it cannot be sharded here.", param="model")
    return layers


def formats_of_base(model: PreTrainedModel, path: str) -> dict[str, StorageFormat]:
    """Format of every linear layer that the checkpoint holds quantised; none for a plain one. Only headers are read."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found: dict[str, StorageFormat] = {}
    with Safetensors(path) as checkpoint:
        base = Base.open(checkpoint, path)
        for name in linears if base.declared else []:
            stored = base.stored(f"{name}.weight") if f"{name}.weight" in base else None
            if stored is not None:
                found[name] = stored.format
    return found


def precision_map(
    model: PreTrainedModel,
    layers: list[nn.Module],
    precision: PrecisionOptions,
    of_base: Mapping[str, StorageFormat] | None = None,
) -> dict[str, StorageFormat]:
    """Format of every linear layer inside the decoder layers, and of those elsewhere that the base holds quantised.

    `of_base`: formats that the base comes in, which stay. Raises SpecError for a pattern that matches no layer, or that asks
    for another format than the base has.
    """
    inside = {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    names = [name for name, module in model.named_modules() if id(module) in inside]
    formats: dict[str, StorageFormat] = dict.fromkeys(names, precision.default)
    chosen: dict[str, str] = {}
    for pattern, weight_format in precision.overrides.items():
        matched = match_pattern(pattern, names)
        if not matched:
            raise SpecError(
                f"precision.overrides: the pattern {pattern!r} matches no linear layer inside the decoder layers "
                f"(their names look like {names[0]!r}).",
                param="precision.overrides",
            )
        formats.update(dict.fromkeys(matched, weight_format))
        chosen.update(dict.fromkeys(matched, pattern))
    _refuse_conflicts(chosen, formats, of_base or {})
    return {**formats, **(of_base or {})}


def _refuse_conflicts(
    chosen: Mapping[str, str], formats: Mapping[str, StorageFormat], of_base: Mapping[str, StorageFormat]
) -> None:
    """`chosen`: module → the pattern that decided its format."""
    for name, pattern in chosen.items():
        held = of_base.get(name)
        if held is not None and not held.startswith(formats[name]):  # nf4_fp32 is an nf4
            raise SpecError(
                f"precision.overrides: the pattern {pattern!r} asks for {formats[name]} in {name}, which the base "
                f"holds in {held} already. Leave these modules out of the pattern, or start from a base that is not quantised.",
                param="precision.overrides",
            )


def _swap_linears(model: nn.Module, formats: Mapping[str, StorageFormat]) -> None:
    for name, weight_format in formats.items():
        weight_class = QUANTIZED.get(weight_format)
        if weight_class is None:
            continue
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = parent.get_submodule(child)
        assert isinstance(linear, nn.Linear)
        setattr(parent, child, FrozenLinear.on_meta(linear, weight_class))


def add_adapters(model: PreTrainedModel, lora: LoraOptions) -> PeftModel:
    """Wrap by PEFT, on meta, with fp32 adapters. Raises SpecError for target_modules that match nothing."""
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # pyright: ignore[reportArgumentType]  a float is fine: it is only divided by r
        target_modules=target_modules(model, lora),
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


def target_modules(model: PreTrainedModel, lora: LoraOptions) -> list[str]:
    """The modules to adapt: last names where these say the same as full names (as tools that load adapters expect)."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    chosen = _choose(names, lora.target_modules)
    lasts = {name.rpartition(".")[2] for name in chosen}
    by_lasts = [name for name in names if name.rpartition(".")[2] in lasts]
    return sorted(lasts) if by_lasts == chosen else chosen


def _choose(names: list[str], wanted: str | list[str]) -> list[str]:
    if wanted == "all-linear":
        return names
    if isinstance(wanted, str):
        chosen = match_pattern(wanted, names)
        missing = [] if chosen else [wanted]
    else:
        chosen = [n for n in names if any(n == w or n.endswith(f".{w}") for w in wanted)]
        missing = [w for w in wanted if not any(n == w or n.endswith(f".{w}") for n in names)]
    if missing or not chosen:
        kinds = ", ".join(sorted({re.sub(r".*\.", "", name) for name in names}))
        raise SpecError(
            f"lora.target_modules: {missing or wanted!r} matches no linear layer of this model; it has {kinds}.",
            param="lora.target_modules",
        )
    return chosen
