"""Causal attention within samples that stand one behind the other in a row: no token sees another sample, and none is padded.

It stands where transformers' attention stood, for the architectures that let it be chosen, so that no mask is ever made. Rows
of padded samples are taken the same way: as one segment each, whose padding comes last.

    segment    the tokens of one sample in a row: query i sees the keys i - window + 1 .. i of its own segment
    window     keys that a query sees at most; 0: all before it
    chunk      tokens of a segment's parts that do not see each other, in some layers (Llama 4); 0: it is whole
    softcap    scores become tanh(score / softcap) * softcap; 0: they stay
    sinks      one more score a head, [heads], that takes part in the softmax and has no value (gpt-oss)
    chosen     places in their segment of the keys that a query sees, of those before it, one by one or in blocks: what
               an indexer chose (workers/layers/by_sample/)
    pooled     one more key for each block of a segment's tokens, seen by the queries behind it (DeepSeek V4)

Attention is opaque operators, as the products with frozen weights are: the compiler need not look into lengths that change at
every step, and selective checkpointing keeps their results by their namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from workers.layers.scored_attention import Seen, Shape, one_a_head, scored, scored_grad, taken
from workers.layers.segments import CURRENT, VARLEN_OPTIONS, Bounds, chunk_of, tempered, varlen_attn

NAME = "ft_segments"
"""Of this attention among transformers' implementations."""
_OTHER = (-1, -1)
"""What is told of a mask that neither a window nor a chunk describes."""


@dataclass
class Selection:
    """What a layer tells its attention beside query, key and value: of keys that are chosen, and of pooled ones."""

    mask: Tensor | None = None
    """What the layer was given as a mask."""
    block: int = 1
    """Tokens that one chosen place stands for, or that one pooled key is made of."""
    chosen: Tensor | None = None
    """int [rows, one or groups, length, places]; those that are not there mean nothing. None: all are seen."""
    whole: int = 0
    """Tokens of a segment in which nothing is chosen: what stands in `chosen` for its queries does not matter."""
    pooled: Tensor | None = None
    """Keys that are values too, [rows, 1, blocks, d]: of all whole blocks of each segment, one segment behind the other."""


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    selection: Selection | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [rows, heads, length, d], key and value [rows, groups, length, ..] →
    [rows, length, heads, ..]. `indices`: the chosen keys, int [rows, length, keys]; `block_indices`: the chosen blocks of them,
    int [rows, groups, length, blocks]; without any, all are seen. `selection`: the same from layers that our hooks ask.

    Raises NotImplementedError for what only a mask could say.
    """
    told = selection or _selection(module, attention_mask, indices, block_indices)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if position_bias is not None or not causal or query.shape[2] != key.shape[2]:
        _refuse(f"{type(module).__name__} is not causal, or has a bias by position")
    chunk, window = chunk_of(module), sliding_window or 0
    if told.mask is not None and told.mask.numel():  # an empty one says nothing: indexed_attention.py
        _compare(module, told.mask, window, chunk)
    bounds = CURRENT.bounds(query.shape[2], chunk)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    width = value.shape[-1]
    if told.pooled is not None:
        key, value = (torch.cat([tensor, told.pooled], dim=2) for tensor in (key, value))
    query, key, value = _of_one_width(tempered(module, query), key, value)
    plain = not softcap and s_aux is None and told.chosen is None and told.pooled is None
    if plain and CURRENT.fused and _fits_kernel(query):
        out = _varlen(query, key, value, bounds, scale, window)
    elif plain and query.is_cuda and _without_window(bounds, window):
        out = causal_segments(query, key, value, bounds.starts if len(bounds.starts) > 2 else None, scale)
    else:
        rest = (scale, window, softcap or 0.0, s_aux, told.block, told.chosen, told.whole)
        out, _lse = attend(query, key, value, bounds.starts, *rest)
    return (out if out.shape[-1] == width else out[..., :width]), None


def _selection(module: Any, mask: Tensor | None, indices: Tensor | None, block_indices: Tensor | None) -> Selection:
    """What an indexer of a layer told in transformers' ways."""
    if indices is not None and indices.shape[-1]:
        return Selection(mask, 1, indices.unsqueeze(1), indices.shape[-1])
    if block_indices is not None and block_indices.shape[-1]:
        block = module.indexer.block_size
        return Selection(mask, block, block_indices, block * block_indices.shape[-1])
    return Selection(mask)


