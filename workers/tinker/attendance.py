"""Whether the service still looks after a job whose ranks wait for commands, by the signs that it
leaves (`presence.json`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.presence import LEAVE_AFTER_SECONDS, SIGNS

LOOK_SECONDS = 0.005
MOST_LOOK_SECONDS = 0.25
"""Shortest and longest pause between two looks for a command."""


class Attendance:
    """The last sign of the service, on this rank's clock: clocks of two hosts are never compared.

    For rank 0.
    """

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt = attempt
        self._clock = clock
        self._sign: str | None = None
        self._read_at = float("-inf")
        self._seen_at = self._waits_since = clock()
        self.limit = LEAVE_AFTER_SECONDS
        """Seconds without a sign after which nobody is taken to be there, as the service has
        said.
        """

    def wait(self) -> None:
        """Begin to wait: what was waited for before has come, which is a sign, too."""
        self._seen_at = self._waits_since = self._clock()

    @property
    def waited(self) -> float:
        """Seconds since `wait`."""
        return self._clock() - self._waits_since

    @property
    def is_over(self) -> bool:
        """Whether there was no sign for too long. Reads the document a few times within the limit,
        however often it is asked."""
        now = self._clock()
        if now - self._read_at >= self.limit / SIGNS:
            self._read_at = now
            with suppress(OSError, UnreadableDocumentError):
                presence = self._attempt.read_presence()
                if presence is not None:
                    self.limit = presence.leave_after_seconds
                    if presence.sign != self._sign:
                        self._sign = presence.sign
                        self._seen_at = now
        return now - self._seen_at > self.limit


def pause_after(waited: float) -> float:
    """Seconds until the next look for a command, after so many seconds of waiting: it comes at most
    a hundredth of them late, and a job that waits for long costs next to nothing.
    """
    return min(max(LOOK_SECONDS, waited / 100), MOST_LOOK_SECONDS)
