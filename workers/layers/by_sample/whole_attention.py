"""Attention that transformers lets nobody replace (GPT-J, BLOOM, StableLM, Zaya): the module runs as it is, on each sample of a
packed row by itself.

Its projections then run sample by sample too, so what transformers has an interface for is better off with attention within
segments. What the model made for the whole row is cut: masks, rotations, and biases by place, which are those of a row that
begins or ends with the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.linear import LoraLinear
from workers.layers.segments import CURRENT

_FROM_START = frozenset({"alibi"})
_TO_END = frozenset({"position_bias"})
"""Arguments [heads, 1, length] that are the same for every row, and begin or end with zero."""


def attend_by_sample(model: nn.Module) -> None:
    """Let the attention of a model's layers run on each sample of the micro-batch in hand."""
    for module in _outermost(model):
        module.forward = _BySample(module)


def is_by_sample(model: nn.Module) -> bool:
    """Whether that was done, and there was any attention."""
    return any(isinstance(module.forward, _BySample) for module in _outermost(model))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if "Attention" in type(child).__name__:
            yield child
        else:
            yield from _outermost(child)


class _BySample:
    """In place of an attention's forward. It holds the module as no submodule: that one keeps its one name."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._module.by_sample = True  # the ranks call what is inside a different number of times: workers/ranks/grouping.py
        self._stock: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, length, channels], and what else it takes → the same, and what else it gives of the last sample."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if not CURRENT.packed:
            return self._stock(*args, **kwargs)
        assert hidden.shape[1] == CURRENT.starts[-1], "the segments are those of another micro-batch"
        droppings = self._droppings()
        keys = [dropping.keys.tokens for dropping in droppings]
        done = []
        for start, end in pairwise(CURRENT.starts.tolist()):
            for dropping, tokens in zip(droppings, keys, strict=True):
                dropping.use(tokens[:, start:end])
            own = {name: _cut(value, name, start, end, hidden.shape[1]) for name, value in kwargs.items()}
            done.append(self._stock(*(_cut(value, "", start, end, hidden.shape[1]) for value in args), **own))
        for dropping, tokens in zip(droppings, keys, strict=True):
            dropping.use(tokens)
        if isinstance(done[0], Tensor):
            return torch.cat(done, dim=1)
        return torch.cat([out for out, *_ in done], dim=1), *done[-1][1:]

    def _droppings(self) -> list[Any]:
        """Those of its adapters, if they drop anything now."""
        adapted = [part for part in self._module.modules() if isinstance(part, LoraLinear) and part.training]
        return [part.dropping for part in adapted if part.dropping is not None]


def _cut(value: Any, name: str, start: int, end: int, length: int) -> Any:
    """One sample's part of an argument: of its dimension of tokens, or of both of a mask [1, .., length, length]."""
    if isinstance(value, Mapping):
        return {key: _cut(one, name, start, end, length) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(one, name, start, end, length) for one in value)
    if not isinstance(value, Tensor):
        return value
    if name in _FROM_START:
        return value[..., : end - start]
    if name in _TO_END:
        return value[..., length - (end - start) :]
    if value.ndim == 4:
        return value[..., start:end, start:end]
    return value[:, start:end] if value.ndim > 1 and value.shape[1] == length else value
