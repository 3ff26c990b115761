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
        raise NotImplementedError(f"attention of {heads} heads cannot be divided by {ranks} ranks")
    copies = math.lcm(groups, ranks) // groups
    if copies > 1:
        key, value = (own.repeat_interleave(copies, dim=1) for own in (key, value))
    of_ranks = [
        own.transpose(1, 2).unflatten(2, (ranks, -1)).movedim(2, 0) for own in (query, key, value)
    ]
    got = exchange(torch.cat(of_ranks, dim=3))
    whole = got.movedim(0, 1).flatten(1, 2)
    query, key, value = (
        own.transpose(1, 2) for own in whole.split([own.shape[3] for own in of_ranks], dim=2)
    )
    return query, key, value


def with_all_heads(out: Tensor, ranks: int) -> Tensor:
    """[rows, ranks · length, heads / ranks, d], this rank's heads → [rows, length, heads, d], its
    part of the tokens.
    """
    return exchange(out.unflatten(1, (ranks, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)


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
def exchange(pieces: Tensor) -> Tensor:
    """[ranks, ..], a piece for each of the ranks that share the current rows → [ranks, ..], the
    pieces that these have for this rank, in their order. Called by these ranks together.
    """
    part = CURRENT.part
    assert part is not None
    assert len(pieces) == part.ranks
    sent = pieces.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=part.group)
    return got


@exchange.register_fake
def _(pieces: Tensor) -> Tensor:
    return pieces.new_empty(pieces.shape)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return exchange(grad)


exchange.register_autograd(_backward)
