"""Time since an attempt has written events, and since its place has answered; both on the service's
own clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ft_service.errors import UnavailableError
from ft_service.jobs.states import Running
from ft_service.rundir.attempt import Attempt

log = logging.getLogger(__name__)

REMIND_SECONDS = 60.0
"""Seconds from the first log line of an outage to the second; doubled for each further one, up to
MAX_REMIND_SECONDS.
"""
MAX_REMIND_SECONDS = 3600.0


class EventAge:
    """Number of event segments of each attempt, and when it last grew. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._segments: dict[tuple[Path, int], tuple[int, float]] = {}

    def running(self, attempt: Attempt) -> Running:
        """Return the observation of an attempt whose processes are alive.

        Raises UnavailableError if its files cannot be looked at.
        """
        known, since = self._segments.get(_key(attempt), (0, self._clock()))
        try:
            count = _segments(attempt, known)
        except UnavailableError:  # what the storage keeps back is no silence of the ranks
            self._segments[_key(attempt)] = (known, self._clock())
            raise
        if count != known:
            since = self._clock()
        self._segments[_key(attempt)] = (count, since)
        return Running(reported=count > 0, silent_seconds=self._clock() - since)

    def forget(self, attempt: Attempt) -> None:
        self._segments.pop(_key(attempt), None)


def _segments(attempt: Attempt, known: int) -> int:
    """Return the number of an attempt's segments, of which `known` are known.

    Each look may be a request to object storage, and a restarted service knows none of thousands:
    the distance is doubled, then halved.
    """
    if not attempt.has_segment(known):
        return known
    last = known
    distance = 1
    while attempt.has_segment(last + distance):
        last = last + distance
        distance = 2 * distance
    missing = last + distance
    while missing - last > 1:
        middle = (last + missing) // 2
        last, missing = (middle, missing) if attempt.has_segment(middle) else (last, middle)
    return missing


def _key(attempt: Attempt) -> tuple[Path, int]:
    return attempt.run.root, attempt.number


class Outage:
    """Time for which something that one thread polls has not answered, with a few log lines.

    Any thread may read `seconds`.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what`: sentence for the log that says what fails, such as "Slurm does not answer"."""
        self._what = what
        self._clock = clock
        self._since: float | None = None
        self._next_line = 0.0
        self._pause = REMIND_SECONDS

    @property
    def seconds(self) -> float:
        """Length of the present outage; 0: there is none."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def failed(self, error: Exception) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
            self._pause = REMIND_SECONDS
            log.warning("%s: %s", self._what, error)
        elif now >= self._next_line:
            self._pause = min(2 * self._pause, MAX_REMIND_SECONDS)
            log.warning("%s, for %.0f seconds now: %s", self._what, self.seconds, error)
        else:
            return
        self._next_line = now + self._pause

    def over(self) -> bool:
        """Record an answer. Returns whether it ended an outage."""
        if self._since is None:
            return False
        log.warning("%s: no longer, after %.0f seconds", self._what, self.seconds)
        self._since = None
        return True
