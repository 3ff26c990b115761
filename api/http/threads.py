"""Threads for blocking work of requests, shared fairly between projects. Routes use threads only by way of this module.

A project has a limited number of threads at once, so that the others always have the rest. Work that waits for a process on a
tenant's input (reading files, making an adapter) first waits for its turn, without a thread. There are few turns; a project has
one at a time, and projects alternate. So no route can block another project's requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from ft_service.errors import LimitError, UnavailableError

AT_ONCE = 40
"""Threads of all projects together."""
AT_ONCE_OF_PROJECT = 8
TURNS_WAITING = 16
"""Requests of a project that may wait for a turn of each kind."""
TURN_SECONDS = 60.0
"""Limit on the wait for a turn."""

Kind = Literal["reading", "making", "grading"]
"""Work that takes turns: reading data files for a view of them, making the adapter of a checkpoint, trying a grader."""
TURNS: dict[Kind, int] = {"reading": 2, "making": 2, "grading": 12}
"""Turns of each kind at once. Reading and making have a process of about 200 MB each; grading mostly waits for a server, and
its processes are small and die first when memory runs out."""
_BUSY: dict[Kind, str] = {
    "reading": "Files are being read",
    "making": "Adapters of checkpoints are being made",
    "grading": "Graders are being tried",
}

P = ParamSpec("P")
T = TypeVar("T")
_project: ContextVar[str] = ContextVar("project", default="")
_TURN = "__ft_turn__"


class FairTurns:
    """The turns of one kind in one event loop."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._all = asyncio.Semaphore(TURNS[kind])
        self._own: dict[str, asyncio.Semaphore] = {}
        self._requests: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, project_id: str) -> AsyncIterator[None]:
        """Hold a turn of a project while the block runs. Raises LimitError if too many of its requests wait, UnavailableError
        if its turn does not come in time.

        Only one request of a project waits for the common turns, so that its others do not take another project's place.
        """
        if self._requests[project_id] > TURNS_WAITING:
            message = f"{_BUSY[self._kind]} for {TURNS_WAITING} requests of this project. Wait until some have their answers."
            raise LimitError(message, code="too_many_at_once", retry_after=1.0)
        self._requests[project_id] += 1
        own = self._own.setdefault(project_id, asyncio.Semaphore(1))
        held: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    for semaphore in (own, self._all):
                        await semaphore.acquire()
                        held.append(semaphore)
            except TimeoutError:
                raise UnavailableError(f"{_BUSY[self._kind]} for others. Try again in a moment.", retry_after=10) from None
            yield
        finally:
            for semaphore in held:
                semaphore.release()
            self._requests[project_id] -= 1
            if not self._requests[project_id]:
                del self._requests[project_id], self._own[project_id]


class _Threads:
    """The threads of one event loop."""

    def __init__(self) -> None:
        self.all = CapacityLimiter(AT_ONCE)
        self.turns: dict[Kind, FairTurns] = {kind: FairTurns(kind) for kind in TURNS}
        self.own: dict[str, asyncio.Semaphore] = {}
        self.requests: Counter[str] = Counter()


_threads: RunVar[_Threads] = RunVar("threads")


def work_for(project_id: str) -> None:
    """Count the threads of this task as this project's from now on."""
    _project.set(project_id)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a thread of the caller's project, and return its result."""
    threads, project_id = _here(), _project.get()
    threads.requests[project_id] += 1
    own = threads.own.setdefault(project_id, asyncio.Semaphore(AT_ONCE_OF_PROJECT))
    try:
        async with own:
            return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=threads.all)
    finally:
        threads.requests[project_id] -= 1
        if not threads.requests[project_id]:
            del threads.requests[project_id], threads.own[project_id]


@asynccontextmanager
async def turn(kind: Kind) -> AsyncIterator[None]:
    """Hold a turn of the caller's project. Raises as `FairTurns.of`."""
    async with _here().turns[kind].of(_project.get()):
        yield


def takes_turns(kind: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a route's function as one that is called only with a turn (api/http/routing.py)."""

    def mark(endpoint: Callable[P, T]) -> Callable[P, T]:
        setattr(endpoint, _TURN, kind)
        return endpoint

    return mark


def kind_of(endpoint: Callable[..., object]) -> Kind | None:
    """Return the kind of turns that a route's function takes; None: it takes none."""
    return getattr(endpoint, _TURN, None)


def _here() -> _Threads:
    threads = _threads.get(None)
    if threads is None:
        threads = _Threads()
        _threads.set(threads)
    return threads
