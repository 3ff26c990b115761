"""Which frozen weight is stored in which format, and the swap to it, on meta."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions, WeightFormat, match_pattern
from workers.model.experts import PROJECTIONS, FrozenExperts, experts_of
from workers.model.linear import FrozenLinear
from workers.quant.weights import QUANTIZED

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of the linear layers that decide which experts a token meets."""


def precision_map(model: PreTrainedModel, layers: list[nn.Module], precision: PrecisionOptions) -> dict[str, WeightFormat]:
    """Format of every weight that can have one: linear layers and stacked experts of the decoder layers, by module name.

    Raises SpecError for a pattern that matches none of them, or one outside the decoder layers.
    """
    names = _quantizable(model, layers)
    formats: dict[str, WeightFormat] = dict.fromkeys(names, precision.default)
    weighted = [n for n, m in model.named_modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [n for n in weighted if id(model.get_submodule(n)) not in inside]
    for pattern, weight_format in precision.overrides.items():
        matched = match_pattern(pattern, names)
        _require_override(
            pattern, weight_format, matched, match_pattern(pattern, outside), match_pattern(pattern, weighted), names
        )
        formats.update(dict.fromkeys(matched, weight_format))
    return formats


def _require_override(
    pattern: str, weight_format: WeightFormat, matched: list[str], outside: list[str], others: list[str], names: list[str]
) -> None:
    if outside and weight_format != "bf16":
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} asks for {weight_format} and matches {outside[0]}, which lies "
            "outside the decoder layers: embeddings and the output head stay bf16, since every token's error passes through "
            "them. Make the pattern narrower.",
            param="precision.overrides",
        )
    if matched or (others and weight_format == "bf16"):
        return
    if others:
        raise SpecError(
            f"precision.overrides: the pattern {pattern!r} matches {others[0]} and nothing that can be stored in "
            f"{weight_format}; routers and whatever is no plain linear layer stay bf16.",
            param="precision.overrides",
        )
    raise SpecError(
        f"precision.overrides: the pattern {pattern!r} matches no linear layer inside the decoder layers "
        f"(their names look like {names[0]!r}).",
        param="precision.overrides",
    )


def _quantizable(model: PreTrainedModel, layers: list[nn.Module]) -> list[str]:
    """Module names of the weights that can be stored in any format. Raises SpecError where the model has none.

    Not among them: routers, which are small and decide which expert is met, and classes of a linear layer's kind that compute
    something else.
    """
    stacks = {id(module) for module in experts_of(layers)}
    inside = {id(module) for layer in layers for module in layer.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        if id(module) in stacks:
            names += [f"{name}.{projection}" for projection in PROJECTIONS]
        elif id(module) in inside and type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
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