def _refuse(what: str) -> None:
    if CURRENT.faults is None:
        raise NotImplementedError(what)
    CURRENT.faults.append(what)


def _compare(module: nn.Module, mask: Tensor, window: int, chunk: int) -> None:
    """Hold the mask that the architecture would make, told by `described_mask`, against what its layer names."""
    told = tuple(mask.flatten().tolist()) if mask.numel() == 2 else _OTHER
    if told != (window, chunk):
        shape = "is not causal" if told == _OTHER else _named(*told)
        _refuse(f"the mask of {type(module).__name__} {shape}, and its layer {_named(window, chunk)}")


def _named(window: int, chunk: int) -> str:
    return f"has a window of {window}" if window else f"has chunks of {chunk}" if chunk else "has no window"


def described_mask(
    *_: Any, q_length: int, kv_length: int, mask_function: Any, device: torch.device | None = None, **__: Any
) -> Tensor:
    """In place of a mask, what it says: int64 [1, 1, 1, 2], window and chunk, 0 for none, or -1 twice for another shape.

    Called by transformers' mask creation as any of its mask functions, where this attention's masks are asked for.
    """
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(1 << 19)  # behind any window in use: 262,144 are the most that are published

    def seen(query: Tensor, keys: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(query.shape, keys.shape)
        return torch.as_tensor(mask_function(zero, zero, query, keys)).broadcast_to(shape)

    blind = (~seen(keys, zero)).nonzero()
    reach = int(blind[0]) if len(blind) else 0
    """Of the first key: the first query that does not see it, 0 if all do."""
    shapes = {
        (reach, 0): lambda query: (keys <= query) & ((keys > query - reach) if reach else True),
        (0, reach): lambda query: (keys <= query) & ((keys // reach == query // reach) if reach else True),
    }
    tried = (0, 1, 7, 100, reach - 1, reach, reach + 1, 2 * reach + 3, len(keys) - 1)
    queries = [query for query in tried if 0 <= query < len(keys)]

    def holds(shape: Any) -> bool:
        return all(torch.equal(seen(torch.tensor(query), keys), shape(query)) for query in queries)

    told = next((named for named, shape in shapes.items() if holds(shape)), _OTHER)
    return torch.tensor(told, dtype=torch.int64, device=device).view(1, 1, 1, 2)


AttentionInterface.register(NAME, segment_attention)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with as many channels a head, as fused kernels want them. Zeros add nothing to scores, nor to other values."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    return (query, key, value) if missing == 0 else (F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value)


def _fits_kernel(query: Tensor) -> bool:
    """Whether a GPU's fused kernel for packed rows takes heads of this dtype and width."""
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int) -> Tensor:
    """The fused kernel of a GPU for rows of segments; one row."""
    assert varlen_attn is not None, "Segments.fused"
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if "enable_gqa" in VARLEN_OPTIONS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = one_a_head(query, key, value)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts, longest = bounds.on_device, bounds.longest
    assert starts is not None, "Segments.fused"
    out = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def _without_window(bounds: Bounds, window: int) -> bool:
    """Whether no query is farther into its segment than it sees, and PyTorch's own attention can be called for each segment:
    the compiler cannot follow lengths.
    """
    return (not window or bounds.longest <= window) and not (CURRENT.packed and torch.compiler.is_compiling())


def causal_segments(query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scale: float) -> Tensor:
    """Causal attention by PyTorch's own choice of kernel, segment by segment → [rows, length, heads, d]. For GPUs without a
    kernel for packed rows, or that it does not fit, and for padded rows. `starts`: as in `Bounds`; None: one segment.
    """
    grouped = query.shape[1] != key.shape[1]
    lengths = [query.shape[2]] if starts is None else starts.diff().tolist()
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    parts = [F.scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=grouped) for own in segments]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


# The operators ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("ft_service::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    block: int,
    chosen: Tensor | None,
    whole: int,
) -> tuple[Tensor, Tensor]:
    """query [rows, heads, length, d], key and value [rows, groups, length, d] → [rows, length, heads, d], in the query's dtype,
    and the log-sums that the backward wants, fp32 [rows, heads, length]. There may be more keys and values than queries: pooled
    ones. The rest is `Shape`, its fields one by one, and `Selection.whole`.
    """
    rows, heads, length, _ = query.shape
    out = query.new_empty(rows, length, heads, query.shape[-1])
    sums = query.new_zeros(rows, heads, length, dtype=torch.float32)
    shape = Shape(scale, window, softcap, sinks, block, chosen)
    for own, seen, shape_of_own in _segments(starts, query, key, shape, whole):
        q, k, v = query[:, :, own], taken(key, seen), taken(value, seen)
        if _by_kernel(q, k, shape_of_own):
            k, v = _for_kernel(k, v, heads)
            part, sums[:, :, own] = _kernel(q, k, v, 0.0, True, scale=scale)
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
    starts: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    block: int,
    chosen: Tensor | None,
    whole: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    heads = query.shape[1]
    shape = Shape(scale, window, softcap, sinks, block, chosen)
    for own, seen, shape_of_own in _segments(starts, query, key, shape, whole):
        q, k, v, g = query[:, :, own], taken(key, seen), taken(value, seen), grad[:, own].transpose(1, 2)
        if _by_kernel(q, k, shape_of_own):
            wide_k, wide_v = _for_kernel(k, v, heads)
            parts = _kernel_grad(g, q, wide_k, wide_v, out[:, own].transpose(1, 2), sums[:, :, own], 0.0, True, scale=scale)
        else:
            parts = scored_grad(g, q, k, v, shape_of_own)
        for all_of, part, places in zip(grads, parts, ((own,), seen, seen), strict=True):
            groups = all_of.shape[1]
            summed = part if part.shape[1] == groups else part.unflatten(1, (groups, -1)).sum(dim=2)
            _put(all_of, places, summed)
    return grads


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, length, width = query.shape
    return query.new_empty(rows, length, heads, width), query.new_empty(rows, heads, length, dtype=torch.float32)


