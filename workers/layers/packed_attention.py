"""A GPU's fused attention of a row of samples, or of padded rows as one, with sinks too, whose
gradients repeat bit for bit.

On an H200, with 8,192 tokens in 13 samples of log-normal lengths, the backward takes 2.35 ms
instead of 1.45: to each head of a sample the kernel gives one processor, so that the longest last
when all others are done. Fewer samples a call, which have more processors each, take as long in
all.

A kernel gives out = Σ exp(s_j - lse) v_j with lse = log Σ exp(s_j). A sink z, one more score a
head, whose value is zero (gpt-oss), makes of this:

    lse' = log(exp(lse) + exp(z))        out' = out · exp(lse - lse')

The kernel's backward, given out' and lse', is exact: it makes the shares anew as P_j = exp(s_j -
lse'), and takes the sum Σ P_j (grad · v_j) as grad · out', to which a value of zero adds nothing. A
sink is frozen, and gets no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from workers.layers.scored_attention import (
    AttentionPattern,
    Longest,
    assert_same,
    gradients_like,
    joined,
    most_tokens,
)
from workers.layers.two_way_spans import add_ahead, add_ahead_grads
from workers.quant import frozen_linear, gpu_kernels
from workers.quant.direct_function import DirectFunction, once_differentiable

_kernel = torch.ops.aten._flash_attention_forward.default
_kernel_grad = torch.ops.aten._flash_attention_backward.default


def add_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Change a kernel's out [.., heads, length, d] in place, and return the log-sums that its
    backward is to be given.

    sums: the kernel's, fp32 [.., heads, length]; sinks [heads].
    """
    whole = torch.logaddexp(sums, sinks.float().unsqueeze(-1))
    out.mul_((sums - whole).exp_().unsqueeze(-1))
    return whole


def _compare(_: Any, device: torch.device) -> None:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0], device=device)
    spans = torch.tensor([[3, 60], [80, 81], [100, 220]], dtype=torch.int32)
    for pattern in (
        AttentionPattern(0.2),
        AttentionPattern(0.2, sinks=sinks),
        AttentionPattern(0.2, spans=spans),
    ):
        assert_same(attend_packed, pattern, device)


KERNEL = gpu_kernels.CheckedKernel(__name__, _compare)
"""PyTorch's own, which this module calls."""


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: Longest,
    pattern: AttentionPattern,
) -> Tensor:
    """Samples in rows (`scored_attention.Kernel`)."""
    options = pattern.scale, pattern.window
    if frozen_linear.watched():
        given = torch.tensor(longest, dtype=torch.int32) if isinstance(longest, int) else longest
        rows = (joined(tensor) for tensor in (query, key, value))
        out, _ = packed_attention(*rows, pattern.sinks, pattern.spans, starts, given, *options)
        return out.unflatten(0, (query.shape[0], query.shape[2]))
    rows = query, key, value, pattern.sinks, pattern.spans
    return _Attention.apply(*rows, starts, longest, *options)  # pyright: ignore[reportReturnType]


class _Attention(DirectFunction):
    """What the operators compute, called directly, where neither a compiler nor a dispatch mode
    sees them (`frozen_linear`).

    Tensors are turned below autograd, which would keep a node for each time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        spans: Tensor | None,
        starts: Tensor,
        longest: Any,
        scale: float,
        window: int,
    ) -> Tensor:
        ctx.sizes = query.shape[0], query.shape[2]
        ctx.rest = longest, scale, window
        query, key, value = (joined(tensor) for tensor in (query, key, value))
        out, sums = _attended(query, key, value, sinks, spans, starts, longest, scale, window)
        ctx.save_for_backward(query, key, value, out, sums, spans, starts)
        return out.view(*ctx.sizes, *out.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = _gradients(grads[0].flatten(0, 1), *ctx.saved_tensors, *ctx.rest)
        return (
            *(own.view(*ctx.sizes, *own.shape[1:]).transpose(1, 2) for own in found),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    spans: Tensor | None,
    starts: Tensor,
    longest: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """A GPU's fused attention of one row of samples: query [tokens, heads, d], key and value
    [tokens, groups, d], sinks [heads] → [tokens, heads, d], and the log-sums that the backward
    wants, fp32 [heads, tokens]. `spans`: as in `AttentionPattern`.

    starts, longest: as a `Kernel` has them; window: keys that a query sees at most, 0 for all
    before it.
    """
    seen = _seen(window)
    most = most_tokens(longest, starts, len(query))
    out, sums, *_ = _kernel(
        query, key, value, starts, starts, most, most, 0.0, not window, False, scale=scale, **seen
    )
    if sinks is not None:
        sums = add_sinks(out.transpose(0, 1), sums, sinks)
    if spans is not None:
        rows = _one_row(query), _one_row(key), _one_row(value)
        sums = add_ahead(_one_row(out), sums[None], *rows, spans, scale)[0]
    return out, sums


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    spans: Tensor | None,
    starts: Tensor,
    longest: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, in their shapes, from that of the output.

    `out`, `sums`: what `_attended` returned.
    """
    most = most_tokens(longest, starts, len(query))
    given = (
        grad,
        query,
        key,
        value,
        out,
        sums,
        starts,
        starts,
        most,
        most,
        0.0,
        not window,
        *no_dropout(query.device),
    )
    with deterministic_mode() if DeterministicAttention.wanted else nullcontext():
        found = _kernel_grad(*given, scale=scale, **_seen(window))
    if spans is not None:
        grads = _one_row(found[0]), _one_row(found[1]), _one_row(found[2])
        inputs = _one_row(query), _one_row(key), _one_row(value)
        add_ahead_grads(grads, _one_row(grad), *inputs, _one_row(out), sums[None], spans, scale)
    return found


def _one_row(own: Tensor) -> Tensor:
    """[tokens, heads, d] → [1, heads, tokens, d], the same memory."""
    return own.transpose(0, 1)[None]


@functools.cache
def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the kernel is given in place of a generator's state; it is not read."""
    return torch.empty(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


packed_attention = torch.library.custom_op(
    "ft_service::packed_attention", _attended, mutates_args=()
)
_grad_operator = torch.library.custom_op(
    "ft_service::packed_attention_grad", _gradients, mutates_args=()
)


class DeterministicAttention:
    """Whether this process adds up gradients in one order: `precision.deterministic_attention` of
    what it trains.
    """

    wanted: ClassVar[bool] = True


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """While it is entered, operators that know a deterministic way take it: PyTorch's kernel
    otherwise adds up the gradient of queries in the order in which its blocks happen to end.

    PyTorch's mode is of the process. Outside of this, operators that know no such way would be
    refused by it.
    """
    # torch.use_deterministic_algorithms sets inductor's mode too, which takes longer.
    settings = torch._C
    mode = settings._get_deterministic_algorithms()
    warn_only = settings._get_deterministic_algorithms_warn_only()
    fill = settings._get_deterministic_fill_uninitialized_memory()
    settings._set_deterministic_fill_uninitialized_memory(False)  # all of it is written
    # With warn_only, the kernel warns and keeps to its order.
    settings._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        settings._set_deterministic_algorithms(mode, warn_only=warn_only)
        settings._set_deterministic_fill_uninitialized_memory(fill)


def _seen(window: int) -> dict[str, int]:
    """A window in the kernel's words: keys before a query and behind it; -1: all."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


@packed_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _width = query.shape
    return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)


_grad_operator.register_fake(gradients_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _sinks, spans, starts, longest, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, spans, starts, longest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad is not None, "nothing but the output is used"
    return *_grad_operator(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 6


packed_attention.register_autograd(_backward, setup_context=_setup_context)
