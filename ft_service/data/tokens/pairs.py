"""Pairs of answers as samples: those of pair i are samples 2i, the preferred one, and 2i + 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ft_service.data.data_file import for_method
from ft_service.data.line_errors import Fault
from ft_service.data.records import Pair, Record

PAIRING = 1
"""Of this module and preference_line.py: another number wherever they make other samples of a line than before."""


def answers(
    records: Iterable[tuple[int, Record | Fault]], widths: deque[int] | None = None
) -> Iterator[tuple[int, Record | Fault]]:
    """Both answers of every pair by its number, from 1, the preferred one first; or its fault.

    `widths`: takes how many they were, record by record.
    """
    for number, record in for_method(records, pairs=True):
        found = (record.preferred, record.rejected) if isinstance(record, Pair) else (record,)
        if widths is not None:
            widths.append(len(found))
        yield from ((number, answer) for answer in found)
