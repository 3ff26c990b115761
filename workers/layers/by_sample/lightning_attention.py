"""Lightning attention (MiniMax): a recurrence, in blocks of tokens, that begins anew at each sample of a packed row.

What a head knows of the keys and values before a block fades by a constant factor a token. The arithmetic is that of the class,
step by step, on each segment by itself; the projections around it are those of the whole row, with whatever adapters they have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workers.layers.segments import CURRENT

_CLASS = "LightningAttention"


def are_known(model_class: type) -> bool:
    """Whether an architecture has such layers."""
    return any(name.endswith(_CLASS) for name in vars(sys.modules[model_class.__module__]))


def begin_anew(model: nn.Module) -> None:
    """Let the lightning attention of a model begin anew at each sample of the micro-batch in hand."""
    for module in model.modules():
        if type(module).__name__.endswith(_CLASS):
            module.forward = _BySegment(module, module.forward)


class _BySegment:
    """In place of such a layer's forward. It holds the module as no submodule: that one keeps its one name."""

    def __init__(self, module: nn.Module, stock: Callable[..., Any]) -> None:
        self._module: Any = module
        self._stock = stock

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """hidden_states [rows, length, channels] → the same, and no state."""
        if any(kwargs.get(name) is not None for name in ("past_key_values", "attention_mask")):  # a caller that is not ours
            return self._stock(hidden_states, **kwargs)
        layer, length = self._module, hidden_states.shape[1]
        states = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
        segments = states.split(CURRENT.bounds(length, 0).starts.diff().tolist(), dim=2)
        mixed = torch.cat([_of_segment(layer, *own.chunk(3, dim=-1)) for own in segments], dim=2)
        mixed = layer.norm(mixed.transpose(1, 2).flatten(2))
        return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * mixed), None


def _of_segment(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Three times [rows, heads, tokens, d] → the same. `layer`: has the factors by which keys fade, for the tokens of a block;
    they may be more precise than the rest.
    """
    known = value.new_zeros(*value.shape[:2], value.shape[-1], value.shape[-1])
    parts = []
    for q, k, v in zip(*(tensor.split(layer.block_size, dim=2) for tensor in (query, key, value)), strict=True):
        tokens = q.shape[2]
        within = ((q @ k.mT) * layer.diagonal_decay[:, :, :tokens, :tokens]).to(v) @ v
        parts.append(within + (q * layer.query_decay[:, :tokens]).to(v) @ known)
        new = (k * layer.key_decay[:, -tokens:]).to(v).mT @ v
        known = (known * torch.exp(-layer.slope_rate * tokens)).to(v) + new
    return torch.cat(parts, dim=2)
