"""Tokens of a picture that see each other in both directions (Gemma 3), beside a fused kernel that
is causal: what they see ahead is added to what the kernel gives.

A kernel gives out = Σ exp(s_j - lse) v_j over the keys up to a query, with lse = log Σ exp(s_j). A
query of a span sees the keys a behind it in the span too:

    lse' = log(exp(lse) + Σ exp(s_a))        out' = out · exp(lse - lse') + Σ exp(s_a - lse') v_a

The kernel's backward, given out' and lse', is exact for the keys up to a query, as it is with sinks
(workers/layers/packed_attention.py). That of the keys ahead is made here: with P_a = exp(s_a -
lse'), the gradient of a score is P_a (grad · v_a - grad · out').

A window bounds what a query sees before it alone, as in the published classes. Spans [n, 2] are
int32 on the CPU: the first place and the end of each, counted through all rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ft_service.kernel_limits import spans_at_once
from workers.layers.scored_attention import one_a_head

_Places = tuple[Tensor, slice, Tensor]
"""Index of [rows, heads, length, ..] that gives [spans, tokens, heads, ..]."""


def add_ahead(
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scale: float,
) -> Tensor:
    """Change a kernel's out [rows, heads, length, d] in place, and return the log-sums that its
    backward is to be given, fp32 [rows, heads, length]. `sums`: the kernel's; query [rows, heads,
    length, d], key and value [rows, groups, length, d].
    """
    whole = sums.clone()
    for places in _lots(query, spans):
        q, k, v = _at(places, query, key, value)
        scores = _ahead(q, k, scale)
        before = sums[places].transpose(1, 2)
        own = torch.logaddexp(before, scores.logsumexp(dim=-1))
        shares = (scores - own.unsqueeze(-1)).exp()
        kept = out[places].transpose(1, 2) * (before - own).exp().unsqueeze(-1)
        added = shares.to(v.dtype) @ v
        out[places] = (kept + added).to(out.dtype).transpose(1, 2)
        whole[places] = own.transpose(1, 2)
    return whole


def add_ahead_grads(
    grads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    spans: Tensor,
    scale: float,
) -> None:
    """Add to a kernel's gradients of query, key and value, in place, those by the keys ahead.

    `grad`: of `out`; `out`, `sums`: as `add_ahead` left and returned them.
    """
    of_query, of_key, of_value = grads
    groups = of_key.shape[1]
    for places in _lots(query, spans):
        q, k, v = _at(places, query, key, value)
        g, o = (own[places].transpose(1, 2) for own in (grad, out))
        shares = (_ahead(q, k, scale) - sums[places].transpose(1, 2).unsqueeze(-1)).exp()
        of_shares = (g @ v.mT).float() - (g.float() * o.float()).sum(dim=-1, keepdim=True)
        of_scores = (shares * of_shares * scale).to(q.dtype)
        _add(of_query, places, of_scores @ k, q.shape[1])
        _add(of_key, places, of_scores.mT @ q, groups)
        _add(of_value, places, shares.to(g.dtype).mT @ g, groups)


def _ahead(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scores of the keys behind each query in its span, fp32 [spans, heads, tokens, tokens]."""
    scores = (query @ key.mT).float() * scale
    behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(behind, float("-inf"))


def _at(places: _Places, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """[spans, heads, tokens, d] each, keys and values one a head."""
    q, k, v = (own[places].transpose(1, 2) for own in (query, key, value))
    return q, *one_a_head(q, k, v)


def _add(to: Tensor, places: _Places, added: Tensor, groups: int) -> None:
    """Add [spans, heads, tokens, d], summed over the heads that share one of so many groups."""
    own = added.float().unflatten(1, (groups, -1)).sum(dim=2).transpose(1, 2)
    to[places] = (to[places] + own).to(to.dtype)


def _lots(query: Tensor, spans: Tensor) -> Iterator[_Places]:
    """Places of spans of one length, as many at a time as have room."""
    _, heads, length, _ = query.shape
    by_length: dict[int, list[int]] = {}
    for begin, end in spans.tolist():
        if end - begin > 1:
            by_length.setdefault(end - begin, []).append(begin)
    for tokens, begins in by_length.items():
        own = torch.tensor(begins)[:, None] + torch.arange(tokens)
        for lot in own.to(query.device).split(spans_at_once(tokens, heads)):
            yield lot // length, slice(None), lot % length
