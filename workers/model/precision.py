"""Which frozen weight is stored in which format, and the swap to it, on meta."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.selection import WeightNames, assign_formats, kept_plain
from ft_service.spec import PrecisionOptions, WeightFormat
from workers.model.experts import PROJECTIONS, FrozenExperts, experts_of
from workers.model.linear import FrozenLinear
from workers.quant.weights import QUANTIZED


def precision_map(model: PreTrainedModel, layers: list[nn.Module], precision: PrecisionOptions) -> dict[str, WeightFormat]:
    """Format of every weight that can have one: linear layers and stacked experts of the decoder layers, by module name.

    Raises SpecError for a pattern that matches none of them, or one outside the decoder layers.
    """
    weighted = [n for n, m in model.named_modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [n for n in weighted if id(model.get_submodule(n)) not in inside]
    return assign_formats(WeightNames(_quantizable(model, layers), outside, weighted), precision)


def _quantizable(model: PreTrainedModel, layers: list[nn.Module]) -> list[str]:
    """Module names of the weights that can be stored in any format. Raises SpecError where the model has none.

    Not among them: what `kept_plain` names, and classes of a linear layer's kind that compute something else.
    """
    stacks = {id(module) for module in experts_of(layers)}
    inside = {id(module) for layer in layers for module in layer.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) in stacks:
            names += [f"{name}.{projection}" for projection in PROJECTIONS]
        elif id(module) in inside and type(module) is nn.Linear and not kept_plain(name):
            names.append(name)
    if not names:
        raise SpecError(f"{type(model).__name__} has no linear layers (nn.Linear) in its decoder layers.", param="model")
    return names


def swap(model: nn.Module, layers: list[nn.Module], formats: Mapping[str, WeightFormat]) -> None:
    """Put modules on storage of the given formats in place of transformers' linear layers and experts."""
    stacks = {id(module) for module in experts_of(layers)}
    for name, module in list(model.named_modules()):
        if id(module) in stacks:
            classes = {p: QUANTIZED.get(formats[f"{name}.{p}"]) for p in PROJECTIONS}
            _replace(model, name, FrozenExperts(module, classes))
        elif isinstance(module, nn.Linear) and formats.get(name) in QUANTIZED:
            _replace(model, name, FrozenLinear.on_meta(module, QUANTIZED[formats[name]]))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
