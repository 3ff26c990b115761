"""The GPU's kernels for packed rows, on a processor, with their arguments, so that the branch of
the workers that calls them can run, and be compiled, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from workers.layers import packed_attention, segments


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    _: Tensor,
    longest: int,
    *rest: Any,
    **seen: Any,
) -> tuple[Any, ...]:
    """Return what aten's _flash_attention_forward does: the output [tokens, heads, d], the log-sums
    [heads, tokens], and more that nobody reads.
    """
    out = torch.empty_like(query)
    sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for own in _samples(starts, longest):
        scores, _wide_key, wide_value = _scores(query[own], key[own], value[own], **seen)
        sums[:, own] = scores.logsumexp(dim=-1)
        out[own] = (scores.softmax(dim=-1) @ wide_value).transpose(0, 1)
    return out, sums, None, None, None


def _kernel_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **seen: Any
) -> tuple[Tensor, ...]:
    """Return what aten's _flash_attention_backward does, by the output and the log-sums that it is
    given, as kernels do.
    """
    out, sums, starts, _, longest, *_ = rest
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for own in _samples(starts, longest):
        scores, wide_key, wide_value = _scores(query[own], key[own], value[own], **seen)
        shares = (scores - sums[:, own, None]).exp()
        g = grad[own].float().transpose(0, 1)
        taken = (g * out[own].transpose(0, 1)).sum(dim=-1, keepdim=True)
        of_scores = shares * (g @ wide_value.mT - taken) * seen["scale"]
        parts = (
            of_scores @ wide_key,
            of_scores.mT @ query[own].float().transpose(0, 1),
            shares.mT @ g,
        )
        for all_of, part in zip(grads, parts, strict=True):
            all_of[own] = part.unflatten(0, (all_of.shape[1], -1)).sum(dim=1).transpose(0, 1)
    return grads


def _samples(starts: Tensor, longest: int) -> Iterator[slice]:
    for start, end in pairwise(starts.tolist()):
        assert end - start <= longest, "the kernel computes no more queries of a segment"
        yield slice(start, end)


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """[heads, queries, keys] of one sample, and its keys and values, one a head."""
    assert window_size_right == 0
    shared = query.shape[1] // key.shape[1]
    keys, values = (
        tensor.float().repeat_interleave(shared, dim=1).transpose(0, 1) for tensor in (key, value)
    )
    places = torch.arange(query.shape[0])
    distance = places[:, None] - places
    seen = (distance >= 0) & (
        distance <= (window_size_left if window_size_left >= 0 else len(places))
    )
    return (
        (query.float().transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, float("-inf")),
        keys,
        values,
    )


@contextmanager
def fused_attention() -> Iterator[None]:
    """While it is entered, the workers take this processor for a GPU that has the kernel."""
    with (
        patch.object(segments, "_has_kernel", lambda device: True),
        patch.object(packed_attention, "_kernel", _kernel),
        patch.object(packed_attention, "_kernel_grad", _kernel_grad),
    ):
        yield
