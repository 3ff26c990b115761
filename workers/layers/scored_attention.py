"""Causal attention with its scores written out, a number of queries at a time: for what fused kernels do not have. Forward and
backward by hand, since both run inside operators, below autograd.

Behind the keys of tokens there may stand others, each of which is made of `block` tokens in a row: the first of the first of
them, and so on. A query sees those that are made of itself and tokens before it; no window hides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 512
"""Queries whose scores exist at once."""


Seen = Sequence[slice]
"""Places of keys: of tokens, and behind those of what is made of blocks of them."""


@dataclass(frozen=True)
class Shape:
    """Of attention: which keys before it a query sees, and how their scores become shares."""

    scale: float
    window: int = 0
    """Tokens that a query sees at most, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores become tanh(score / softcap) * softcap; 0: they stay."""
    sinks: Tensor | None = None
    """One more score a head, [heads], that has no value."""
    block: int = 1
    """Tokens that a chosen place stands for, or that a key behind those of tokens is made of."""
    chosen: Tensor | None = None
    """Places of what a query sees: of keys behind those of tokens where there are any, else of blocks of tokens. int
    [rows, one or groups, length, places]; those that are not there mean nothing. None: all."""


def scored(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """query [rows, heads, length, d], key and value [rows, groups, keys, d] → [rows, heads, length, d], in value's dtype."""
    key, value = one_a_head(query, key, value)
    parts = []
    for own, seen, mask in _blocks(query, key, shape):
        shares, _ = shares_of(query[:, :, own], taken(key, seen), mask, shape)
        parts.append(shares.to(value.dtype) @ taken(value, seen))
    return torch.cat(parts, dim=2)


def scored_grad(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, one key and value a head; the shares are computed again. Sums are in fp32.

    With P the shares and D = grad Vᵀ: the gradient of the scores is P ∘ (D - Σ P ∘ D), since a sink's value is zero.
    """
    wide_key, wide_value = one_a_head(query, key, value)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (wide_key, wide_value))
    for own, seen, mask in _blocks(query, wide_key, shape):
        q, k, v, g = query[:, :, own], taken(wide_key, seen), taken(wide_value, seen), grad[:, :, own]
        shares, slope = shares_of(q, k, mask, shape)
        _add(of_value, seen, shares.to(g.dtype).transpose(-2, -1) @ g)
        of_shares = (g @ v.transpose(-2, -1)).float()
        of_scores = shares * (of_shares - (shares * of_shares).sum(dim=-1, keepdim=True)) * shape.scale
        of_scores = (of_scores if slope is None else of_scores * slope).to(q.dtype)
        of_query[:, :, own] = of_scores @ k
        _add(of_key, seen, of_scores.transpose(-2, -1) @ q)
    return of_query, of_key, of_value


def one_a_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [rows, groups, length, d], repeated to one for each head of the query."""
    shared = query.shape[1] // key.shape[1]
    return key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)


def shares_of(query: Tensor, key: Tensor, mask: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
    """What each query takes of each value, fp32 [rows, heads, queries, keys], and the slope of the cap where there is one.
    `mask`: bool, of the keys that are seen: in place of `shape`'s window and chosen keys.
    """
    scores = (query @ key.transpose(-2, -1)).float() * shape.scale
    slope = None
    if shape.softcap:
        bent = torch.tanh(scores / shape.softcap)
        scores, slope = bent * shape.softcap, 1 - bent.square()
    scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is None:
        return scores.softmax(dim=-1), slope
    sinks = shape.sinks.float().view(1, -1, 1, 1)
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - largest).exp()
    return weights / (weights.sum(dim=-1, keepdim=True) + (sinks - largest).exp()), slope


def _blocks(query: Tensor, key: Tensor, shape: Shape) -> Iterator[tuple[slice, Seen, Tensor]]:
    """Queries, the keys that any of them sees, and which of them each does: bool [queries, keys], or [rows, one or heads,
    queries, keys] where they are chosen.
    """
    length, window, block = query.shape[2], shape.window, shape.block
    further = key.shape[2] - length
    chosen = shape.chosen
    if chosen is not None and chosen.shape[1] > 1:
        chosen = chosen.repeat_interleave(query.shape[1] // chosen.shape[1], dim=1)
    for start in range(0, length, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, length)
        first = max(0, start - window + 1) if window else 0
        queries = torch.arange(start, end, device=query.device)[:, None]
        distance = queries - torch.arange(first, end, device=query.device)
        mask = (distance >= 0) & (distance < window) if window else distance >= 0
        picked = None if chosen is None else _picked(chosen[:, :, start:end], further or -(-length // block))
        if not further:
            if picked is not None:
                mask = mask & picked.repeat_interleave(block, dim=-1)[..., first:end]
            yield slice(start, end), (slice(first, end),), mask
            continue
        made = min(further, end // block)
        behind = (queries + 1) // block > torch.arange(made, device=query.device)
        behind = behind if picked is None else behind & picked[..., :made]
        both = torch.cat([mask.expand(*behind.shape[:-1], -1), behind], dim=-1)
        yield slice(start, end), (slice(first, end), slice(length, length + made)), both


def _picked(chosen: Tensor, count: int) -> Tensor:
    """Which of `count` are among the chosen: bool [.., count]."""
    places = torch.where((chosen < 0) | (chosen > count), count, chosen).long()
    return torch.zeros(*places.shape[:-1], count + 1, dtype=torch.bool, device=places.device).scatter_(-1, places, True)[
        ..., :-1
    ]


def taken(tensor: Tensor, seen: Seen) -> Tensor:
    """Keys or values at these places, of all of them, [rows, heads, keys, d]."""
    parts = [tensor[:, :, part] for part in seen]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add(to: Tensor, seen: Seen, tensor: Tensor) -> None:
    """Add what belongs to the keys that are seen."""
    for part, own in zip(seen, tensor.split([part.stop - part.start for part in seen], dim=2), strict=True):
        to[:, :, part] += own
