"""Which feed-forwards of a base compute every token by itself, found on a small copy: those can be
computed by tiles of rows (workers/layers/tiles.py).

Where a layer's feed-forward stands, and what it is, differs by type. So every part of a layer that
holds several matrices, takes hidden states alone and returns as many is called once more on its
input in two halves. Attention is none of them: it takes positions too, and mixes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.experts import ExpertsLinear
from workers.layers.tiles import by_tiles
from workers.model.packed_trial import logits_apart, trial_samples
from workers.model.small_copy import SmallCopy

_EQUAL = 1e-4
"""Largest relative difference of an output, in fp32."""
_CPU = torch.device("cpu")


@torch.no_grad()
def row_wise_parts(copy: SmallCopy) -> tuple[str, ...]:
    """Full names of the base's modules that compute every token by itself, directly below its
    decoder layers.
    """
    found: dict[str, bool] = {}
    handles = [
        part.register_forward_hook(partial(_compare, found, name), with_kwargs=True)
        for name, part in _candidates(copy)
    ]
    try:
        logits_apart(copy.model, trial_samples(copy.model), _CPU)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(own for name, equal in found.items() if equal for own in copy.alike_of(name))


def _candidates(copy: SmallCopy) -> list[tuple[str, nn.Module]]:
    return [
        (f"{layer}.{name}", part)
        for layer in copy.alike
        for name, part in copy.model.get_submodule(layer).named_children()
        if sum(isinstance(own, (nn.Linear, ExpertsLinear)) for own in part.modules()) > 1
    ]


def _compare(
    found: dict[str, bool],
    name: str,
    part: nn.Module,
    inputs: Sequence[Any],
    others: Mapping[str, Any],
    output: Any,
) -> None:
    """Note whether a part gives in halves what it gives of all rows; never if it once did not."""
    if len(inputs) != 1 or others or not _are_alike(inputs[0], output):
        found[name] = False
        return
    try:
        halves = by_tiles(part.forward, inputs[0], -(-inputs[0].shape[:-1].numel() // 2))
    except Exception:  # it takes its rows in another shape
        found[name] = False
        return
    near = bool((halves - output).norm() <= _EQUAL * output.norm())
    found[name] = found.get(name, True) and near


def _are_alike(given: Any, made: Any) -> bool:
    return isinstance(given, Tensor) and isinstance(made, Tensor) and given.shape == made.shape
