"""Since when something that is asked again and again has not answered, and when that is worth a line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

REMIND_SECONDS = 60.0
"""From the first line of an outage to the second; doubled for each further one, up to MAX_REMIND_SECONDS."""
MAX_REMIND_SECONDS = 3600.0


class Outage:
    """Of one thing, which one thread asks. Any thread may read how long it has lasted."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what`: cannot be done during it, for the log."""
        self._what = what
        self._clock = clock
        self._since: float | None = None
        self._told_at = 0.0
        self._rest = REMIND_SECONDS

    @property
    def seconds(self) -> float:
        """0: there is none."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def failed(self, error: Exception) -> None:
        """It was asked, and did not answer."""
        now = self._clock()
        if self._since is None:
            self._since, self._told_at, self._rest = now, now, REMIND_SECONDS
            log.warning("%s: %s", self._what, error)
        elif now >= self._told_at + self._rest:
            self._told_at, self._rest = now, min(2 * self._rest, MAX_REMIND_SECONDS)
            log.warning("%s, for %.0f seconds now: %s", self._what, self.seconds, error)

    def over(self) -> bool:
        """Note that it has answered. Returns whether that ended an outage."""
        if self._since is None:
            return False
        log.warning("%s: no longer, after %.0f seconds", self._what, self.seconds)
        self._since = None
        return True
