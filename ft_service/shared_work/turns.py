"""Turns: which of the waiting work begins next when a place is free. Pure, and for one thread.

    turns = Turns[str](places=2, of_project=1)
    turns.put("a", "first of a"); turns.put("a", "second of a"); turns.put("b", "first of b")
    turns.take()    Turn("a", "first of a")
    turns.take()    Turn("b", "first of b")
    turns.take()    None: there is no third place

The project that has used least is next, counted by the costs of its work (start-time fair queueing,
Goyal et al. 1996). One that was idle begins level with the others: it neither saves up turns nor is
charged for those that it did not need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Turn(Generic[Item]):
    """Work that has a place."""

    project: str
    item: Item
    cost: float = 1.0
    size: int = 1
    """Places that it takes."""


@dataclass
class _Share(Generic[Item]):
    """What a project has of the places."""

    used: float
    """Cost of its work so far, level with that of the others when it last began."""
    running: int = 0
    """Places that it has."""
    waiting: deque[Turn[Item]] = field(default_factory=deque)


class Turns(Generic[Item]):
    """Waiting and running work of projects in a number of places."""

    def __init__(self, places: int, of_project: int | None = None) -> None:
        """`of_project`: places that a project may have at once; None: all."""
        self.places = places
        self.of_project = places if of_project is None else of_project
        self._shares: dict[str, _Share[Item]] = {}
        self._level = 0.0
        """Where projects begin while none has work: what the one had used that was given the last
        turn.
        """
        self._running = 0

    def __len__(self) -> int:
        """Return how much work waits."""
        return sum(len(share.waiting) for share in self._shares.values())

    def __iter__(self) -> Iterator[Turn[Item]]:
        """Yield the waiting work, project by project."""
        for share in self._shares.values():
            yield from share.waiting

    def put(
        self, project: str, item: Item, cost: float = 1.0, size: int = 1, *, first: bool = False
    ) -> None:
        """Have work wait for its turn.

        `size`: places that it takes. `first`: before the other work of its project.
        """
        if size > self.of_project:
            raise ValueError(f"work of {size} places, and a project has {self.of_project}")
        others = [own.used for own in self._shares.values() if own.waiting or own.running]
        share = self._shares.setdefault(project, _Share(0.0))
        if not (share.waiting or share.running):
            # Either may hold costs that were expected too high.
            share.used = max(share.used, min([*others, self._level]))
        (share.waiting.appendleft if first else share.waiting.append)(
            Turn(project, item, cost, size)
        )

    def take(self, may: Callable[[Item], bool] = lambda _: True) -> Turn[Item] | None:
        """Return the work that begins now, which holds a place until `end`; None: none may.

        `may`: whether work may begin; of a project, the first that may.
        """
        if self._running >= self.places:
            return None
        found = [
            (share, turn)
            for share in self._shares.values()
            if (turn := self._next(share, may)) is not None
        ]
        if not found:
            return None
        share, turn = min(found, key=lambda each: each[0].used)
        if self._running + turn.size > self.places:
            return None  # smaller work of others does not pass it
        share.waiting.remove(turn)
        self._level = max(self._level, share.used)
        share.used += turn.cost
        share.running += turn.size
        self._running += turn.size
        return turn

    def end(self, turn: Turn[Item], cost: float | None = None) -> None:
        """Give a place back. `cost`: what the work has cost in the end; None: as was expected."""
        share = self._shares[turn.project]
        share.used += (turn.cost if cost is None else cost) - turn.cost
        share.running -= turn.size
        self._running -= turn.size
        self._forget_idle()

    def drop(self, item: Item) -> bool:
        """Remove waiting work. Returns whether it waited."""
        for share in self._shares.values():
            for turn in share.waiting:
                if turn.item is item:
                    share.waiting.remove(turn)
                    self._forget_idle()
                    return True
        return False

    def waiting(self, project: str) -> int:
        share = self._shares.get(project)
        return len(share.waiting) if share else 0

    def running(self, project: str) -> int:
        share = self._shares.get(project)
        return share.running if share else 0

    def projects(self) -> dict[str, tuple[int, int]]:
        """Return each project's waiting work, and the places that it has."""
        shares = self._shares.items()
        return {
            name: (len(own.waiting), own.running)
            for name, own in shares
            if own.waiting or own.running
        }

    def _next(self, share: _Share[Item], may: Callable[[Item], bool]) -> Turn[Item] | None:
        if share.running >= self.of_project:
            return None
        turn = next((turn for turn in share.waiting if may(turn.item)), None)
        return None if turn is None or share.running + turn.size > self.of_project else turn

    def _forget_idle(self) -> None:
        """Forget projects without work, once the others have used as much: one that pauses stays
        charged until then.
        """
        idle = [name for name, own in self._shares.items() if not (own.waiting or own.running)]
        for name in idle:
            if self._shares[name].used <= self._level or len(idle) == len(self._shares):
                del self._shares[name]
