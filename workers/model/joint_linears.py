"""Adapted layers that are given one input, found by calling their module on meta, with something in
their place that looks.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.linear import FrozenLinear, Joint, LoraLinear


def join(model: nn.Module) -> None:
    """Let the layers of a model on meta that have one input be computed by one call (`Joint`).

    All layers of a module must be gathered together. Those with a magnitude stay alone,
    and those that are rounded with their adapter.
    """
    for module in model.modules():
        layers = {
            name: own
            for name, own in module.named_children()
            if type(own) is LoraLinear and _is_plain(own)
        }
        widths = [_columns(own) for own in layers.values()]
        for width in dict.fromkeys(width for width in widths if widths.count(width) > 1):
            for together in _with_one_input(module, layers, width):
                Joint(together)


def _columns(layer: LoraLinear) -> int:
    base: Any = layer.base_layer
    return base.in_features


def _is_plain(layer: LoraLinear) -> bool:
    return (
        layer.magnitude is None
        and layer.joint is None
        and type(layer.base_layer) in (nn.Linear, FrozenLinear)
    )


def _with_one_input(
    module: nn.Module, layers: dict[str, LoraLinear], width: int
) -> list[list[LoraLinear]]:
    """Groups of two layers or more that a module's forward calls with one tensor, each once."""
    given: list[tuple[LoraLinear, Tensor]] = []
    whole = dict(module._modules)
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    needed = [
        own.name
        for own in parameters
        if own.default is own.empty and own.kind is own.POSITIONAL_OR_KEYWORD
    ]
    module._modules.update({name: _Looking(layer, given) for name, layer in layers.items()})
    try:
        with torch.no_grad():
            module(
                torch.empty(1, 2, width, dtype=torch.bfloat16, device="meta"),
                **dict.fromkeys(needed),
            )
    except Exception:  # the arguments after the first are none of its own; it has called by then what begins with the input
        pass
    finally:
        module._modules.update(whole)
    called = [layer for layer, _ in given]
    groups: dict[int, list[LoraLinear]] = {}
    for layer, x in given:
        if called.count(layer) == 1:
            groups.setdefault(id(x), []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


class _Looking(nn.Module):
    """In place of a layer: notes what it is given, and makes a tensor of the layer's width."""

    def __init__(self, layer: LoraLinear, given: list[tuple[LoraLinear, Tensor]]) -> None:
        super().__init__()
        # a list, in which a module does not look for others
        self._own = [layer]
        self._given = given

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._own
        base: Any = layer.base_layer
        assert x.shape[-1] == base.in_features
        self._given.append((layer, x))
        return x.new_empty(*x.shape[:-1], base.out_features)
