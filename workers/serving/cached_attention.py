"""Attention of sequences that grow: the new tokens of any number of them are concatenated in one
row, and each sees the earlier tokens of its own sequence. No token is padding, and no mask is made.

It stands where transformers' attention stood, for the architectures that let it be chosen, as in
training (workers/layers/segment_attention.py, whose words for window, softcap and sinks these are).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from workers.layers.scored_attention import (
    AttentionPattern,
    attention_pattern,
    is_causal,
    one_a_head,
    shares_of,
)
from workers.layers.segments import spans_of
from workers.serving.room import FIRST_CAPACITY, SPARE, tensors_in

NAME = "ft_cached"
"""Name of this attention among transformers' implementations."""


class KeyValueCache:
    """The keys and values of one sequence, layer by layer."""

    def __init__(self) -> None:
        self._layers: dict[int, _LayerCache] = {}
        self.state: Any = None
        """What the architecture itself keeps, where its layers keep more than keys and values."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens, [1, groups, tokens, ..] each; what the layer then knows, new tokens
        included.
        """
        kept = self._layers.setdefault(layer, _LayerCache())
        return kept.extend(key, value)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it knows, without spare capacity."""
        return sum(kept.nbytes for kept in self._layers.values()) + sum(
            own.nbytes for own in tensors_in(self.state)
        )

    def fork(self) -> KeyValueCache:
        """The cache of another sequence that begins with the same tokens.

        Keys and values are shared until one of the two is extended; what the architecture itself
        keeps is copied.
        """
        forked = KeyValueCache()
        forked._layers = {layer: kept.fork() for layer, kept in self._layers.items()}
        forked.state = copy.deepcopy(self.state)
        return forked


@dataclass
class _LayerCache:
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    """[1, groups, capacity, d], of which `count` are there."""
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    count: int = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = key.shape[2]
        end = self.count + new
        if self.count == 0 or end > self.keys.shape[2]:
            capacity = max(FIRST_CAPACITY, end + int(end * SPARE))
            self.keys = _grown(self.keys, key, self.count, capacity)
            self.values = _grown(self.values, value, self.count, capacity)
        self.keys[:, :, self.count : end] = key
        self.values[:, :, self.count : end] = value
        self.count = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    @property
    def nbytes(self) -> int:
        return self.keys[:, :, : self.count].nbytes + self.values[:, :, : self.count].nbytes

    def fork(self) -> _LayerCache:
        """A cache without spare capacity, so that its first extension copies it and writes nothing
        into this one.
        """
        return _LayerCache(
            self.keys[:, :, : self.count], self.values[:, :, : self.count], self.count
        )


def _grown(kept: Tensor, like: Tensor, count: int, capacity: int) -> Tensor:
    grown = like.new_empty(1, like.shape[1], capacity, like.shape[3])
    if count:
        grown[:, :, :count] = kept[:, :, :count]
    return grown


@dataclass(frozen=True)
class Span:
    """The new tokens [start, end) of one sequence in the current row."""

    memory: KeyValueCache
    start: int
    end: int


class CurrentRow:
    """The sequences in the row of the current forward."""

    def __init__(self) -> None:
        self.spans: Sequence[Span] = ()


CURRENT = CurrentRow()
"""The row of this process, which runs one forward at a time."""


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [1, heads, tokens, d], key and value
    [1, groups, tokens, ..] → [1, tokens, heads, ..].

    Raises NotImplementedError for what only a mask could say.
    """
    if (
        not is_causal(module, options)
        or attention_mask is not None
        or query.shape[2] != key.shape[2]
    ):
        raise NotImplementedError(
            f"{type(module).__name__} is not causal, has a bias by position, or needs a mask"
        )
    shape = replace(attention_pattern(query, options), chosen=None, spans=spans_of(module))
    parts = []
    for span in CURRENT.spans:
        own = slice(span.start, span.end)
        keys, values = span.memory.extend(id(module), key[:, :, own], value[:, :, own])
        parts.append(
            _attend(query[:, :, own], keys, values, shape.of_segment(span.start, span.end))
        )
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, cached_attention)


def _attend(query: Tensor, key: Tensor, value: Tensor, shape: AttentionPattern) -> Tensor:
    """The last tokens of a sequence, query [1, heads, n, d], over all of it, key [1, groups,
    length, d] → [1, heads, n, ..].
    """
    new = query.shape[2]
    length = key.shape[2]
    # The first key that any of them sees.
    begin = max(0, length - new - shape.window + 1) if shape.window else 0
    key = key[:, :, begin:]
    value = value[:, :, begin:]
    mask = None if new == 1 else _seen(new, length - begin, shape, query.device)
    if shape.softcap or shape.sinks is not None:
        wide_key, wide_value = one_a_head(query, key, value)
        mask = (
            torch.ones(new, length - begin, dtype=torch.bool, device=query.device)
            if mask is None
            else mask
        )
        shares, _ = shares_of(query, wide_key, mask, shape)
        return shares.to(value.dtype) @ wide_value
    grouped = query.shape[1] != key.shape[1]
    causal = shape.spans is None and (not shape.window or length <= shape.window)
    whole = new > 1 and new == length and causal
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if whole else mask,
        is_causal=whole,
        scale=shape.scale,
        enable_gqa=grouped,
    )


def _seen(new: int, length: int, shape: AttentionPattern, device: torch.device) -> Tensor:
    """Which keys each of the last `new` tokens sees: bool [new, length]. Spans are of these."""
    places = torch.arange(length, device=device)
    distance = places[length - new :, None] - places
    seen = distance >= 0
    for begin, end in [] if shape.spans is None else (shape.spans + length - new).tolist():
        seen[begin - length + new : end - length + new, begin:end] = True
    return seen & (distance < shape.window) if shape.window else seen
