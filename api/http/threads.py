"""Threads for what a request waits for, shared between projects: the one way from a route into a thread.

A project's requests have so many threads at once, whatever they wait for, and the others have the rest. What waits for a
process that works on what a tenant gave (it reads files, it makes an adapter) first waits for its turn, without a thread; of
such turns there are few, a project has one at a time, and projects take turns. So no route can hold up another project's.
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
"""Threads of all projects' requests."""
AT_ONCE_OF_PROJECT = 8
TURNS = 2
"""At once, of each kind: what takes one has a process of some 200 MB."""
TURNS_WAITING = 16
"""Requests of a project that may wait for their turn, of each kind."""
TURN_SECONDS = 60.0
"""How long one waits for it."""

Kind = Literal["reading", "making"]
"""What takes turns: reading data files for somebody to see, making the adapter of a checkpoint."""
_SAID: dict[Kind, str] = {"reading": "Files are being read", "making": "Adapters of checkpoints are being made"}

P = ParamSpec("P")
T = TypeVar("T")
_project: ContextVar[str] = ContextVar("project", default="")
_TURN = "__ft_turn__"


class Turns:
    """Of one kind, in one event loop."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._all = asyncio.Semaphore(TURNS)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._asking: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, project_id: str) -> AsyncIterator[None]:
        """A turn of a project, as long as the block runs. Raises LimitError if too many of its requests wait, UnavailableError
        if its turn does not come.

        Only one request of a project waits for the turns of all, so that its others take nobody's place there.
        """
        if self._asking[project_id] > TURNS_WAITING:
            message = f"{_SAID[self._kind]} for {TURNS_WAITING} requests of this project. Wait until some have their answers."
            raise LimitError(message, code="too_many_at_once", retry_after=1.0)
        self._asking[project_id] += 1
        own = self._own.setdefault(project_id, asyncio.Semaphore(1))
        held: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    for semaphore in (own, self._all):
                        await semaphore.acquire()
                        held.append(semaphore)
            except TimeoutError:
                raise UnavailableError(f"{_SAID[self._kind]} for others. Try again in a moment.", retry_after=10) from None
            yield
        finally:
            for semaphore in held:
                semaphore.release()
            self._asking[project_id] -= 1
            if not self._asking[project_id]:
                del self._asking[project_id], self._own[project_id]


class _Threads:
    """Of one event loop."""

    def __init__(self) -> None:
        self.all = CapacityLimiter(AT_ONCE)
        self.turns: dict[Kind, Turns] = {"reading": Turns("reading"), "making": Turns("making")}
        self.own: dict[str, asyncio.Semaphore] = {}
        self.asking: Counter[str] = Counter()


_threads: RunVar[_Threads] = RunVar("threads")


def work_for(project_id: str) -> None:
    """From now on what this task does in threads is this project's."""
    _project.set(project_id)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, called in a thread that is the project's whose key was sent."""
    threads, project_id = _here(), _project.get()
    threads.asking[project_id] += 1
    own = threads.own.setdefault(project_id, asyncio.Semaphore(AT_ONCE_OF_PROJECT))
    try:
        async with own:
            return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=threads.all)
    finally:
        threads.asking[project_id] -= 1
        if not threads.asking[project_id]:
            del threads.asking[project_id], threads.own[project_id]


@asynccontextmanager
async def turn(kind: Kind) -> AsyncIterator[None]:
    """A turn of the project whose key was sent. Raises as `Turns.of`."""
    async with _here().turns[kind].of(_project.get()):
        yield


def takes_turns(kind: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a route's function: it waits for a process, and is called once it has its turn (api/http/routing.py)."""

    def mark(endpoint: Callable[P, T]) -> Callable[P, T]:
        setattr(endpoint, _TURN, kind)
        return endpoint

    return mark


def kind_of(endpoint: Callable[..., object]) -> Kind | None:
    """The turns that a route's function takes; None: it takes none."""
    return getattr(endpoint, _TURN, None)


def _here() -> _Threads:
    threads = _threads.get(None)
    if threads is None:
        threads = _Threads()
        _threads.set(threads)
    return threads
