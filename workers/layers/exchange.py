"""Exchange of heads for tokens between the ranks that share a row (Ulysses, arXiv 2309.14509).

Most of a decoder works token by token, so that each rank has a part of the row's tokens. Attention
and recurrences work head by head: before them each rank gives away what it has of the other ranks'
heads, and gets all tokens of its own; after them the other way round. The kernels then see whole
rows, with fewer heads, and segments, windows, chunks, sinks and caps mean what they always do. A
convolution needs a few tokens more than the part, which the ranks before it have.

    joined        what is exchanged stands one after the other, for each rank that of its heads: one
                  collective carries all of one dtype
    shares        heads of zeros where heads do not come out even, and keys and values once for each
                  rank, or part of a rank's heads, that shares them (ft_service/head_shares.py)

The operator has a namespace of its own, so that selective checkpointing does not keep what it
brings: attention keeps that already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ft_service.head_shares import HeadShares, head_shares
from workers.layers.scored_attention import AttentionPattern
from workers.layers.segments import CURRENT, RowPart


def with_fewer_heads(
    query: Tensor, key: Tensor, value: Tensor, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """query [rows, heads, length, d], key and value [rows, groups, length, ..] of this rank's part
    → [rows, own heads, ranks · length, d] and [rows, own groups, ranks · length, ..]: all tokens of
    its heads, and the keys and values that these share.
    """
    shares = head_shares(query.shape[1], key.shape[1], ranks)
    query, key, value = (own.transpose(1, 2) for own in (query, key, value))
    whole = of_all_tokens(
        [
            padded_heads(query, key.shape[2], shares),
            repeated_groups(key, shares),
            repeated_groups(value, shares),
        ],
        ranks,
    )
    query, key, value = (own.transpose(1, 2) for own in whole)
    return query, key, value


def with_all_heads(out: Tensor, heads: int, groups: int, ranks: int) -> Tensor:
    """[rows, ranks · length, own heads, d] → [rows, length, heads, d], this rank's part of the
    tokens. `heads`, `groups`: of the layer.
    """
    shares = head_shares(heads, groups, ranks)
    given = exchange(out.unflatten(1, (ranks, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)
    given = given[:, :, : groups * shares.in_group]
    if groups * shares.in_group > heads:
        given = given.unflatten(2, (groups, -1))[:, :, :, : heads // groups].flatten(2, 3)
    return given.contiguous()  # layers look at it as [rows, length, heads · d]


def padded_heads(values: Tensor, groups: int, shares: HeadShares) -> Tensor:
    """[rows, length, heads, ..] → [rows, length, all heads of the shares, ..]: with zeros behind
    each group's heads, and behind the last.
    """
    if groups * shares.in_group > values.shape[2]:
        by_group = values.unflatten(2, (groups, -1))
        values = _padded(by_group, 3, shares.in_group).flatten(2, 3)
    return _padded(values, 2, shares.all_heads)


def repeated_groups(values: Tensor, shares: HeadShares) -> Tensor:
    """[rows, length, groups, ..] → [rows, length, all groups of the shares, ..]."""
    if shares.copies > 1:
        values = values.repeat_interleave(shares.copies, dim=2)
    return _padded(values, 2, shares.all_groups)


def of_all_tokens(parts: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Tensors [rows, length, ranks · n, ..] of this rank's tokens, each with its own n → [rows,
    ranks · length, n, ..], all tokens of this rank's n.
    """
    found: list[Tensor] = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        alike = [number for number, part in enumerate(parts) if part.dtype == dtype]
        of_ranks = [
            parts[number].unflatten(2, (ranks, -1)).movedim(2, 0).flatten(3) for number in alike
        ]
        got = exchange(torch.cat(of_ranks, dim=3)).movedim(0, 1).flatten(1, 2)
        whole = got.split([own.shape[3] for own in of_ranks], dim=2)
        for number, own in zip(alike, whole, strict=True):
            given = parts[number]
            found[number] = own.unflatten(2, (given.shape[2] // ranks, *given.shape[3:]))
    return found


def with_tokens_before(part: Tensor, tokens: int) -> Tensor:
    """[rows, length, channels] of this rank's tokens → [rows, tokens + length, channels]: behind
    the last `tokens` tokens of the ranks before it, and zeros where there are not so many.
    """
    own = CURRENT.part
    assert own is not None
    last = part[:, max(0, part.shape[1] - tokens) :]
    tails = exchange(last.unsqueeze(0).expand(own.ranks, *last.shape))
    # Every rank uses what came from all, or its backward would not take part in the exchange.
    before = torch.arange(own.ranks, device=part.device) < own.rank
    tails = torch.where(before.view(-1, 1, 1, 1), tails, 0)
    in_order = tails.roll(-own.rank, 0).movedim(0, 1).flatten(1, 2)
    return torch.cat([_padded_before(in_order, tokens)[:, -tokens:], part], dim=1)


def _padded(values: Tensor, dim: int, size: int) -> Tensor:
    """With zeros behind, as many in a dimension as `size`."""
    missing = size - values.shape[dim]
    return values if not missing else F.pad(values, (0, 0) * (values.ndim - dim - 1) + (0, missing))


def _padded_before(values: Tensor, tokens: int) -> Tensor:
    """[rows, length, channels] with zeros before, of at least so many tokens."""
    missing = max(0, tokens - values.shape[1])
    return F.pad(values, (0, 0, missing, 0))


def of_own_heads(pattern: AttentionPattern, groups: int, part: RowPart) -> AttentionPattern:
    """The pattern of this rank's heads. `groups`: of the layer's keys and values.

    Raises NotImplementedError where an indexer chooses keys: it was given a part of the row.
    """
    if pattern.chosen is not None:
        raise NotImplementedError("an indexer that chooses keys needs whole rows")
    if pattern.sinks is None:
        return pattern
    sinks = pattern.sinks[None, None]
    shares = head_shares(sinks.shape[2], groups, part.ranks)
    own = padded_heads(sinks, groups, shares).chunk(part.ranks, dim=2)[part.rank]
    return replace(pattern, sinks=own[0, 0])


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
