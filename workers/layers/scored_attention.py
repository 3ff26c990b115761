"""Causal attention with explicit scores, a number of queries at a time, for what fused kernels do
not compute. Forward and backward are written by hand, since both run inside operators, below
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

ROWS_AT_ONCE = 512
"""Queries whose scores exist at once."""


@dataclass(frozen=True)
class AttentionPattern:
    """Which keys before it a query sees, and how their scores become shares."""

    scale: float
    window: int = 0
    """Tokens that a query sees at most, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores become tanh(score / softcap) * softcap; 0: they stay."""
    sinks: Tensor | None = None
    """One more score a head, [heads], that has no value."""
    chosen: Tensor | None = None
    """Positions of the keys that a query sees of those before it, int [rows, length, keys];
    positions outside the row are ignored. None: all.
    """
    spans: Tensor | None = None
    """int32 [n, 2], on the CPU: the first place and the end of every run of tokens that see each
    other in both directions, counted through all rows. None: there are none.
    """

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels compute it; sinks and what spans see ahead are added to what they
        give (`workers.layers.packed_attention`, `two_way_spans`).
        """
        return not self.softcap and self.chosen is None

    def of_segment(self, start: int, end: int) -> AttentionPattern:
        """The same with the spans of a segment [start, end) of a row, counted from its start."""
        if self.spans is None:
            return self
        within = (self.spans[:, 0] >= start) & (self.spans[:, 1] <= end)
        return replace(self, spans=self.spans[within] - start if within.any() else None)


def attention_pattern(query: Tensor, options: Mapping[str, Any]) -> AttentionPattern:
    """The pattern that transformers' options of an attention function describe."""
    scale = options.get("scaling")
    chosen = options.get("indices")
    return AttentionPattern(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
        chosen=chosen if chosen is not None and chosen.shape[-1] else None,
    )


def is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether an attention is causal and has no bias by position, by transformers' options
    or by its module.
    """
    causal = options.get("is_causal")
    return options.get("position_bias") is None and bool(
        getattr(module, "is_causal", True) if causal is None else causal
    )


def scored(query: Tensor, key: Tensor, value: Tensor, shape: AttentionPattern) -> Tensor:
    """query [rows, heads, length, d], key and value [rows, groups, length, d] → [rows, heads,
    length, d], in value's dtype.
    """
    key, value = one_a_head(query, key, value)
    parts = []
    for own, seen, mask in _parts(query, shape):
        shares, _ = shares_of(query[:, :, own], key[:, :, seen], mask, shape)
        parts.append(shares.to(value.dtype) @ value[:, :, seen])
    return torch.cat(parts, dim=2)


def scored_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, shape: AttentionPattern
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, one key and value a head; the shares are computed again.

    Sums are in fp32.

    With P the shares and D = grad Vᵀ: the gradient of the scores is P ∘ (D - Σ P ∘ D), since a
    sink's value is zero.
    """
    wide_key, wide_value = one_a_head(query, key, value)
    of_query = torch.empty_like(query)
    of_key, of_value = (
        torch.zeros_like(tensor, dtype=torch.float32) for tensor in (wide_key, wide_value)
    )
    for own, seen, mask in _parts(query, shape):
        q = query[:, :, own]
        k = wide_key[:, :, seen]
        v = wide_value[:, :, seen]
        g = grad[:, :, own]
        shares, slope = shares_of(q, k, mask, shape)
        of_value[:, :, seen] += shares.to(g.dtype).transpose(-2, -1) @ g
        of_shares = (g @ v.transpose(-2, -1)).float()
        of_scores = (
            shares * (of_shares - (shares * of_shares).sum(dim=-1, keepdim=True)) * shape.scale
        )
        of_scores = (of_scores if slope is None else of_scores * slope).to(q.dtype)
        of_query[:, :, own] = of_scores @ k
        of_key[:, :, seen] += of_scores.transpose(-2, -1) @ q
    return of_query, of_key, of_value


