"""Suspects: work that was under way when the process that all share ended by a fault of its own,
not the host's.

Nothing tells whose the fault was, so that all of it is suspected. Whoever asks again asks with the
same work, which is known by what it is; the process then says when it is at it alone. At a second
end like that the fault is its own, and it is refused: it would end the process of all for ever.
What was under way beside it counts little, and nothing once it is done.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

MOST_ENDS = 2
"""Ends at which work is refused: the first, at which it was under way, and one while the process
was at it alone.
"""
BESIDE = 0.25
"""What an end counts against a suspect that the process was not at: a fault may show late."""
KEPT_SECONDS = 3600.0
_MOST = 4096
"""Work that is remembered."""


class Suspects:
    """How many ends count against each work. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._guard = clock, threading.Lock()
        self._ends: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, works: Iterable[Hashable], ends: float = 1.0) -> None:
        """Count an end of the process, or a part of one, against work."""
        with self._guard:
            for work in set(works):
                self._ends[work] = self._count(work) + ends, self._clock()
                self._ends.move_to_end(work)
            while len(self._ends) > _MOST:
                self._ends.popitem(last=False)

    def forget(self, work: Hashable) -> None:
        """Note that the work was done."""
        with self._guard:
            self._ends.pop(work, None)

    def __contains__(self, work: Hashable) -> bool:
        """Whether the process must say when it is at this work."""
        with self._guard:
            return self._count(work) > 0

    def is_refused(self, work: Hashable) -> bool:
        """Whether the work must not begin any more."""
        with self._guard:
            return self._count(work) >= MOST_ENDS

    def _count(self, work: Hashable) -> float:
        ends, at = self._ends.get(work, (0.0, 0.0))
        return ends if self._clock() - at < KEPT_SECONDS else 0.0
