"""How many requests a project sends: a bucket of as many as it may send in a minute, which fills again evenly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST = 10_000
"""Projects that are remembered at once."""


@dataclass(frozen=True)
class Rate:
    """What a project has left."""

    limit: int
    remaining: int
    full_after: float
    """Seconds until it has all of `limit` again."""
    wait: float
    """Seconds until this request may be sent; 0: it may now."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's."""
        values = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.full_after:.3f}s",
        }
        return [(name.encode(), value.encode()) for name, value in values.items()]


class Rates:
    """Buckets of projects, of this process alone. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, project_id: str, per_minute: int) -> Rate:
        """Count a request of a project's, if it may be sent."""
        now, each = self._clock(), 60.0 / per_minute
        left, at = self._left.get(project_id, (float(per_minute), now))
        left = min(per_minute, left + (now - at) / each)
        may = left >= 1.0
        if may:
            left -= 1.0
        if len(self._left) >= _MOST:
            self._left.clear()
        self._left[project_id] = left, now
        return Rate(per_minute, int(left), (per_minute - left) * each, 0.0 if may else (1.0 - left) * each)
