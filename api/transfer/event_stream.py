"""Live streams of a job: its events as server-sent events, and its processes' output as JSON
lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from functools import partial

from api.http.dependencies import Services
from api.http.shared_polling import FollowingResponse, PolledSource, Watch
from api.transfer import log_tail
from api.wire.views import event_view
from ft_service.errors import FtError
from ft_service.jobs.states import TERMINAL, State
from ft_service.store.records import Principal
from ft_service.store.sql import Store

KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a comment shows proxies that the connection is alive."""
_BATCH = 100

_EventState = tuple[bool, int]
"""Whether the job is over, and the place of its newest event."""
_LogState = tuple[int, bool, tuple[log_tail.LogFile, ...]]
"""The newest attempt, whether the job is over or paused, and the log files of the attempt."""


def response(
    services: Services, caller: Principal, job_id: str, after: str | None
) -> FollowingResponse[_EventState]:
    """Return the stream of a job's events after the one with id `after` (None: from the first).

    Raises NotFoundError without such a job, and SpecError if `after` is not an event of it.
    """
    store = services.store
    project_id = caller.project_id
    place = store.jobs.event_place(project_id, job_id, after)
    source = PolledSource(
        ("events", project_id, job_id), partial(_event_state, store, project_id, job_id)
    )
    body = partial(_events, store, job_id, place)
    return FollowingResponse(services.watches, caller.key_id, source, body, "text/event-stream")


def _event_state(store: Store, project_id: str, job_id: str) -> _EventState:
    # The job is read first: a job that was over then has already written its last event.
    job = store.jobs.get_job(project_id, job_id)
    return job.state in TERMINAL and job.phase is None, store.jobs.newest_event(job_id)


async def _events(
    store: Store, job_id: str, place: int, watch: Watch[_EventState]
) -> AsyncIterator[str]:
    """Yield events. `place`: that of the last event that the follower has."""
    sent_at = time.monotonic()
    while True:
        state = watch.state
        is_over, newest = state
        while place < newest:
            try:
                text, place = await watch.read(
                    place, partial(_event_texts, store, job_id, place, newest)
                )
            except (
                FtError
            ):  # the answer has begun; a client that reconnects gets the rest with Last-Event-ID
                return
            if text:
                yield text
                sent_at = time.monotonic()
        if is_over:
            yield "data: [DONE]\n\n"
            return
        if watch.failed and watch.state == state:
            return
        if not await watch.changed(state, sent_at + KEEP_ALIVE_SECONDS - time.monotonic()):
            yield ": the job continues\n\n"
            sent_at = time.monotonic()


def _event_texts(store: Store, job_id: str, place: int, newest: int) -> tuple[str, int]:
    """Return the next events as they are sent, and the place of the last of them."""
    events = store.jobs.events_after(job_id, place, _BATCH)
    text = "".join(
        f"id: {event.id}\ndata: {event_view(event).model_dump_json()}\n\n" for _, event in events
    )
    return text, events[-1][0] if events else newest


def follow_logs(
    services: Services, caller: Principal, job_id: str, *, rank: int | None, lines: int
) -> FollowingResponse[_LogState]:
    """Return the output of a job's processes as JSON lines `{attempt, source, line}`, attempt after
    attempt, until the job is over or paused. `lines`: how many existing lines of each file come
    first. Raises NotFoundError without such a job.
    """
    services.store.jobs.get_job(caller.project_id, job_id)
    poll = partial(_log_state, services, caller.project_id, job_id, rank)
    source = PolledSource(("logs", caller.project_id, job_id, rank), poll)
    body = partial(_log_lines, services, job_id, rank, lines)
    return FollowingResponse(services.watches, caller.key_id, source, body, "application/x-ndjson")


def _log_state(services: Services, project_id: str, job_id: str, rank: int | None) -> _LogState:
    # The job is read first: a job that was over then has already printed its last line.
    job = services.store.jobs.get_job(project_id, job_id)
    is_over = job.phase is None and job.state in (*TERMINAL, State.PAUSED)
    return job.attempt, is_over, _files(services, job_id, job.attempt, rank)


def _files(
    services: Services, job_id: str, attempt: int, rank: int | None
) -> tuple[log_tail.LogFile, ...]:
    return log_tail.sized(log_tail.attempt_logs(services.places, job_id, attempt, rank))


async def _log_lines(
    services: Services, job_id: str, rank: int | None, lines: int, watch: Watch[_LogState]
) -> AsyncIterator[str]:
    attempt = 0
    places = dict[str, int]()
    try:
        while True:
            state = watch.state
            newest, is_over, files = state
            if attempt and newest != attempt:
                rest = await watch.read(
                    ("files", attempt), partial(_files, services, job_id, attempt, rank)
                )
                async for text in _new_lines(watch, attempt, rest, places, last=True):
                    yield text
                attempt = newest
                places = {}
            elif newest and not attempt:
                attempt = newest
                places = dict(
                    await watch.read(("begin", lines), partial(log_tail.beginnings, files, lines))
                )
            async for text in _new_lines(watch, newest, files, places, last=is_over):
                yield text
            if is_over or (watch.failed and watch.state == state):
                return
            await watch.changed(state, KEEP_ALIVE_SECONDS)
    except FtError:
        return


async def _new_lines(
    watch: Watch[_LogState],
    attempt: int,
    files: tuple[log_tail.LogFile, ...],
    places: dict[str, int],
    *,
    last: bool,
) -> AsyncIterator[str]:
    """Yield the lines of files after the follower's `places`, which are moved on.

    `last`: the files are complete.
    """
    for file in files:
        while (place := places.get(file.source, 0)) < file.size:
            work = partial(_line_texts, attempt, file, place, last)
            text, places[file.source] = await watch.read((attempt, file.source, place, last), work)
            if text:
                yield text
            if places[file.source] == place:  # the line is not complete
                break


def _line_texts(attempt: int, file: log_tail.LogFile, place: int, last: bool) -> tuple[str, int]:
    lines, place = log_tail.read_lines(file, place, last)
    return "".join(
        json.dumps({"attempt": attempt, "source": file.source, "line": line}) + "\n"
        for line in lines
    ), place
