"""Suspects: work that was under way when the process that all share ended by a fault of its own, not the host's.

Whoever asks again asks with the same work, so that it is known by what it is. Under way at two ends, it is refused: it would
end the process of all for ever. An end is counted against all that was under way, since nothing tells whose the fault was; so
it is forgotten once the same work is done, or after a while.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

MOST_ENDS = 2
"""Ends of a process at which work is refused that was under way at all of them."""
KEPT_SECONDS = 3600.0
_MOST = 4096
"""Work that is remembered."""


class Suspects:
    """How many ends each work was under way at. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._guard = clock, threading.Lock()
        self._ends: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, works: Iterable[Hashable]) -> None:
        """Count an end of the process against what was under way."""
        with self._guard:
            for work in set(works):
                self._ends[work] = self._count(work) + 1, self._clock()
                self._ends.move_to_end(work)
            while len(self._ends) > _MOST:
                self._ends.popitem(last=False)

    def forget(self, work: Hashable) -> None:
        """Note that the work was done."""
        with self._guard:
            self._ends.pop(work, None)

    def is_refused(self, work: Hashable) -> bool:
        """Whether the work must not begin any more."""
        with self._guard:
            return self._count(work) >= MOST_ENDS

    def _count(self, work: Hashable) -> int:
        ends, at = self._ends.get(work, (0, 0.0))
        return ends if self._clock() - at < KEPT_SECONDS else 0
