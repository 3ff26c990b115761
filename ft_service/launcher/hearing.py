"""Which hosts are there: by what their agents wrote last, on the database's clock, and for how long we have looked at that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ft_service.store.fleet.hosts import HostRow

GAP_SECONDS = 5.0
"""Between two looks, after which all counting begins anew: the database, or this process, was away, and agents may have been
heard by nobody."""


class Hearing:
    """For one thread."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease_seconds
        self._clock = clock
        self._noted_at = float("-inf")
        self._since: dict[str, tuple[float, float]] = {}
        """Host → when its agent was last heard (database time), and since when we see that (our clock)."""

    def note(self, rows: Iterable[HostRow]) -> None:
        """Take down what the table says now."""
        now, afresh = self._clock(), self._clock() - self._noted_at > GAP_SECONDS
        before = {} if afresh else self._since
        self._since = {
            row.host: before[row.host] if row.host in before and before[row.host][0] == row.seen_at else (row.seen_at, now)
            for row in rows
        }
        self._noted_at = now

    def is_gone(self, row: HostRow | None) -> bool:
        """Whether a host is silent for longer than its lease, and we have watched it be so for half of that. None: it was
        removed."""
        if row is None:
            return True
        watched = self._clock() - self._since[row.host][1] if row.host in self._since else 0.0
        return row.silent_seconds > self._lease and watched > self._lease / 2

    def is_doubtful(self, row: HostRow) -> bool:
        """Whether nothing should be placed on a host now: it was silent for longer than a few beats take."""
        return row.silent_seconds > self._lease / 2
