"""Turns of whole bases in the preview's process, which holds one: which is next, and when. Pure.

A base that requests wait for is wanted by their projects. These take turns, each of which is as
long as the others'.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from ft_service.shared_work.turns import Turn, Turns

Base = TypeVar("Base", bound=Hashable)

TURN_SECONDS = 10.0
"""Time for which a base goes on to answer once another is waited for, and at least once it is
loaded.
"""


def is_over(now: float, *, waited_since: float, ready_at: float, load_seconds: float) -> bool:
    """Whether the turn of a base is over, whatever it is answering.

    Times are seconds of one clock: since when another is waited for, and when this one was loaded,
    which took `load_seconds`: no base is held for less than that.
    """
    return now >= max(waited_since + TURN_SECONDS, ready_at + max(TURN_SECONDS, load_seconds))


class BaseTurns(Generic[Base]):
    """Which base is next."""

    def __init__(self) -> None:
        self._turns = Turns[tuple[str, Base]](1)
        self._held: Turn[tuple[str, Base]] | None = None

    def take(self, wanted: Sequence[tuple[str, Base]]) -> Base:
        """Return the base whose turn it is.  `wanted`: projects with the bases that they wait
        for, the longest wait first; at least one.
        """
        if self._held is not None:
            self._turns.end(self._held)
        queued = [turn.item for turn in self._turns]
        for item in queued:
            if item not in wanted:
                self._turns.drop(item)
        for item in wanted:
            if item not in queued:
                self._turns.put(item[0], item)
        self._held = self._turns.take()
        assert self._held is not None, "one is wanted, and none is held"
        return self._held.item[1]
