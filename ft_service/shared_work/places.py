"""Places: turns for threads and for the event loop alike, with limits on what may wait, and counts
of how work ended.

    READING = Kind(name="reading", places=2, of_project=1, waiting=16, seconds=60, busy="Files are
    being read") places = Places(READING)
    with places.hold(project_id): ...              in a thread
    async with places.held(project_id): ...        in an event loop

Work whose error `is_lost` may be tried later: the host could not do it. Any other error is the
doing of its input.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from ft_service.errors import LimitError, UnavailableError
from ft_service.shared_work.turns import Turn, Turns


class Outcome(StrEnum):
    """How work ended."""

    DONE = "done"
    REFUSED = "refused"
    """Its input is at fault: it used its limits up, or cannot be worked on."""
    LOST = "lost"
    """The host is at fault: it was killed, could not be started, or had no time.

    Later it may be done.
    """


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of work, and the limits that all projects share."""

    name: str
    places: int
    of_project: int
    """Places that a project may have at once; the others always have the rest."""
    waiting: int | None = None
    """Work of a project that may wait; None: its limit is elsewhere."""
    seconds: float | None = None
    """Limit on the wait for a place; None: there is none."""
    by_project: bool = True
    """False: other names take turns in place of projects, such as keys that are not looked up
    yet.
    """
    busy: str = "The service is busy"
    """A clause for those that cannot wait any longer."""


@dataclass
class HeldPlace:
    """A place, for the work that holds it."""

    cost: float | None = None
    """What the work has cost in the end; None: as was expected."""


_all: weakref.WeakSet[Places] = weakref.WeakSet()


class Places:
    """The places of one kind of work. Thread-safe."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._guard = threading.Lock()
        self._turns = Turns[Future[None]](kind.places, kind.of_project)
        self._held: dict[Future[None], Turn[Future[None]]] = {}
        self.ended: Counter[Outcome] = Counter()
        self.cpu_seconds: dict[str, float] = {}
        """Project → CPU seconds, as far as they were `charge`d."""
        _all.add(self)

    @contextmanager
    def hold(self, project: str, cost: float = 1.0, size: int = 1) -> Iterator[HeldPlace]:
        """Hold a place, or `size` of them, while the block runs; wait for it in this thread.

        Raises LimitError if too much work of the project waits, UnavailableError if its turn does
        not come in time.
        """
        place = self._ask(project, cost, size)
        held = HeldPlace()
        try:
            try:
                place.result(self.kind.seconds)
            except TimeoutError:
                raise self._too_late() from None
            with self._counted():
                yield held
        finally:
            self._leave(place, held.cost)

    @asynccontextmanager
    async def held(
        self, project: str, cost: float = 1.0, size: int = 1
    ) -> AsyncIterator[HeldPlace]:
        """`hold`, for a task of an event loop."""
        import asyncio  # helpers and ranks need none

        place = self._ask(project, cost, size)
        held = HeldPlace()
        try:
            if not place.done():
                try:
                    async with asyncio.timeout(self.kind.seconds):
                        await asyncio.wrap_future(place)
                except TimeoutError:
                    raise self._too_late() from None
            with self._counted():
                yield held
        finally:
            self._leave(place, held.cost)

    def charge(self, project: str, cpu_seconds: float) -> None:
        """Add to the CPU seconds of a project's work."""
        project = project if self.kind.by_project else ""
        with self._guard:
            self.cpu_seconds[project] = self.cpu_seconds.get(project, 0.0) + cpu_seconds

    def projects(self) -> dict[str, tuple[int, int]]:
        """Return each project's waiting work, and the places that it has; those of all as "" where
        other names take turns.
        """
        with self._guard:
            found = self._turns.projects()
        if self.kind.by_project:
            return found
        return {
            "": (sum(waits for waits, _ in found.values()), sum(runs for _, runs in found.values()))
        }

    def is_wanted(self) -> bool:
        """Return whether work waits for a place."""
        with self._guard:
            return len(self._turns) > 0

    def _ask(self, project: str, cost: float, size: int) -> Future[None]:
        most = self.kind.waiting
        with self._guard:
            if most is not None and self._turns.waiting(project) >= most:
                message = (
                    f"{self.kind.busy} for {most} requests of this project. Wait until some "
                    "have their answers."
                )
                raise LimitError(message, code="too_many_at_once", retry_after=1.0)
            place = Future[None]()
            self._turns.put(project, place, cost, size)
            self._begin()
        return place

    def _begin(self) -> None:
        """Give free places to those whose turn it is."""
        while (turn := self._turns.take()) is not None:
            if turn.item.set_running_or_notify_cancel():
                self._held[turn.item] = turn
                turn.item.set_result(None)
            else:  # its caller went away a moment ago
                self._turns.end(turn, cost=0.0)

    def _leave(self, place: Future[None], cost: float | None) -> None:
        with self._guard:
            if (turn := self._held.pop(place, None)) is not None:
                self._turns.end(turn, cost)
                self._begin()
            else:
                self._turns.drop(place)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count how the block ends."""
        outcome = Outcome.REFUSED
        try:
            yield
            outcome = Outcome.DONE
        except UnavailableError as error:
            outcome = Outcome.LOST if error.is_lost else Outcome.REFUSED
            raise
        finally:
            with self._guard:
                self.ended[outcome] += 1

    def _too_late(self) -> UnavailableError:
        return UnavailableError(
            f"{self.kind.busy} for others. Try again in a moment.", retry_after=10
        )


def every_kind() -> list[Places]:
    """Return all places of this process, for its metrics."""
    return sorted(_all, key=lambda places: places.kind.name)
