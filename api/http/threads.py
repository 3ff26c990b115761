"""Threads for blocking work of requests, given to projects in turn.

Routes use threads only by way of this module.

A project has a limited number of threads at once, so that the others always have the rest. Work
that waits for a process on a tenant's input (reading files, making an adapter), or keeps the
interpreter busy (parsing a large body), first waits for its turn, without a thread. There are few
places of each kind; a project has one at a time. So no route can block another project's requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Generic, Literal, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from ft_service.shared_work.places import Kind, Places

AT_ONCE = 40
"""Threads of all projects together."""
AT_ONCE_OF_PROJECT = 8
KEYS_AT_ONCE = 8
"""Threads that look keys up, so that requests of a project that fills its threads are refused or
accepted all the same.
"""
WAITING = 16
"""Requests of a project that may wait for a place of each kind."""
TURN_SECONDS = 60.0
"""Limit on the wait for a place."""

KindName = Literal["reading", "making", "grading", "parsing"]
"""Work that takes turns: reading data files for a view of them, making the adapter of a checkpoint,
trying a grader, parsing a large body. Reading and making have a process of about 200 MB each;
grading mostly waits for a server, and its processes are small and die first when memory runs out;
parsing keeps the interpreter busy.
"""

P = ParamSpec("P")
T = TypeVar("T")
_project: ContextVar[str] = ContextVar("project", default="nobody")
_TURN = "__ft_turn__"


def _kind(name: KindName, places: int, busy: str, waiting: int | None = WAITING) -> Kind:
    return Kind(
        name=name, places=places, of_project=1, waiting=waiting, seconds=TURN_SECONDS, busy=busy
    )


THREADS = Places(Kind(name="threads", places=AT_ONCE, of_project=AT_ONCE_OF_PROJECT))
KEYS = Places(Kind(name="keys", places=KEYS_AT_ONCE, of_project=2, by_project=False))
TURNS: dict[KindName, Places] = {
    "reading": Places(_kind("reading", 2, "Files are being read")),
    "making": Places(_kind("making", 2, "Adapters of checkpoints are being made")),
    "grading": Places(_kind("grading", 12, "Graders are being tried")),
    "parsing": Places(
        _kind("parsing", 2, "Large bodies are being parsed", waiting=None)
    ),  # FT_MAX_CONNECTIONS limits it
}
_limiter: RunVar[CapacityLimiter] = RunVar("limiter")
"""The threads of an event loop, as many as there are places: what has one finds its thread."""


def work_for(project_id: str) -> None:
    """Count the threads of this task as this project's from now on."""
    _project.set(project_id)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a thread of the caller's project, and return its result."""
    return await in_thread_of(_project.get(), partial(work, *args, **kwargs))


async def in_thread_of(payer: str, work: Callable[[], T], places: Places = THREADS) -> T:
    """Call `work` in a thread, in the turn of `payer`: a project, or "" for what the service does
    for many.
    """
    async with places.held(payer) as place:

        def charged() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                place.cost = time.thread_time() - began
                places.charge(payer, place.cost)

        return await to_thread.run_sync(charged, limiter=_threads_here())


async def with_key(secret: str, look: Callable[[str], T]) -> T:
    """Call `look` with a secret in a thread.

    Whose request it is is not known yet: the requests of a secret take their turns, and secrets
    alternate.
    """
    payer = hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
    return await in_thread_of(payer, partial(look, secret), KEYS)


@asynccontextmanager
async def turn(kind: KindName) -> AsyncIterator[None]:
    """Hold a place of the caller's project. Raises as `Places.held`."""
    async with TURNS[kind].held(_project.get()):
        yield


async def parsed_in_turn(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`in_thread`, for work that keeps the interpreter busy, such as parsing a large body."""
    async with turn("parsing"):
        return await in_thread(work, *args, **kwargs)


class SharedWork(Generic[T]):
    """Work that several requests want at the same moment and that is done once for all of them, in
    the turn of the first. For one event loop.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[T]] = {}

    async def result(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, or raise what it raises; if it is under way for this key,
        that one's. It goes on if the request that has begun it is given up.
        """
        if (future := self._under_way.get(key)) is None:
            future = self._under_way[key] = asyncio.ensure_future(work())
            future.add_done_callback(partial(self._forget, key))
        return await asyncio.shield(future)

    def _forget(self, key: Hashable, future: asyncio.Future[T]) -> None:
        del self._under_way[key]
        if not future.cancelled():
            future.exception()  # asked for, since all who waited may be gone


def takes_turns(kind: KindName) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a route's function as one that is called only with a place (api/http/routing.py)."""

    def mark(endpoint: Callable[P, T]) -> Callable[P, T]:
        setattr(endpoint, _TURN, kind)
        return endpoint

    return mark


def kind_of(endpoint: Callable[..., object]) -> KindName | None:
    """Return the kind of turns that a route's function takes; None: it takes none."""
    return getattr(endpoint, _TURN, None)


def _threads_here() -> CapacityLimiter:
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(AT_ONCE + KEYS_AT_ONCE)
        _limiter.set(limiter)
    return limiter
