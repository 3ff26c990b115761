"""Choice of the format in which each frozen weight is stored, and the swap to it, on meta."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ft_service import kernel_limits
from ft_service.bases.module_rules import WeightNames, assign_formats, kept_plain
from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions, WeightFormat
from workers.base.base_tensors import Safetensors
from workers.base.parameter_sources import find_pieces, stored_as, turned_weights
from workers.base.quantized_rows import StoredBase
from workers.layers.experts import FrozenExperts, experts_of, projections_of
from workers.layers.linear import FrozenLinear
from workers.patches.llama4_mixture import meet_only_the_chosen
from workers.quant.fp8_products import why_not
from workers.quant.rowwise import RowQuantized
from workers.quant.weights import QUANTIZED, FP8BlocksWeight, FP8Weight


def precision_map(
    model: PreTrainedModel,
    layers: list[nn.Module],
    precision: PrecisionOptions,
    held: Mapping[str, WeightFormat] | None = None,
) -> dict[str, WeightFormat]:
    """Format of every weight that can have one, by module name: linear layers and stacked experts
    of the decoder layers.

    `held`: formats in which the base comes (see `assign_formats`). Raises SpecError for a pattern
    that matches no weight, or one outside the decoder layers, or that asks for another format than
    one that stays.
    """
    weighted = [
        n for n, m in model.named_modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))
    ]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [n for n in weighted if id(model.get_submodule(n)) not in inside]
    return assign_formats(
        WeightNames(_quantizable(model, layers), outside, weighted), precision, held
    )


def formats_of_base(
    model: PreTrainedModel, layers: list[nn.Module], path: str
) -> dict[str, WeightFormat]:
    """Format of every linear layer and stack of experts that the base holds quantised; none for a
    plain base.

    Reads headers only, and those of a plain base not even. Raises SpecError for an unknown layout.
    """
    with Safetensors(path) as files:
        base = StoredBase.open(files, path)
        if not base.declared:
            return {}
        if turned_weights(model):
            raise SpecError(
                f"The base is a {model.config.model_type} model, published quantised, whose "
                "matrices would be read the other "
                "way round. Use one that is not quantised.",
                param="model",
            )
        module_of = weighted_modules(model, layers)
        pieces = find_pieces(model, module_of, base.names())
        stored = {
            module_of[parameter]: stored_as(base, placed) for parameter, placed in pieces.items()
        }
        return {
            name: weight.format
            for name, weight in stored.items()
            if weight is not None and weight.format is not None
        }


def weighted_modules(model: PreTrainedModel, layers: list[nn.Module]) -> dict[str, str]:
    """Parameter of a linear layer or a stack of experts → name of what has a format; routers and
    their like are left out.
    """
    stacks = {id(module) for module in experts_of(layers)}
    module_of: dict[str, str] = {}
    for name, module in model.named_modules():
        if id(module) in stacks:
            module_of |= {
                f"{name}.{projection}": f"{name}.{projection}"
                for projection in projections_of(module)
            }
        elif type(module) is nn.Linear and _may_have_format(name, module):
            module_of[f"{name}.weight"] = name
    return module_of


def _quantizable(model: PreTrainedModel, layers: list[nn.Module]) -> list[str]:
    """Module names of the weights that can be stored in any format.

    Raises SpecError where the model has none.

    Left out: what `kept_plain` names, what the model keeps in fp32, and subclasses of linear layers
    that compute another thing.
    """
    stacks = {id(module) for module in experts_of(layers)}
    inside = {id(module) for layer in layers for module in layer.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) in stacks:
            names += [f"{name}.{projection}" for projection in projections_of(module)]
        elif id(module) in inside and type(module) is nn.Linear and _may_have_format(name, module):
            names.append(name)
    if not names:
        raise SpecError(
            f"{type(model).__name__} has no linear layers (nn.Linear) in its decoder layers.",
            param="model",
        )
    return names


def _may_have_format(name: str, linear: nn.Linear) -> bool:
    return not kept_plain(name) and linear.weight.dtype != torch.float32


def swap(model: nn.Module, layers: list[nn.Module], formats: Mapping[str, WeightFormat]) -> None:
    """Put modules on storage of the given formats in place of transformers' linear layers and
    experts.
    """
    stacks = {id(module) for module in experts_of(layers)}
    for name, module in list(model.named_modules()):
        if id(module) in stacks:
            put_experts(
                model,
                name,
                {p: QUANTIZED.get(formats[f"{name}.{p}"]) for p in projections_of(module)},
            )
        elif isinstance(module, nn.Linear) and formats.get(name) in QUANTIZED:
            _replace(model, name, FrozenLinear.on_meta(module, QUANTIZED[formats[name]]))


def put_experts(
    model: nn.Module, name: str, classes: Mapping[str, type[RowQuantized] | None]
) -> None:
    """Put our module in place of transformers' experts of this full name.

    `classes`: of the weight of each of its stacks.
    """
    experts = FrozenExperts(model.get_submodule(name), classes)
    _replace(model, name, experts)
    if experts.scales_input:
        meet_only_the_chosen(model.get_submodule(name.rpartition(".")[0]))


def choose_products(
    model: nn.Module, options: PrecisionOptions, compute: torch.dtype, device: torch.device
) -> str | None:
    """Let FP8 layers multiply in FP8 where they can: those with one scale a row, which multiplies
    the product of its codes.

    Returns what to say of it in the job's events. None: no layers are stored in FP8.
    """
    frozen = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    by_blocks = sum(isinstance(layer.weight, FP8BlocksWeight) for layer in frozen)
    of_blocks = (
        f"The {by_blocks} layers stored in fp8_blocks are dequantised to multiply."
        if by_blocks
        else None
    )
    layers = [layer for layer in frozen if isinstance(layer.weight, FP8Weight)]
    if not layers:
        return of_blocks
    return " ".join(filter(None, (_products_of_rows(layers, options, compute, device), of_blocks)))


def _products_of_rows(
    layers: list[FrozenLinear],
    options: PrecisionOptions,
    compute: torch.dtype,
    device: torch.device,
) -> str:
    """The same for layers with one scale a row."""
    reason = (
        "precision.fp8_products is off"
        if options.fp8_products == "off"
        else f"precision.served_as is {options.served_as}"
        if options.served_as is not None
        else why_not(compute, device)
    )
    if reason is not None:
        return f"The {len(layers)} layers stored in fp8 are dequantised to multiply: {reason}."
    for layer in layers:
        layer.in_fp8 = kernel_limits.fp8_fits(layer.out_features, layer.in_features)
    others = sum(not layer.in_fp8 for layer in layers)
    rest = (
        f"; {others} are dequantised, their sizes being no multiples of "
        f"{kernel_limits.FP8_MULTIPLE}"
        if others
        else ""
    )
    return (
        f"{len(layers) - others} layers stored in fp8 multiply in FP8 "
        f"({torch.cuda.get_device_name(device)}){rest}."
    )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
