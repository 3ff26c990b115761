"""Samples that are learned whole, such as documents: windows of long ones in place of a cut, and rows that they fill. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ft_service.data.tokens.token_set import TokenSet

Rows = list[list[int]]
"""Numbers of the samples that stand in a row, one behind the other."""


def are_whole(samples: TokenSet) -> bool:
    """Whether every token that something predicts is learned in all of the samples."""
    return len(samples) > 0 and bool((samples.target_counts == np.maximum(samples.lengths - 1, 0)).all())


def in_windows(samples: TokenSet, length: int) -> TokenSet:
    """Samples that are learned whole in windows of at most `length` tokens, which copy no token.

    A window begins with the last token of the one before it, so that every token but a sample's first is learned once, with
    what is before it in its window in sight.
    """
    lengths = samples.lengths
    counts = np.maximum(1, -(-(lengths - 1) // (length - 1)))
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - first.repeat(counts)
    offsets = number * (length - 1)
    sizes = np.minimum(length, lengths.repeat(counts) - offsets)
    return replace(
        samples,
        begins=samples.begins.repeat(counts) + offsets,
        lengths=sizes,
        target_counts=np.maximum(sizes - 1, 0),
    )


def in_rows(lengths: Sequence[int], room: int) -> Rows:
    """Rows of at most `room` tokens that hold every sample once, nearly full: the longest sample first, each into the fullest
    row that has room for it. A longer sample than that has a row of its own.
    """
    rows: Rows = []
    free: dict[int, list[int]] = {}
    rooms: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(rooms, lengths[sample])
        if at < len(rooms):
            left = rooms[at]
            row = free[left].pop()
            if not free[left]:
                del free[left], rooms[at]
            rows[row].append(sample)
            left -= lengths[sample]
        else:
            row, left = len(rows), room - lengths[sample]
            rows.append([sample])
        if left > 1:
            if left not in free:
                insort(rooms, left)
            free.setdefault(left, []).append(row)
    return rows
