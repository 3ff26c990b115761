"""Samples that are learned whole, such as documents: long ones are split into windows, and rows are
filled with them. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ft_service.data.tokens.token_set import TokenSet

Rows = list[list[int]]
"""Rows, each with the numbers of its samples in their order."""


def are_whole(samples: TokenSet) -> bool:
    """Return whether all predicted tokens of all samples are learned."""
    return len(samples) > 0 and bool(
        (samples.target_counts == np.maximum(samples.lengths - 1, 0)).all()
    )


def in_windows(samples: TokenSet, length: int) -> TokenSet:
    """Samples that are learned whole, split into windows of at most `length` tokens without copies.

    A window begins with the last token of the previous one, so every token but a sample's first is
    learned exactly once.
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
        records=samples.records.repeat(counts),
    )


def in_rows(lengths: Sequence[int], room: int) -> Rows:
    """Nearly full rows of at most `room` tokens that hold every sample once, by best-fit
    decreasing: the longest sample first, each in the fullest row with room for it. A sample longer
    than `room` has a row of its own.
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
            row = len(rows)
            left = room - lengths[sample]
            rows.append([sample])
        if left > 1:
            if left not in free:
                insort(rooms, left)
            free.setdefault(left, []).append(row)
    return rows
