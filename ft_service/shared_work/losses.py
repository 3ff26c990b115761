"""Losses: work that the host did not let end, which is tried again after growing pauses.

A loss is never the input's fault, so it is not counted against it: not the first, and not the
hundredth. The operator is told after several in a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from ft_service.errors import UnavailableError

log = logging.getLogger(__name__)

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 300.0
TOLD_AFTER = 3
"""Losses in a row after which the operator is told; again each time that they have doubled."""
_MOST = 4096
"""Inputs that are remembered."""


TRIES = 3
"""Tries of work that somebody waits for."""
_Result = TypeVar("_Result")


def pause_seconds(
    losses: int, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS
) -> float:
    """Return the pause after so many losses in a row: `first` after one, then twice as long each
    time up to `longest`.
    """
    return min(longest, first * 2.0 ** min(losses - 1, 30))


@dataclass
class _Lost:
    count: int
    until: float
    why: str


def persist(
    work: str,
    call: Callable[[], _Result],
    *,
    tries: int = TRIES,
    first: float = FIRST_SECONDS,
    stop: Callable[[], bool] = lambda: False,
) -> _Result:
    """Return what `call` returns, called again after a growing pause when it was lost, unless
    `stop` returns True: for work that is wanted now, so that one death of its process costs nobody
    anything. Raises what its last call raises.
    """
    for losses in range(1, tries):
        try:
            return call()
        except UnavailableError as error:
            if not error.is_lost or stop():
                raise
            log.warning("%s was lost, and is tried again: %s", work, error.message)
        time.sleep(pause_seconds(losses, first=first))
    return call()


class Losses:
    """The losses in a row of each input. Thread-safe."""

    def __init__(
        self,
        work: str,
        *,
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work`: what is lost, for the log, such as "the description of a base"."""
        self._work = work
        self._first = first
        self._longest = longest
        self._clock = clock
        self._guard = threading.Lock()
        self._lost: OrderedDict[Hashable, _Lost] = OrderedDict()
        self.total = 0

    def add(self, key: Hashable, why: str) -> float:
        """Note a loss. Returns the seconds until the next try."""
        with self._guard:
            self.total += 1
            count = self._lost[key].count + 1 if key in self._lost else 1
            pause = pause_seconds(count, first=self._first, longest=self._longest)
            self._lost[key] = _Lost(count, self._clock() + pause, why)
            self._lost.move_to_end(key)
            if len(self._lost) > _MOST:
                self._lost.popitem(last=False)
        told = count >= TOLD_AFTER and (count & (count - 1) == 0 or count == TOLD_AFTER)
        say = log.error if told else log.warning
        say(
            "%s was lost %d times in a row, and is tried again in %.0f s: %s",
            self._work,
            count,
            pause,
            why,
        )
        return pause

    def forget(self, key: Hashable) -> None:
        """Note that the work was done, or refused."""
        with self._guard:
            self._lost.pop(key, None)

    def pending(self, key: Hashable) -> tuple[float, str] | None:
        """Return the seconds until the next try and why the last one was lost; None: it may
        begin.
        """
        with self._guard:
            lost = self._lost.get(key)
        left = 0.0 if lost is None else lost.until - self._clock()
        return (left, lost.why) if lost is not None and left > 0 else None

    def count(self, key: Hashable) -> int:
        """Return how often it was lost in a row."""
        with self._guard:
            return self._lost[key].count if key in self._lost else 0
