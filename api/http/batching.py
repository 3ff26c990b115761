"""Calls of many requests that one thread carries out together.

Threads that each write one row wait for the same lock and the same disk, and in between for Python's own lock: sixteen of them
spend half of their time on handing it over. One thread with everything that arrived meanwhile does the same with one flush.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")

_Batch = list[tuple[Given, "asyncio.Future[Made]"]]

MOST_AT_ONCE = 64
"""Of one batch, so that other writers of the store get their turn."""
MOST_OF_OWNER = 16
"""Of these, of one owner, so that a batch that another one waits for ends soon."""


class Batched(Generic[Given, Made]):
    """An async function over `work`, which gets the calls that arrived while its last call ran: of each owner in turn, and of
    one first come, first served.

    `work`: runs in a thread, one call at a time; returns each call's outcome, or the error to raise for it. If it raises,
    every caller in the batch gets that error. Its log lines are about the whole batch, so they carry no request's id.
    `owner`: whose a call is. For one event loop.
    """

    def __init__(
        self, work: Callable[[Sequence[Given]], Sequence[Made | Exception]], owner: Callable[[Given], Hashable] = lambda _: None
    ) -> None:
        self._work = work
        self._owner = owner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._waiting: OrderedDict[Hashable, deque[tuple[Given, asyncio.Future[Made]]]] = OrderedDict()
        """By owner; whose turn comes first is first."""
        self._working = False

    async def __call__(self, given: Given) -> Made:
        """The outcome for `given`. Work begun for a caller who goes away is carried out all the same."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Made] = loop.create_future()
        self._waiting.setdefault(self._owner(given), deque()).append((given, future))
        if not self._working:
            self._begin(loop)
        return await future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the thread carry out what waits."""
        batch = self._next()
        self._working = bool(batch)
        if batch:
            self._thread.submit(self._carry_out, batch, loop)

    def _next(self) -> _Batch[Given, Made]:
        batch: _Batch[Given, Made] = []
        for _ in range(MOST_OF_OWNER):
            for owner in tuple(self._waiting):
                if len(batch) == MOST_AT_ONCE:
                    return batch
                batch.append(self._waiting[owner].popleft())
                self._waiting.move_to_end(owner)
                if not self._waiting[owner]:
                    del self._waiting[owner]
        return batch

    def _carry_out(self, batch: _Batch[Given, Made], loop: asyncio.AbstractEventLoop) -> None:
        outcomes: Sequence[Made | Exception]
        try:
            outcomes = self._work([given for given, _ in batch])
            assert len(outcomes) == len(batch)
        except Exception as error:
            outcomes = [error] * len(batch)
        loop.call_soon_threadsafe(self._end, batch, outcomes, loop)

    def _end(self, batch: _Batch[Given, Made], outcomes: Sequence[Made | Exception], loop: asyncio.AbstractEventLoop) -> None:
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            _settle(future, outcome)
        self._begin(loop)


def _settle(future: asyncio.Future[Made], outcome: Made | Exception) -> None:
    if future.done():  # its request was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
