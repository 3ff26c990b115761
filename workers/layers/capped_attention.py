"""Attention with soft-capped scores (Gemma 2) by the package flash-attn, on GPUs where it is installed: no scores are written.

PyTorch's fused kernels know no caps. Its FlexAttention does, and would write all scores of a row where it is not compiled.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from workers.layers.scored_attention import AttentionPattern, scored, scored_grad
from workers.layers.segments import Bounds
from workers.quant import gpu_kernels

PACKAGE = "flash_attn"


def takes(query: Tensor, pattern: AttentionPattern) -> bool:
    """Whether the package computes it: the scores are capped, and there are no sinks, no chosen keys, and no compiler."""
    if not pattern.softcap or pattern.sinks is not None or pattern.chosen is not None or torch.compiler.is_compiling():
        return False
    return query.device.type == "cuda" and kernel_fault(query.device) is None


def kernel_fault(device: torch.device) -> str | None:
    """Why capped scores are written out on a GPU; None: they are not, or the device is none."""
    return _kernels(device)[1] if device.type == "cuda" else None


def capped_segments(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, pattern: AttentionPattern) -> Tensor:
    """query [1, heads, tokens, d], key and value [1, groups, tokens, d] → [1, tokens, heads, d]. `bounds`: on the device."""
    return _by(_kernels(query.device)[0], query, key, value, bounds, pattern)


def _kernels(device: torch.device) -> tuple[Any, str | None]:
    return gpu_kernels.checked(PACKAGE, _compare, device)


def _by(package: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, pattern: AttentionPattern) -> Tensor:
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    starts, longest = bounds.on_device, bounds.longest
    options = {"softmax_scale": pattern.scale, "causal": True, "softcap": pattern.softcap}
    seen = (pattern.window - 1 if pattern.window else -1, 0)
    return package.flash_attn_varlen_func(*rows, starts, starts, longest, longest, window_size=seen, **options).unsqueeze(0)


def _compare(package: Any, device: torch.device) -> None:
    """Raise AssertionError if the package computes something else than explicit scores, forward or backward."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 70, 300, 301], dtype=torch.int32)
    shapes = (1, 4, 301, 64), (1, 2, 301, 64), (1, 2, 301, 64), (1, 4, 301, 64)
    query, key, value, grad = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    for window in (0, 50):
        pattern = AttentionPattern(0.2, window, 2.0)
        out = _by(package, *inputs, Bounds(starts, starts.to(device), 256), pattern).transpose(1, 2)
        found = [out, *torch.autograd.grad(out, inputs, grad)]
        places = [slice(start, end) for start, end in pairwise(starts.tolist())]
        parts = [[tensor.detach()[:, :, own] for tensor in (query, key, value, grad)] for own in places]
        grads = zip(*(scored_grad(g, q, k, v, pattern) for q, k, v, g in parts), strict=True)
        expected = [tuple(scored(q, k, v, pattern) for q, k, v, _ in parts), *grads]
        for name, ours, own in zip(("output", "query", "key", "value"), found, expected, strict=True):
            theirs = torch.cat(own, dim=2).float().unflatten(1, (ours.shape[1], -1)).sum(dim=2)
            apart = float((ours.detach().float() - theirs).norm() / theirs.norm())
            assert apart < 2e-2, f"capped scores, {name}: {apart:.1%} apart"
