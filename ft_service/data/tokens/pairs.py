"""Pairs of answers as samples: those of pair i are samples 2i, the preferred one, and 2i + 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from ft_service.data.chat_line import Sample
from ft_service.data.data_file import Fault, read_pairs

PAIRING = 1
"""Of this module and preference_line.py: another number wherever they make other samples of a line than before."""


def answers_of_file(file: BinaryIO, widths: deque[int] | None = None) -> Iterator[tuple[int, Sample | Fault]]:
    """Both answers of every line by its number, from 1, the preferred one first; or the line's fault.

    `widths`: takes how many they were, line by line.
    """
    for number, pair in read_pairs(file):
        found = (pair,) if isinstance(pair, Fault) else (pair.preferred, pair.rejected)
        if widths is not None:
            widths.append(len(found))
        yield from ((number, sample) for sample in found)
