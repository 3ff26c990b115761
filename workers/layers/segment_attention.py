"""Causal attention within samples that are concatenated in a row: no token sees another sample, and
none is padded.

It stands where transformers' attention stood, for the architectures that let it be chosen, so that
no mask is ever made. Rows of padded samples are taken the same way: as one segment each, whose
padding comes last.

    segment    the tokens of one sample in a row: query i sees the keys i - window + 1 .. i of its
               own segment
    window     keys that a query sees at most; 0: all before it
    chunk      tokens of a segment's parts that do not see each other, in some layers (Llama 4); 0:
               it is whole
    softcap    scores become tanh(score / softcap) * softcap; 0: they stay
    sinks      one more score a head, [heads], that takes part in the softmax and has no value
               (gpt-oss)
    spans      runs of tokens of a picture that also see those behind them in their run, in some
               layers (Gemma 3)
    chosen     positions in their segment of the keys that a query sees, of those before it: what an
               indexer chose (workers/patches/indexed_attention.py)

Attention is opaque operators, as the products with frozen weights are: the compiler need not look
into lengths that change at every step, and selective checkpointing keeps their results by their
namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from workers.layers import capped_attention, cudnn_attention, exchange, packed_attention
from workers.layers.packed_attention import add_sinks
from workers.layers.scored_attention import (
    AttentionPattern,
    Kernel,
    attention_pattern,
    gradients_like,
    is_causal,
    scored,
    scored_grad,
)
from workers.layers.segments import CURRENT, Bounds, chunk_of, spans_of, tempered
from workers.layers.two_way_spans import add_ahead, add_ahead_grads

NAME = "ft_segments"
"""Name of this attention among transformers' implementations."""
_OTHER = (-1, -1)
"""Description of a mask that neither a window nor a chunk describes."""


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [rows, heads, length, d], key and value
    [rows, groups, length, ..] → [rows, length, heads, ..]. `options`: transformers' own; its
    `indices` are the chosen keys, int [rows, length, keys]. Where ranks share a row, all of this is
    of this rank's part of it.

    Raises NotImplementedError for what only a mask could say, and for a part of a row as
    `exchange.of_own_heads`.
    """
    pattern = attention_pattern(query, options)
    if not is_causal(module, options) or query.shape[2] != key.shape[2]:
        _refuse(f"{type(module).__name__} is not causal, or has a bias by position")
    chunk = chunk_of(module)
    if (
        attention_mask is not None and attention_mask.numel()
    ):  # an empty one says nothing: indexed_attention.py
        _compare(module, attention_mask, pattern.window, chunk)
    width = value.shape[-1]
    query, key, value = _of_one_width(query, key, value)
    heads = query.shape[1]
    groups = key.shape[1]
    if CURRENT.part is not None:
        query, key, value = exchange.with_fewer_heads(query, key, value, CURRENT.part.ranks)
        pattern = exchange.of_own_heads(pattern, groups, CURRENT.part)
    query = tempered(module, query)
    pattern = replace(pattern, spans=spans_of(module))
    if pattern.spans is not None and (chunk or pattern.chosen is not None):
        _refuse(f"{type(module).__name__} cuts samples, and its pictures see both ways")
    bounds = CURRENT.bounds(query.shape[2], chunk)
    kernel = _fused_kernel(query, pattern)
    if (
        kernel is not None
        and CURRENT.packed
        and cudnn_attention.takes(query, key, value, bounds, pattern)
    ):
        out = cudnn_attention.attend_packed(query, key, value, bounds, pattern)
    elif kernel is not None and CURRENT.packed:
        assert bounds.on_device is not None, "Segments.fused"
        longest = bounds.longest_given if torch.compiler.is_compiling() else bounds.longest
        out = kernel(query, key, value, bounds.on_device, longest, pattern)
    elif kernel is not None and (not chunk or query.shape[2] <= chunk):
        out = kernel(query, key, value, _of_padded_rows(query), None, pattern)
    elif (
        pattern.is_plain
        and pattern.sinks is None
        and pattern.spans is None
        and query.is_cuda
        and _without_window(bounds, pattern.window)
    ):
        out = causal_segments(query, key, value, bounds.starts, pattern.scale)
    else:
        fields = (pattern.scale, pattern.window, pattern.softcap, pattern.sinks, pattern.chosen)
        out, _lse = attend(query, key, value, bounds.starts, *fields, pattern.spans)
    if out.shape[-1] != width:
        out = out[..., :width]
    if CURRENT.part is not None:
        out = exchange.with_all_heads(out, heads, groups, CURRENT.part.ranks)
    return out, None


def _refuse(what: str) -> None:
    if CURRENT.faults is None:
        raise NotImplementedError(what)
    CURRENT.faults.append(what)


def _compare(module: nn.Module, mask: Tensor, window: int, chunk: int) -> None:
    """Compare the mask that the architecture would make, as `described_mask` describes it, with
    what its layer names.
    """
    described = tuple(mask.flatten().tolist()) if mask.numel() == 2 else _OTHER
    if described != (window, chunk):
        shape = "is not causal" if described == _OTHER else _named(*described)
        _refuse(
            f"the mask of {type(module).__name__} {shape}, and its layer {_named(window, chunk)}"
        )


def _named(window: int, chunk: int) -> str:
    return (
        f"has a window of {window}"
        if window
        else f"has chunks of {chunk}"
        if chunk
        else "has no window"
    )


def described_mask(
    *_: Any,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    device: torch.device | None = None,
    **__: Any,
) -> Tensor:
    """Return a description in place of a mask: int64 [1, 1, 1, 2], window and chunk, 0 for none, or
    -1 twice for another shape.

    Called by transformers' mask creation as any of its mask functions, for models with this
    attention.
    """
    zero = torch.zeros((), dtype=torch.int64)
    # Behind any window in use: 262,144 are the most that are published.
    keys = torch.arange(1 << 19)

    def seen(query: Tensor, keys: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(query.shape, keys.shape)
        return torch.as_tensor(mask_function(zero, zero, query, keys)).broadcast_to(shape)

    blind = (~seen(keys, zero)).nonzero()
    reach = int(blind[0]) if len(blind) else 0
    """First query that does not see the first key, 0 if all do."""
    shapes = {
        (reach, 0): lambda query: (keys <= query) & ((keys > query - reach) if reach else True),
        (0, reach): lambda query: (
            (keys <= query) & ((keys // reach == query // reach) if reach else True)
        ),
    }
    tried = (0, 1, 7, 100, reach - 1, reach, reach + 1, 2 * reach + 3, len(keys) - 1)
    queries = [query for query in tried if 0 <= query < len(keys)]

    def holds(shape: Any) -> bool:
        return all(torch.equal(seen(torch.tensor(query), keys), shape(query)) for query in queries)

    described = next((named for named, shape in shapes.items() if holds(shape)), _OTHER)
    return torch.tensor(described, dtype=torch.int64, device=device).view(1, 1, 1, 2)


AttentionInterface.register(NAME, segment_attention)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with as many channels a head, as fused kernels want them.

    Zeros add nothing to scores, nor to other values.
    """
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    return (
        (query, key, value)
        if missing == 0
        else (F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value)
    )


