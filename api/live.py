"""A job's events as they happen: server-sent events, as OpenAI's client reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from api.views import event_view
from ft_service.errors import FtError
from ft_service.job import TERMINAL, Job
from ft_service.store.base import Store, StoredEvent

POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a comment tells proxies that the connection is alive."""
_BATCH = 100

# What a proxy on the way must not do is gather the stream up.
_HEADERS = {"x-accel-buffering": "no"}


def response(store: Store, project_id: str, job_id: str, after: str | None) -> StreamingResponse:
    """The stream of a job's events after the one with id `after` (None: from the first).

    Raises NotFoundError without such a job, and SpecError if `after` is no event of it.
    """
    first = _look(store, project_id, job_id, after)
    return StreamingResponse(_stream(store, project_id, after, first), media_type="text/event-stream", headers=_HEADERS)


def _look(store: Store, project_id: str, job_id: str, after: str | None) -> tuple[Job, list[StoredEvent], bool]:
    """The job, its events after `after`, and whether there are more. The job is read first: one that has ended by then has
    written its last event."""
    job = store.get_job(project_id, job_id)
    page = store.list_events(project_id, job_id, after=after, limit=_BATCH, order="asc")
    return job, page.data, page.has_more


async def _stream(
    store: Store, project_id: str, after: str | None, found: tuple[Job, list[StoredEvent], bool]
) -> AsyncIterator[str]:
    spoken = time.monotonic()
    while True:
        job, events, more = found
        for event in events:
            yield f"id: {event.id}\ndata: {event_view(event).model_dump_json()}\n\n"
            after = event.id
            spoken = time.monotonic()
        if not more and job.state in TERMINAL and job.phase is None:
            yield "data: [DONE]\n\n"
            return
        if time.monotonic() - spoken >= KEEP_ALIVE_SECONDS:
            yield ": the job goes on\n\n"
            spoken = time.monotonic()
        if not more:
            await asyncio.sleep(POLL_SECONDS)
        try:
            found = await run_in_threadpool(_look, store, project_id, job.id, after)
        except FtError:
            # The answer has begun; who reads on gets the rest with Last-Event-ID.
            return
