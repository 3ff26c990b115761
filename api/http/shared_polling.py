"""Polling that is shared by all streams of the same source: the source's state is polled once for
all of them, and each part is read once for all streams that are equally far.

Hundreds of clients may follow one job. A follower knows its own position and reads on from there
when the state has changed, so a slow or late one depends on nothing that was read for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.http.closing_response import NOT_BUFFERED
from api.http.threads import in_thread, in_thread_of
from ft_service.errors import FtError, LimitError

log = logging.getLogger("ft_service.api")

State = TypeVar("State")
Value = TypeVar("Value")

POLL_SECONDS = 0.5
_MOST_READ = 64
"""Parts that are kept for other streams; further parts are read for one stream."""


@dataclass(frozen=True)
class PolledSource(Generic[State]):
    """Something that streams follow."""

    key: Hashable
    poll: Callable[[], State]
    """Returns the state now. It runs in a thread; an FtError ends the watch."""


class Watch(Generic[State]):
    """A source that is polled. `state` is the newest one."""

    def __init__(self, source: PolledSource[State], state: State) -> None:
        self.state = state
        self.failed = False
        self.followers = 0
        self._source = source
        self._changed = asyncio.Event()
        self._read: dict[Hashable, asyncio.Future[Any]] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                state = await in_thread_of("", self._source.poll)
                if state != self.state:
                    self.state = state
                    self._notify()
        except FtError as error:
            log.warning("a watch has ended: %s", error)
        except Exception:
            log.exception("a watch has failed")
        finally:
            self.failed = True
            self._notify()

    def _notify(self) -> None:
        self._read.clear()
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def changed(self, since: State, seconds: float) -> bool:
        """Return whether the state differs from `since` or polling has failed; wait for that at
        most so many seconds.
        """
        if self.state != since or self.failed:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(0.0, seconds))
            return True
        return False

    async def read(self, key: Hashable, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, called in a thread, once for all callers with the same key
        until the state changes.
        """
        if (future := self._read.get(key)) is None:
            future = asyncio.ensure_future(in_thread(work))
            if len(self._read) < _MOST_READ:
                self._read[key] = future
        return await asyncio.shield(future)


class Watches:
    """The watches of one process, and the number of streams of each key.

    For the event loop's thread.
    """

    def __init__(self, most_streams: int) -> None:
        """`most_streams`: limit for one key."""
        self._most_streams = most_streams
        self._watches: dict[Hashable, Watch[Any]] = {}
        self._streams: Counter[str] = Counter()

    @contextlib.contextmanager
    def stream(self, key_id: str) -> Iterator[None]:
        """Count a stream of a key while the block runs.

        Raises LimitError if the key has as many as it may.
        """
        if self._streams[key_id] >= self._most_streams:
            raise LimitError(
                f"This key follows {self._most_streams} streams of events or logs already, which "
                "is the limit of a server "
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
    async def watch(self, source: PolledSource[State]) -> AsyncIterator[Watch[State]]:
        """Yield the watch of a source, which begins with its first follower and ends with its last.

        Raises what the first poll raises.
        """
        if self._find(source) is None:
            state = await in_thread(source.poll)
            if self._find(source) is None:  # another stream may have been faster
                self._watches[source.key] = Watch(source, state)
        watch: Watch[State] = self._watches[source.key]
        watch.followers += 1
        try:
            yield watch
        finally:
            watch.followers -= 1
            if not watch.followers:
                watch.task.cancel()
            if (not watch.followers or watch.failed) and self._watches.get(source.key) is watch:
                del self._watches[source.key]

    def _find(self, source: PolledSource[Any]) -> Watch[Any] | None:
        watch = self._watches.get(source.key)
        return None if watch is None or watch.failed else watch


class FollowingResponse(StreamingResponse, Generic[State]):
    """A stream that follows a source."""

    def __init__(
        self,
        watches: Watches,
        key_id: str,
        source: PolledSource[State],
        body: Callable[[Watch[State]], AsyncIterator[str]],
        media_type: str,
    ) -> None:
        super().__init__((), media_type=media_type, headers=NOT_BUFFERED)
        self._watches = watches
        self._key_id = key_id
        self._source = source
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the iterator: it is never closed if the client goes before its first part.
        with self._watches.stream(self._key_id):
            async with self._watches.watch(self._source) as watch:
                self.body_iterator = self._body(watch)
                await super().__call__(scope, receive, send)