@_attend_grad.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, *rest = inputs
    ctx.save_for_backward(query, key, value, *output, starts, *(r for r in rest if isinstance(r, Tensor)))
    ctx.rest = [None if isinstance(r, Tensor) else (r,) for r in rest]
    """Of what is no tensor, in its place."""
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad is not None, "nothing but the output is used"
    query, key, value, out, sums, starts, *others = ctx.saved_tensors
    tensors = iter(others)
    rest = [next(tensors) if value is None else value[0] for value in ctx.rest]
    grads = _attend_grad(grad, query, key, value, out, sums, starts, *rest)
    return *grads, None, *[None] * len(rest)


attend.register_autograd(_backward, setup_context=_setup_context)


def _segments(starts: Tensor, query: Tensor, key: Tensor, shape: Shape, whole: int) -> Iterator[tuple[slice, Seen, Shape]]:
    """Each segment's queries and keys, and its attention: with the chosen keys of its queries, if there is a choice."""
    length = query.shape[2]
    assert starts[-1] == length, "the segments are those of another micro-batch"
    made = length
    for start, end in pairwise(starts.tolist()):
        own = slice(start, end)
        seen = [own]
        if key.shape[2] > length:
            seen.append(slice(made, made + (end - start) // shape.block))
            made = seen[-1].stop
        chosen = None if shape.chosen is None or end - start <= whole else shape.chosen[:, :, own]
        yield own, seen, replace(shape, chosen=chosen)


def _put(to: Tensor, places: Seen, tensor: Tensor) -> None:
    for part, own in zip(places, tensor.split([part.stop - part.start for part in places], dim=2), strict=True):
        to[:, :, part] = own


# One segment --------------------------------------------------------------------------------------------------------------

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_kernel(query: Tensor, key: Tensor, shape: Shape) -> bool:
    """Whether PyTorch's fused kernel for processors does what is asked for."""
    length = query.shape[2]
    plain = not shape.softcap and shape.sinks is None and shape.chosen is None and key.shape[2] == length
    return plain and query.device.type == "cpu" and (not shape.window or length <= shape.window)


def _for_kernel(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel takes them: one a head where it knows no groups."""
    if key.shape[1] == heads or _kernel_knows_groups():
        return key, value
    return tuple(tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=1)
def _kernel_knows_groups() -> bool:
    """Whether heads may share keys and values, forward and backward; PyTorch's releases differ."""
    query, shared = torch.ones(1, 2, 3, 8).tril(), torch.arange(24.0).view(1, 1, 3, 8) / 24
    try:
        out, sums = _kernel(query, shared, shared, 0.0, True)
        one, _ = _kernel(query[:, :1], shared, shared, 0.0, True)
        grads = _kernel_grad(out, query, shared, shared, out, sums, 0.0, True)
    except RuntimeError:
        return False
    return torch.allclose(out[:, :1], one) and grads[1].shape == shared.shape
