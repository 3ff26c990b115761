"""Waiting for what Tinker's clients have asked for: one look for all requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from api.http.threads import in_thread_of
from ft_service.errors import FtError, LimitError
from ft_service.rundir.directory import RunDir
from ft_service.store.sql import Store
from ft_service.tinker.commands import CommandLog

log = logging.getLogger("ft_service.api")

Key = TypeVar("Key")
Found = TypeVar("Found")

LOOK_SECONDS = 0.03
SHORTEST = 0.01
LONGEST = 0.2
"""Pauses in seconds between two looks for the results of a model, the first and the last."""
ENDED_SECONDS = 1.0
"""Interval at which is looked whether models have ended."""
MOST_WAITING = 400
"""Limit of a key's requests that wait for answers, of less than half of a server's connections."""


class _Waiting(Generic[Key]):
    """Requests that wait, by what each waits for."""

    def __init__(self) -> None:
        self._events: dict[Key, list[asyncio.Event]] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._events)

    async def wait(self, key: Key, seconds: float) -> bool:
        """Return whether `wake` was called for the key within so many seconds."""
        event = asyncio.Event()
        self._events.setdefault(key, []).append(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            self._events[key].remove(event)
            if not self._events[key]:
                del self._events[key]
        return True

    def wake(self, keys: Iterable[Key]) -> None:
        for key in keys:
            for event in self._events.get(key, ()):
                event.set()


async def _looked(look: Callable[[], Found], nothing: Found) -> Found:
    """Return what a look finds, for many at once; `nothing` if it fails: whoever waits asks
    again.
    """
    try:
        return await in_thread_of("", look)
    except (FtError, OSError) as error:
        log.warning("answers for Tinker's clients cannot be looked for: %s", error)
        return nothing


class SampleAnswers:
    """Requests that wait for answers. For one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting = _Waiting[str]()
        self._looks: asyncio.Task[None] | None = None
        self._of_keys: Counter[str] = Counter()
        self.commands = CommandResults(store)

    @contextlib.contextmanager
    def request(self, key_id: str) -> Iterator[None]:
        """Count a request of a key that waits while the block runs.

        Raises LimitError if the key has as many as it may.
        """
        if self._of_keys[key_id] >= MOST_WAITING:
            text = (
                f"{MOST_WAITING} requests of this key wait for answers on this server already. "
                "Ask again when some have theirs."
            )
            raise LimitError(text, code="too_many_waiting", retry_after=1.0)
        self._of_keys[key_id] += 1
        try:
            yield
        finally:
            self._of_keys[key_id] -= 1
            if not self._of_keys[key_id]:
                del self._of_keys[key_id]

    async def wait(self, sample_id: str, seconds: float) -> bool:
        """Return whether a sample is answered, within so many seconds."""
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look())
        return await self._waiting.wait(sample_id, seconds)

    async def _look(self) -> None:
        while self._waiting:
            asked = list(self._waiting)
            self._waiting.wake(
                await _looked(lambda asked=asked: self._store.tinker.answered(asked), set[str]())
            )
            await asyncio.sleep(LOOK_SECONDS)


class _Model:
    """The requests that wait for commands of one model."""

    def __init__(self, run: RunDir) -> None:
        self.log = CommandLog(run)
        self.waiting = _Waiting[int]()
        self.look_soon()

    def look_soon(self) -> None:
        self.pause = SHORTEST
        self.due = time.monotonic() + self.pause

    def looked(self) -> None:
        self.pause = min(self.pause * 1.5, LONGEST)
        self.due = time.monotonic() + self.pause


class CommandResults:
    """Requests that wait for results of commands: of each model, the file of the lowest number that
    is waited for is looked for once for all. For one event loop.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._models: dict[str, _Model] = {}
        self._looks: asyncio.Task[None] | None = None
        self._sooner = asyncio.Event()

    async def wait(self, job_id: str, run: RunDir, seq: int, seconds: float) -> bool:
        """Return whether a command has a result, or its model has ended, within so many seconds."""
        model = self._models.setdefault(job_id, _Model(run))
        if seq < min(model.waiting, default=seq + 1):
            model.look_soon()
            self._sooner.set()
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look())
        try:
            return await model.waiting.wait(seq, seconds)
        finally:
            if not model.waiting:
                self._models.pop(job_id, None)

    async def _look(self) -> None:
        ended_due = time.monotonic() + ENDED_SECONDS
        while self._models:
            self._sooner.clear()
            pause = min(model.due for model in self._models.values()) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), max(0.0, pause))
                continue
            now = time.monotonic()
            due = {
                job_id: model
                for job_id, model in self._models.items()
                if model.due <= now + model.pause / 2
            }
            asked = {job_id: (model.log, sorted(model.waiting)) for job_id, model in due.items()}
            found = await _looked(lambda asked=asked: results_of(asked), dict[str, list[int]]())
            for job_id, model in due.items():
                model.waiting.wake(found.get(job_id, ()))
                if found.get(job_id):
                    model.look_soon()
                else:
                    model.looked()
            if now >= ended_due:
                ended_due = now + ENDED_SECONDS
                models = list(self._models)
                for job_id in await _looked(
                    lambda models=models: self._store.tinker.ended(models), set[str]()
                ):
                    if job_id in self._models:
                        self._models[job_id].waiting.wake(list(self._models[job_id].waiting))


def results_of(asked: Mapping[str, tuple[CommandLog, Sequence[int]]]) -> dict[str, list[int]]:
    """Return those numbers of each model that have results.

    They get these in their order, so that no other is looked for.
    """
    return {
        job_id: list(takewhile(commands.has_result, seqs))
        for job_id, (commands, seqs) in asked.items()
    }
