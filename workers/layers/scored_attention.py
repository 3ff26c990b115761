"""Causal attention with its scores written out, a number of queries at a time: for a window, a soft cap, sinks or chosen keys,
which fused kernels do not have. Forward and backward by hand, since both run inside operators, below autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS_AT_ONCE = 512
"""Queries whose scores exist at once."""


def scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    softcap: float,
    scale: float,
    sinks: Tensor | None,
    chosen: Tensor | None = None,
) -> Tensor:
    """query [rows, heads, length, d], key and value [rows, groups, length, d] → [rows, heads, length, d], in the value's dtype.

    `window`: keys that a query sees at most, 0: all before it; `softcap`: 0: none; `sinks`: [heads]; `chosen`: places of the
    keys that each query sees of those before it, int [rows, length, keys]; None: all.
    """
    key, value = one_a_head(query, key, value)
    parts = []
    for own, seen, mask in _blocks(query.shape[2], window, query.device, chosen):
        shares, _ = shares_of(query[:, :, own], key[:, :, seen], mask, softcap, scale, sinks)
        parts.append(shares.to(value.dtype) @ value[:, :, seen])
    return torch.cat(parts, dim=2)


def scored_grad(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    softcap: float,
    scale: float,
    sinks: Tensor | None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, one key and value a head; the shares are computed again. Sums are in fp32.

    With P the shares and D = grad Vᵀ: the gradient of the scores is P ∘ (D - Σ P ∘ D), since a sink's value is zero.
    """
    wide_key, wide_value = one_a_head(query, key, value)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (wide_key, wide_value))
    for own, seen, mask in _blocks(query.shape[2], window, query.device, chosen):
        q, k, v, g = query[:, :, own], wide_key[:, :, seen], wide_value[:, :, seen], grad[:, :, own]
        shares, slope = shares_of(q, k, mask, softcap, scale, sinks)
        of_value[:, :, seen] += shares.to(g.dtype).transpose(-2, -1) @ g
        of_shares = (g @ v.transpose(-2, -1)).float()
        of_scores = shares * (of_shares - (shares * of_shares).sum(dim=-1, keepdim=True)) * scale
        of_scores = (of_scores if slope is None else of_scores * slope).to(q.dtype)
        of_query[:, :, own] = of_scores @ k
        of_key[:, :, seen] += of_scores.transpose(-2, -1) @ q
    return of_query, of_key, of_value


def one_a_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [rows, groups, length, d], repeated to one for each head of the query."""
    shared = query.shape[1] // key.shape[1]
    return key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)


def _blocks(length: int, window: int, device: torch.device, chosen: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries of one block, the keys that any of them sees, and which of them each does: bool [queries, keys], or
    [rows, 1, queries, keys] where they are chosen.
    """
    for start in range(0, length, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, length)
        first = max(0, start - window + 1) if window else 0
        distance = torch.arange(start, end, device=device)[:, None] - torch.arange(first, end, device=device)
        mask = (distance >= 0) & (distance < window) if window else distance >= 0
        if chosen is not None:
            places = chosen[:, start:end].long()
            whole = torch.zeros(*places.shape[:2], length, dtype=torch.bool, device=device).scatter_(-1, places, True)
            mask = mask & whole[:, None, :, first:end]
        yield slice(start, end), slice(first, end), mask


def shares_of(
    query: Tensor, key: Tensor, mask: Tensor, softcap: float, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What each query takes of each value, fp32 [rows, heads, queries, keys], and the slope of the cap where there is one."""
    scores = (query @ key.transpose(-2, -1)).float() * scale
    slope = None
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = bent * softcap, 1 - bent.square()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1), slope
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks.float().view(1, -1, 1, 1))
    weights = (scores - largest).exp()
    return weights / (weights.sum(dim=-1, keepdim=True) + (sinks.float().view(1, -1, 1, 1) - largest).exp()), slope