def _fits_kernel(query: Tensor) -> bool:
    """Whether a GPU's fused kernel for packed rows takes heads of this dtype and width."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def _fused_kernel(query: Tensor, pattern: AttentionPattern) -> Kernel | None:
    """The fused kernel that computes this for segments on a GPU; None: there is none."""
    if not CURRENT.fused or not _fits_kernel(query):
        return None
    if pattern.is_plain:
        return packed_attention.attend_packed
    return capped_attention.attend_packed if capped_attention.takes(query, pattern) else None


def _of_padded_rows(query: Tensor) -> Tensor:
    """The first token of each row's sample, and the end.

    The padding comes last, and is a part of it.
    """
    rows, _, length, _ = query.shape
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)


def _without_window(bounds: Bounds, window: int) -> bool:
    """Whether no query is farther into its segment than it sees, and PyTorch's own attention can be
    called for each segment: the compiler cannot follow lengths.
    """
    return not (CURRENT.packed and torch.compiler.is_compiling()) and (
        not window or bounds.longest <= window
    )


def causal_segments(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scale: float
) -> Tensor:
    """Causal attention by PyTorch's own choice of kernel, segment by segment → [rows, length,
    heads, d]. For GPUs without a kernel for packed rows, or that it does not fit, and for padded
    rows. `starts`: as in `Bounds`.
    """
    grouped = query.shape[1] != key.shape[1]
    lengths = [query.shape[2]] if starts is None else starts.diff().tolist()
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    parts = [
        F.scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=grouped)
        for own in segments
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


# The operators
# ------------------------------------------------------------------------------


@torch.library.custom_op("ft_service::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chosen: Tensor | None,
    spans: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """query [rows, heads, length, d], key and value [rows, groups, length, d] → [rows, length,
    heads, d], in the query's dtype, and the log-sums that the backward wants, fp32 [rows, heads,
    length]. The other arguments are the fields of an `AttentionPattern`.
    """
    rows, heads, length, _ = query.shape
    out = query.new_empty(rows, length, heads, query.shape[-1])
    sums = query.new_zeros(rows, heads, length, dtype=torch.float32)
    shape = AttentionPattern(scale, window, softcap, sinks, chosen, spans)
    for own, shape_of_own in _segments(starts, length, shape):
        q = query[:, :, own]
        k = key[:, :, own]
        v = value[:, :, own]
        if _by_kernel(q, shape_of_own):
            k, v = _for_kernel(k, v, heads)
            part, own_sums = _kernel(q, k, v, 0.0, True, scale=scale)
            if shape.sinks is not None:
                own_sums = add_sinks(part, own_sums, shape.sinks)
            if shape_of_own.spans is not None:
                own_sums = add_ahead(part, own_sums, q, k, v, shape_of_own.spans, scale)
            sums[:, :, own] = own_sums
        else:
            part = scored(q, k, v, shape_of_own)
        out[:, own] = part.transpose(1, 2)
    return out, sums


@torch.library.custom_op("ft_service::attend_grad", mutates_args=())
def _attend_grad(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chosen: Tensor | None,
    spans: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    heads, length = query.shape[1:3]
    shape = AttentionPattern(scale, window, softcap, sinks, chosen, spans)
    for own, shape_of_own in _segments(starts, length, shape):
        q = query[:, :, own]
        k = key[:, :, own]
        v = value[:, :, own]
        g = grad[:, own].transpose(1, 2)
        if _by_kernel(q, shape_of_own):
            wide_k, wide_v = _for_kernel(k, v, heads)
            answer = out[:, own].transpose(1, 2), sums[:, :, own]
            given = g, q, wide_k, wide_v, *answer
            if q.dtype == torch.bfloat16 and _is_small(q):
                given = tuple(tensor.float() for tensor in given)
            parts = _kernel_grad(*given, 0.0, True, scale=scale)
            if shape_of_own.spans is not None:
                ahead = (shape_of_own.spans, scale)
                add_ahead_grads(parts, g, q, wide_k, wide_v, *answer, *ahead)
        else:
            parts = scored_grad(g, q, k, v, shape_of_own)
        for all_of, part in zip(grads, parts, strict=True):
            groups = all_of.shape[1]
            all_of[:, :, own] = (
                part if part.shape[1] == groups else part.unflatten(1, (groups, -1)).sum(dim=2)
            )
    return grads


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, length, width = query.shape
    return query.new_empty(rows, length, heads, width), query.new_empty(
        rows, heads, length, dtype=torch.float32
    )


_attend_grad.register_fake(gradients_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, *rest = inputs
    ctx.save_for_backward(
        query, key, value, *output, starts, *(r for r in rest if isinstance(r, Tensor))
    )
    ctx.rest = [None if isinstance(r, Tensor) else (r,) for r in rest]
    """Values that are not tensors, at their positions."""
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad is not None, "nothing but the output is used"
    query, key, value, out, sums, starts, *others = ctx.saved_tensors
    tensors = iter(others)
    rest = [next(tensors) if value is None else value[0] for value in ctx.rest]
    grads = _attend_grad(grad, query, key, value, out, sums, starts, *rest)
    return *grads, None, *[None] * len(rest)


attend.register_autograd(_backward, setup_context=_setup_context)


def _segments(
    starts: Tensor | None, length: int, shape: AttentionPattern
) -> Iterator[tuple[slice, AttentionPattern]]:
    """Each segment of a row of `length` tokens, and its attention: with the chosen keys of its
    queries, where it chooses, and with its own spans.
    """
    places = [0, length] if starts is None else starts.tolist()
    assert places[-1] == length, "the segments are those of another micro-batch"
    for start, end in pairwise(places):
        chosen = (
            None
            if shape.chosen is None or end - start <= shape.chosen.shape[-1]
            else shape.chosen[:, start:end]
        )
        own = shape if starts is None else shape.of_segment(start, end)
        yield slice(start, end), replace(own, chosen=chosen)


# One segment
# ------------------------------------------------------------------------------

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_kernel(query: Tensor, shape: AttentionPattern) -> bool:
    """Return whether PyTorch's fused kernel for the CPU computes this attention."""
    return (
        shape.is_plain
        and query.device.type == "cpu"
        and (not shape.window or query.shape[2] <= shape.window)
    )


_SMALL = 2**25
"""Scores times channels up to which the kernel's backward is called in fp32: on a processor with
AMX it takes 1.5 milliseconds for a sample of 100 tokens and 8 heads of 32 in bf16, most of them
before it computes, and 0.3 in fp32; with more, bf16 is faster.
"""


def _is_small(query: Tensor) -> bool:
    return query.numel() * query.shape[2] <= _SMALL


def _for_kernel(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel takes them: one a head where it knows no groups."""
    if key.shape[1] == heads or _kernel_knows_groups():
        return key, value
    return tuple(
        tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value)
    )  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=1)
def _kernel_knows_groups() -> bool:
    """Whether heads may share keys and values, forward and backward; PyTorch's releases differ."""
    query = torch.ones(1, 2, 3, 8).tril()
    shared = torch.arange(24.0).view(1, 1, 3, 8) / 24
    try:
        out, sums = _kernel(query, shared, shared, 0.0, True)
        one, _ = _kernel(query[:, :1], shared, shared, 0.0, True)
        grads = _kernel_grad(out, query, shared, shared, out, sums, 0.0, True)
    except RuntimeError:
        return False
    return torch.allclose(out[:, :1], one) and grads[1].shape == shared.shape
