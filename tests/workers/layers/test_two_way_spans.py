"""Attention whose spans see both ways, next to a mask written out, forward and backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from workers.layers import packed_attention, segment_attention
from workers.layers.scored_attention import AttentionPattern, one_a_head
from workers.layers.segment_attention import attend

STARTS = torch.tensor([0, 7, 20, 21], dtype=torch.int32)
LENGTH = 21
SPANS = [[1, 5], [9, 12], [13, 20]]
SINKS = torch.tensor([-1.0, 0.0, 2.0, 1.0])


def rows(count: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Query, key and value, and a gradient of what is made of them."""
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int) -> Tensor:
        return torch.randn(count, heads, LENGTH, 8, generator=generator)

    return (drawn(4), drawn(2), drawn(2)), drawn(4)


def wanted(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Copies that take gradients."""
    query, key, value = (own.clone().requires_grad_() for own in inputs)
    return query, key, value


def expected(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None
) -> Tensor:
    """[rows, heads, length, d], from bool [rows, length, length]."""
    key, value = one_a_head(query, key, value)
    scores = (query @ key.mT * 0.3).masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], dim=-1)
    return scores.softmax(dim=-1)[..., : key.shape[2]] @ value


def mask(count: int, starts: Tensor | None, window: int, spans: list[list[int]]) -> Tensor:
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    seen = (distance >= 0).repeat(count, 1, 1)
    for begin, end in spans:
        own = slice(begin % LENGTH, (end - 1) % LENGTH + 1)
        seen[begin // LENGTH, own, own] = True
    if window:
        seen &= distance < window
    if starts is not None:
        sample = torch.bucketize(place, starts[1:], right=True)
        seen &= sample[:, None] == sample
    return seen


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("packed", [True, False])
def test_a_segment_is_computed_as_its_mask_says(
    packed: bool, window: int, sinks: Tensor | None
) -> None:
    count, starts = (1, STARTS) if packed else (2, None)
    spans = SPANS if packed else [[1, 5], [LENGTH + 2, LENGTH + 9], [LENGTH + 15, 2 * LENGTH]]
    inputs, grad = rows(count)
    ours = wanted(inputs)
    given = torch.tensor(spans, dtype=torch.int32)
    out, _ = attend(*ours, starts, 0.3, window, 0.0, sinks, None, given)
    theirs = wanted(inputs)
    truth = expected(*theirs, mask(count, starts, window, spans), sinks)
    assert torch.allclose(out.transpose(1, 2), truth, atol=1e-5)
    found = torch.autograd.grad(out, ours, grad.transpose(1, 2))
    for one, other in zip(found, torch.autograd.grad(truth, theirs, grad), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def on_cpu(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **given: Any) -> Any:
    """In place of a GPU's kernel for rows of samples: out [tokens, heads, d] and log-sums."""
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for start, end in pairwise(starts.tolist()):
        q, k, v = (t[start:end].transpose(0, 1)[None] for t in (query, key, value))
        wide = segment_attention._for_kernel(k, v, query.shape[1])
        part, logs = segment_attention._kernel(q, *wide, 0.0, True, scale=given["scale"])
        out[start:end], sums[:, start:end] = part[0].transpose(0, 1), logs[0]
    return out, sums


def grad_on_cpu(grad: Tensor, *given: Any, scale: float, **_: Any) -> tuple[Tensor, ...]:
    """In place of that kernel's backward."""
    query, key, value, out, sums, starts = given[:6]
    grads = tuple(torch.empty_like(own) for own in (query, key, value))
    for start, end in pairwise(starts.tolist()):
        q, k, v, o, g = (t[start:end].transpose(0, 1)[None] for t in (query, key, value, out, grad))
        wide = segment_attention._for_kernel(k, v, query.shape[1])
        logs = sums[None, :, start:end].contiguous()
        parts = segment_attention._kernel_grad(g, q, *wide, o, logs, 0.0, True, scale=scale)
        for whole, part in zip(grads, parts, strict=True):
            groups = whole.shape[1]
            summed = part[0].unflatten(0, (groups, -1)).sum(dim=1)
            whole[start:end] = summed.transpose(0, 1)
    return grads


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_what_is_seen_ahead_is_added_to_a_kernel_for_rows(sinks: Tensor | None) -> None:
    """As on a GPU, whose kernel's formula stands for it here."""
    inputs, grad = rows(1)
    ours = wanted(inputs)
    pattern = AttentionPattern(0.3, sinks=sinks, spans=torch.tensor(SPANS, dtype=torch.int32))
    with (
        patch.object(packed_attention, "_kernel", on_cpu),
        patch.object(packed_attention, "_kernel_grad", grad_on_cpu),
        patch.object(packed_attention.DeterministicAttention, "wanted", False),
    ):
        out = packed_attention.attend_packed(*ours, STARTS, 13, pattern)
        found = torch.autograd.grad(out, ours, grad.transpose(1, 2))
    theirs = wanted(inputs)
    truth = expected(*theirs, mask(1, STARTS, 0, SPANS), sinks)
    assert torch.allclose(out.transpose(1, 2), truth, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(truth, theirs, grad), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
