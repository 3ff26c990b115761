"""Exchange of heads for tokens between the ranks that share a row (Ulysses, arXiv 2309.14509).

Everything but attention works token by token, so that each rank has a part of the row's tokens.
Attention works head by head: before it each rank gives away what it has of the other ranks' heads,
and gets all tokens of its own; after it the other way round. The kernels then see whole rows, with
fewer heads, and segments, windows, chunks, sinks and caps mean what they always do.

    joined        queries, keys and values one after the other, for each rank those of its heads:
                  one collective carries all three
    repeated      keys and values that several ranks' heads share stand once for each: of `groups`
                  groups on `ranks` ranks lcm(groups, ranks) / groups times

The operator has a namespace of its own, so that selective checkpointing does not keep what it
brings: attention keeps that already.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.layers.scored_attention import AttentionPattern
from workers.layers.segments import CURRENT, RowPart

_TOKENS = 1
_HEADS = 2
"""Dimensions of [rows, tokens, heads, d]."""


def with_fewer_heads(
    query: Tensor, key: Tensor, value: Tensor, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """query [rows, heads, length, d], key and value [rows, groups, length, d] of this rank's part →
    [rows, heads / ranks, ranks · length, d] and [rows, lcm(groups, ranks) / ranks, ranks · length,
    d]: all tokens of its heads, and the keys and values that these share.

    Raises NotImplementedError for heads that cannot be divided by the ranks.
    """
    heads = query.shape[1]
    groups = key.shape[1]
    if heads % ranks:
        raise NotImplementedError(
            f"attention of {heads} heads cannot be divided by {ranks} ranks"
        )
    copies = math.lcm(groups, ranks) // groups
    if copies > 1:
        key, value = (own.repeat_interleave(copies, dim=1) for own in (key, value))
    of_ranks = [own.transpose(1, 2).unflatten(2, (ranks, -1)) for own in (query, key, value)]
    counts = [own.shape[3] for own in of_ranks]
    moved = exchange(torch.cat(of_ranks, dim=3).flatten(2, 3), _HEADS, _TOKENS, ranks)
    query, key, value = (own.transpose(1, 2) for own in moved.split(counts, dim=2))
    return query, key, value


def with_all_heads(out: Tensor, ranks: int) -> Tensor:
    """[rows, ranks · length, heads / ranks, d], this rank's heads → [rows, length, heads, d], its
    part of the tokens.
    """
    return exchange(out, _TOKENS, _HEADS, ranks)


def of_own_heads(pattern: AttentionPattern, part: RowPart) -> AttentionPattern:
    """The pattern of this rank's heads.

    Raises NotImplementedError where an indexer chooses keys: it was given a part of the row.
    """
    if pattern.chosen is not None:
        raise NotImplementedError("an indexer that chooses keys needs whole rows")
    if pattern.sinks is None:
        return pattern
    return replace(pattern, sinks=pattern.sinks.chunk(part.ranks)[part.rank])


@torch.library.custom_op("ft_ranks::exchange", mutates_args=())
def exchange(tensor: Tensor, cut: int, joined: int, ranks: int) -> Tensor:
    """Cut dimension `cut` of [rows, tokens, heads, d] into one piece for each of the ranks that
    share the current rows, and join the pieces that these have for this rank, in their order, along
    dimension `joined`. Called by these ranks together.
    """
    part = CURRENT.part
    assert part is not None
    assert part.ranks == ranks
    sent = tensor.unflatten(cut, (ranks, -1)).movedim(cut, 0).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=part.group)
    moved = got.movedim(0, joined).flatten(joined, joined + 1)
    # A new tensor, as an operator has to return one.
    return moved.contiguous()


@exchange.register_fake
def _(tensor: Tensor, cut: int, joined: int, ranks: int) -> Tensor:
    shape = list(tensor.shape)
    shape[cut] //= ranks
    shape[joined] *= ranks
    return tensor.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.cut, ctx.joined, ctx.ranks = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange(grad, ctx.joined, ctx.cut, ctx.ranks), None, None, None


exchange.register_autograd(_backward, setup_context=_setup_context)
