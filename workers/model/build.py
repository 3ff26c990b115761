"""The model on meta: architecture from the Hugging Face config, storage formats, adapters. No weight is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ft_service.errors import SpecError
from ft_service.selection import assign_formats, choose_targets
from ft_service.spec import JobSpec, LoraOptions, PrecisionOptions, WeightFormat
from workers.model.linear import FrozenLinear, LoraLinear
from workers.quant.weights import QUANTIZED

STORAGE_DTYPE = torch.bfloat16
"""What frozen weights without a quantised format are stored in, and the face dtype of the quantised ones."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (buffers excepted), ready to be sharded."""

    peft_model: PeftModel
    layers: list[nn.Module]
    """The decoder layers, in order: the units of sharding."""
    formats: Mapping[str, WeightFormat]
    """Base module name → format of its weight, for every linear layer of the decoder layers."""


def build(spec: JobSpec, device: torch.device) -> BuiltModel:
    """Config → modules → storage formats → adapters. Raises SpecError naming the option that does not fit the model."""
    base = base_on_meta(spec.model.path)
    restore_buffers(base, device)
    layers = decoder_layers(base)
    formats = precision_map(base, layers, spec.precision)
    _swap_linears(base, formats)
    peft_model = add_adapters(base, spec.lora)
    return BuiltModel(peft_model, layers, formats)


def base_on_meta(path: str) -> PreTrainedModel:
    """The architecture that `path`/config.json describes, every tensor on meta. Code from the folder is never run."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise SpecError(
            f"The base in {path} is stored quantised already; this version reads bf16, fp16 and fp32 bases. "
            "Use the original weights with precision.default.",
            param="model",
        )
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


def precision_map(model: PreTrainedModel, layers: list[nn.Module], precision: PrecisionOptions) -> dict[str, WeightFormat]:
    """Format of every linear layer inside the decoder layers. Raises SpecError for a pattern that matches none of them."""
    inside = {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    names = [name for name, module in model.named_modules() if id(module) in inside]
    return assign_formats(names, precision)


def _swap_linears(model: nn.Module, formats: Mapping[str, WeightFormat]) -> None:
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
    chosen = choose_targets(names, lora.target_modules)
    lasts = {name.rpartition(".")[2] for name in chosen}
    by_lasts = [name for name in names if name.rpartition(".")[2] in lasts]
    return sorted(lasts) if by_lasts == chosen else chosen
