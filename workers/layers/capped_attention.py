"""Attention with soft-capped scores (Gemma 2) by the package flash-attn, on GPUs where it is
installed: no scores are written.

PyTorch's fused kernels know no caps. Its FlexAttention does, and would write all scores of a row
where it is not compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.layers.packed_attention import DeterministicAttention
from workers.layers.scored_attention import (
    AttentionPattern,
    Longest,
    assert_same,
    joined,
    most_tokens,
)
from workers.quant import gpu_kernels


def takes(query: Tensor, pattern: AttentionPattern) -> bool:
    """Return whether the package computes it: scores are capped, and there are no sinks, no chosen
    keys, no spans and no compiler.
    """
    if (
        not pattern.softcap
        or pattern.sinks is not None
        or pattern.chosen is not None
        or pattern.spans is not None
        or torch.compiler.is_compiling()
    ):
        return False
    return KERNEL.on(query.device) is not None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: Longest,
    pattern: AttentionPattern,
) -> Tensor:
    """Samples in rows (`scored_attention.Kernel`)."""
    return _by(KERNEL.on(query.device), query, key, value, starts, longest, pattern)


def _by(
    package: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: Longest,
    pattern: AttentionPattern,
) -> Tensor:
    seen = (pattern.window - 1 if pattern.window else -1, 0)
    options = {
        "softmax_scale": pattern.scale,
        "causal": True,
        "window_size": seen,
        "softcap": pattern.softcap,
    }
    options |= {"deterministic": DeterministicAttention.wanted}
    rows = [joined(tensor) for tensor in (query, key, value)]
    most = most_tokens(longest, starts, len(rows[0]))
    out = package.flash_attn_varlen_func(*rows, starts, starts, most, most, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _compare(package: Any, device: torch.device) -> None:
    assert_same(lambda *row: _by(package, *row), AttentionPattern(0.2, softcap=2.0), device)


KERNEL = gpu_kernels.CheckedKernel("flash_attn", _compare)
