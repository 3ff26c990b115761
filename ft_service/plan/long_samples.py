"""Bytes and time of samples so long that what a layer makes of one has no room: feed-forwards by
tiles of rows, and layers' inputs in the host's memory (distributed.activation_checkpointing "tiled"
and "offload").

With T tokens, n rows of a tile, and per token h bytes of hidden states, L what a layer keeps for
its backward, I what the feed-forward does of that, q and kv bytes of queries and of keys:

    the feed-forward   T (L - I + 2 h) + n (I + what its backward needs): the gradient comes in, and
                       that of the input is put together tile by tile
    attention          T (L - I - h - a norm + h + 2 (q + kv)) and its kernel's workspace: what was
                       kept of the feed-forward is gone; the gradients of its output, of queries,
                       keys and values are there, and that of what goes past it
    its products       T (h + a norm + q + 2 kv + 2 h) and what a product needs besides

Workspace no longer grows with a feed-forward's width times T, which is why the others count.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_service.kernel_limits import tile_rows
from ft_service.plan.machines import LINK_EFFICIENCY, Machine

FORWARD_SHARE = 1 / 4
"""Share of a step's arithmetic that its forward is, at least: a fourth of that of attention, a
third of that of products.
"""
DEVICE_INPUTS = 2
"""Inputs of layers that the device holds at once: of the layer that computes, and of the one
before, which is fetched meanwhile.
"""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token in a layer that is computed again."""

    kept: int
    """For its backward, without tiles."""
    inner: int
    """Of these, by feed-forward and experts."""
    hidden: int
    """Of hidden states, in compute."""
    norm: int
    """Kept by one norm."""
    q: int
    kv: int
    inner_needed: int
    """That a feed-forward's backward needs beside what it keeps."""
    inner_product: int
    """That a product in it needs beside its result."""
    outer_product: int
    """The same outside of it."""


def backward_by_tiles(layer: LayerBytes, tokens: int, of_attention: int, dequantised: int) -> int:
    """Most bytes of a layer's backward, besides its input.

    `of_attention`: workspace of its kernel; `dequantised`: the largest weight.
    """
    rows = tile_rows(tokens)
    outside = layer.kept - layer.inner
    in_tile = layer.inner + max(layer.inner_needed, layer.inner_product) + 2 * layer.hidden
    feed_forward = tokens * (outside + 2 * layer.hidden) + rows * in_tile + dequantised
    attention = tokens * (outside - layer.norm + 2 * (layer.q + layer.kv)) + of_attention
    of_products = 3 * layer.hidden + layer.norm + layer.q + 2 * layer.kv + layer.outer_product
    return max(feed_forward, attention, tokens * of_products + dequantised)


def copy_seconds(machine: Machine, one_way: int) -> float:
    """Seconds in which a rank copies so many bytes to the host's memory, and as many in which it
    copies them back.
    """
    return one_way / (machine.host_bandwidth * LINK_EFFICIENCY)


def beside_copies(compute: float, copies: float) -> float:
    """Seconds of arithmetic with copies beside it: out in the forward, back in the backward, and a
    phase takes as long as the slower of the two.
    """
    forward = FORWARD_SHARE * compute
    return max(forward, copies) + max(compute - forward, copies)
