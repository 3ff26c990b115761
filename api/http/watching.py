"""One look for all who follow the same: it is looked at once each moment, and what has come is read once for all who are as
far.

A follower says how far it has come, and reads on from there when there is something new; so one that is slow, or comes late,
needs nothing of what was read for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ft_service.errors import FtError, LimitError

log = logging.getLogger("ft_service.api")

Seen = TypeVar("Seen")
Value = TypeVar("Value")

_MOST_READ = 64
"""Parts that are kept for those who are as far; others read their own."""


class Watch(Generic[Seen]):
    """What is followed. `seen`: what the newest look has found."""

    def __init__(self, seen: Seen, look: Callable[[], Seen], every: Callable[[], float]) -> None:
        """`look`: runs in a thread; FtError ends the watch. `every`: seconds between two looks."""
        self.seen = seen
        self._look = look
        self._every = every
        self._news = asyncio.Event()
        self._read: dict[Hashable, asyncio.Future[Any]] = {}
        self.failed = False
        self.followers = 0

    async def run(self) -> None:
        """Look until a look fails, or this is cancelled."""
        try:
            while True:
                await asyncio.sleep(self._every())
                seen = await run_in_threadpool(self._look)
                if seen != self.seen:
                    self.seen = seen
                    self._tell()
        except FtError as error:
            log.warning("a watch has ended: %s", error)
        except Exception:
            log.exception("a watch has failed")
        finally:
            self.failed = True
            self._tell()

    def _tell(self) -> None:
        self._read.clear()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def changed(self, since: Seen, seconds: float) -> bool:
        """Whether there is news since a look; waits for it for so many seconds at most."""
        if self.seen != since or self.failed:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), max(0.0, seconds))
            return True
        return False

    async def read(self, what: Hashable, work: Callable[[], Value]) -> Value:
        """What `work` gives, in a thread: once for all who ask for the same until there is news."""
        if (known := self._read.get(what)) is None:
            known = asyncio.ensure_future(run_in_threadpool(work))
            if len(self._read) < _MOST_READ:
                self._read[what] = known
        return await asyncio.shield(known)


class Watches:
    """The watches of one process, and how many streams each key follows. For the event loop's thread."""

    def __init__(self, most: int) -> None:
        """`most`: streams of one key."""
        self._most = most
        self._watches: dict[Hashable, tuple[Watch[Any], asyncio.Task[None]]] = {}
        self._streams: Counter[str] = Counter()

    @contextlib.contextmanager
    def stream(self, key_id: str) -> Iterator[None]:
        """Count a stream of a key while the block runs. Raises LimitError if the key follows as many as it may."""
        if self._streams[key_id] >= self._most:
            raise LimitError(
                f"This key follows {self._most} streams of events or logs already, and may follow no more at once at a server "
                "(its operator sets FT_MAX_STREAMS). End one first.",
                code="too_many_streams",
            )
        self._streams[key_id] += 1
        try:
            yield
        finally:
            self._streams[key_id] -= 1
            if not self._streams[key_id]:
                del self._streams[key_id]

    @contextlib.asynccontextmanager
    async def of(self, key: Hashable, look: Callable[[], Seen], every: Callable[[], float]) -> AsyncIterator[Watch[Seen]]:
        """The watch of `key`, which begins with its first follower and ends with its last. Raises what the first look does."""
        if not self._is_watched(key):
            seen = await run_in_threadpool(look)
            if not self._is_watched(key):  # another one may have been quicker
                watch = Watch(seen, look, every)
                self._watches[key] = watch, asyncio.create_task(watch.run())
        watch, task = self._watches[key]
        watch.followers += 1
        try:
            yield watch
        finally:
            watch.followers -= 1
            if not watch.followers:
                task.cancel()
            if (not watch.followers or watch.failed) and self._watches.get(key) == (watch, task):
                del self._watches[key]

    def _is_watched(self, key: Hashable) -> bool:
        return key in self._watches and not self._watches[key][0].failed


class Followed(StreamingResponse, Generic[Seen]):
    """A stream of what is told to those who follow something."""

    def __init__(
        self,
        watches: Watches,
        key_id: str,
        key: Hashable,
        look: Callable[[], Seen],
        tell: Callable[[Watch[Seen]], AsyncIterator[str]],
        *,
        every: Callable[[], float],
        media_type: str,
    ) -> None:
        """`tell`: what one follower is sent. The others are those of `Watches`."""
        # What a proxy on the way must not do is gather the stream up.
        super().__init__((), media_type=media_type, headers={"x-accel-buffering": "no"})
        self._watches, self._key_id, self._key, self._look, self._tell, self._every = watches, key_id, key, look, tell, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here and not in the iterator, whose end nobody sees to if the client goes before its beginning.
        with self._watches.stream(self._key_id):
            async with self._watches.of(self._key, self._look, self._every) as watch:
                self.body_iterator = self._tell(watch)
                await super().__call__(scope, receive, send)
