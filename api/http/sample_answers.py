"""Waiting for the answers to requests for samples: one look into the database for all requests that wait."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from ft_service.errors import UnavailableError
from ft_service.store.sql import Store

LOOK_SECONDS = 0.03


class SampleAnswers:
    """Requests that wait for answers. For one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._looks: asyncio.Task[None] | None = None

    async def wait(self, sample_id: str, seconds: float) -> bool:
        """Return whether a sample is answered, within so many seconds."""
        event = asyncio.Event()
        self._waiting.setdefault(sample_id, []).append(event)
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look())
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            others = self._waiting.get(sample_id, [])
            if event in others:
                others.remove(event)
            if not others:
                self._waiting.pop(sample_id, None)
        return True

    async def _look(self) -> None:
        while self._waiting:
            try:
                answered = await run_in_threadpool(self._store.tinker.answered, list(self._waiting))
            except UnavailableError:  # whoever waits asks again
                answered = set()
            for sample_id in answered:
                for event in self._waiting.get(sample_id, ()):
                    event.set()
            await asyncio.sleep(LOOK_SECONDS)