def gradients_like(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What an operator for attention's gradients returns, without its values: what a compiler has
    to know of it.
    """
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


Longest = Tensor | int | None
"""Tokens of the longest sample at most, for a compiler as int32 [] on the CPU.

None: all samples have as many.
"""
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Longest, AttentionPattern], Tensor]
"""Function of a GPU for samples in rows: query [rows, heads, length, d], key and value [rows,
groups, length, d], the first token of each sample and the end, int32, as if the rows were one,
tokens of the longest, and the pattern
→ [rows, length, heads, d]."""


def most_tokens(longest: Longest, starts: Tensor, tokens: int) -> int:
    """Tokens of the longest of the samples that start there, of so many tokens together."""
    return tokens // (len(starts) - 1) if longest is None else int(longest)


def joined(rows: Tensor) -> Tensor:
    """[rows, heads, length, d] → [rows · length, heads, d], as kernels for rows of samples take
    it.
    """
    return rows.transpose(1, 2).flatten(0, 1)


@torch.enable_grad()
def assert_same(
    kernel: Kernel,
    pattern: AttentionPattern,
    device: torch.device,
    windows: Sequence[int] = (0, 50),
    lengths: Sequence[int] = (70, 230, 1),
) -> None:
    """Raise AssertionError if a kernel computes something else than explicit scores, in bf16,
    forward or backward. A pattern of four heads, with each of these windows (0: without one), in a
    row of samples of these lengths.
    """
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    heads = (4, 2, 2, 4)
    drawn = (
        torch.randn(1, n, sum(lengths), 64, generator=generator).bfloat16().to(device)
        for n in heads
    )
    query, key, value, grad = drawn
    inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    for window in windows:
        own = replace(pattern, window=window)
        out = kernel(*inputs, starts.to(device), max(lengths), own)
        found = [out.transpose(1, 2), *torch.autograd.grad(out, inputs, grad.transpose(1, 2))]
        samples = [slice(start, end) for start, end in pairwise(starts.tolist())]
        parts = [
            [tensor.detach()[:, :, sample] for tensor in (*inputs, grad)] for sample in samples
        ]
        patterns = [own.of_segment(sample.start, sample.stop) for sample in samples]
        each = list(zip(parts, patterns, strict=True))
        grads = zip(*(scored_grad(g, q, k, v, of) for (q, k, v, g), of in each), strict=True)
        expected = [tuple(scored(q, k, v, of) for (q, k, v, _), of in each), *grads]
        for name, ours, theirs in zip(
            ("output", "query", "key", "value"), found, expected, strict=True
        ):
            whole = torch.cat(theirs, dim=2).float().unflatten(1, (ours.shape[1], -1)).sum(dim=2)
            apart = float((ours.detach().float() - whole).norm() / whole.norm())
            assert apart < 2e-2, f"{name}: {apart:.1%} apart from explicit scores"


def one_a_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [rows, groups, length, d], repeated to one for each head of the query."""
    shared = query.shape[1] // key.shape[1]
    return key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)


def shares_of(
    query: Tensor, key: Tensor, mask: Tensor, shape: AttentionPattern
) -> tuple[Tensor, Tensor | None]:
    """What each query takes of each value, fp32 [rows, heads, queries, keys], and the slope of the
    cap where there is one. `mask`: bool, of the keys that are seen: in place of `shape`'s window
    and chosen keys.
    """
    scores = (query @ key.transpose(-2, -1)).float() * shape.scale
    slope = None
    if shape.softcap:
        bent = torch.tanh(scores / shape.softcap)
        scores = bent * shape.softcap
        slope = 1 - bent.square()
    scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is None:
        return scores.softmax(dim=-1), slope
    sinks = shape.sinks.float().view(1, -1, 1, 1)
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - largest).exp()
    return weights / (weights.sum(dim=-1, keepdim=True) + (sinks - largest).exp()), slope


def _parts(query: Tensor, shape: AttentionPattern) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, the keys that any of them sees, and which of them each does: bool [queries, keys],
    or [rows, 1, queries, keys] where they are chosen, or see each other in spans.
    """
    length = query.shape[2]
    window = shape.window
    ends = None if shape.spans is None else _ends(query, shape.spans)
    for start in range(0, length, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, length)
        first = max(0, start - window + 1) if window else 0
        last = end if ends is None else int(ends[:, start:end].max())
        keys = torch.arange(first, last, device=query.device)
        distance = torch.arange(start, end, device=query.device)[:, None] - keys
        mask = distance >= 0 if ends is None else (keys < ends[:, start:end, None])[:, None]
        if window:
            mask = mask & (distance < window)
        if shape.chosen is not None:
            mask = mask & _picked(shape.chosen[:, start:end], length)[:, None, :, first:last]
        yield slice(start, end), slice(first, last), mask


def _ends(query: Tensor, spans: Tensor) -> Tensor:
    """Behind the last key that each query sees, int64 [rows, length]."""
    rows, _, length, _ = query.shape
    ends = (torch.arange(length) + 1).repeat(rows)
    for begin, end in spans.tolist():
        ends[begin:end] = (end - 1) % length + 1
    return ends.view(rows, length).to(query.device)


def _picked(chosen: Tensor, count: int) -> Tensor:
    """Which of `count` keys are among the chosen: bool [rows, queries, count]."""
    places = torch.where((chosen < 0) | (chosen > count), count, chosen).long()
    picked = torch.zeros(
        *places.shape[:-1], count + 1, dtype=torch.bool, device=places.device
    ).scatter_(-1, places, True)
    return picked[..., :-1]
