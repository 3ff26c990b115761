"""Live streams of a job: its events as server-sent events, and its processes' output as JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from functools import partial

from api.http.dependencies import Services
from api.http.watching import Followed, Watch
from api.transfer import log_tail
from api.wire.views import event_view
from ft_service.errors import FtError
from ft_service.jobs.states import TERMINAL, State
from ft_service.rundir.attempt import Attempt
from ft_service.store.records import Principal
from ft_service.store.sql import Store

POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
"""Silence after which a comment tells proxies that the connection is alive."""
_BATCH = 100

_Events = tuple[bool, int]
"""Whether the job is over, and the place of its newest event."""
_Logs = tuple[int, bool, tuple[log_tail.LogFile, ...]]
"""The newest attempt, whether nothing more comes of the job for now, and the files of the attempt."""


def response(services: Services, caller: Principal, job_id: str, after: str | None) -> Followed[_Events]:
    """The stream of a job's events after the one with id `after` (None: from the first).

    Raises NotFoundError without such a job, and SpecError if `after` is no event of it.
    """
    store, project_id = services.store, caller.project_id
    place = store.event_place(project_id, job_id, after)
    look = partial(_look, store, project_id, job_id)
    tell = partial(_events, store, job_id, place)
    key = ("events", project_id, job_id)
    return Followed(services.watches, caller.key_id, key, look, tell, every=_every, media_type="text/event-stream")


def _every() -> float:
    return POLL_SECONDS


def _look(store: Store, project_id: str, job_id: str) -> _Events:
    # The job is read first: one that had ended by then has written its last event.
    job = store.get_job(project_id, job_id)
    return job.state in TERMINAL and job.phase is None, store.newest_event(job_id)


async def _events(store: Store, job_id: str, place: int, watch: Watch[_Events]) -> AsyncIterator[str]:
    """`place`: of the last event that the follower has."""
    spoken = time.monotonic()
    while True:
        seen = watch.seen
        over, newest = seen
        while place < newest:
            try:
                text, place = await watch.read(place, partial(_texts, store, job_id, place, newest))
            except FtError:  # the answer has begun; who reads on gets the rest with Last-Event-ID
                return
            if text:
                yield text
                spoken = time.monotonic()
        if over:
            yield "data: [DONE]\n\n"
            return
        if watch.failed and watch.seen == seen:
            return
        if not await watch.changed(seen, spoken + KEEP_ALIVE_SECONDS - time.monotonic()):
            yield ": the job goes on\n\n"
            spoken = time.monotonic()


def _texts(store: Store, job_id: str, place: int, newest: int) -> tuple[str, int]:
    """The next events as they are sent, and the place of the last of them."""
    found = store.events_after(job_id, place, _BATCH)
    text = "".join(f"id: {event.id}\ndata: {event_view(event).model_dump_json()}\n\n" for _, event in found)
    return text, found[-1][0] if found else newest


def follow_logs(services: Services, caller: Principal, job_id: str, *, rank: int | None, lines: int) -> Followed[_Logs]:
    """Output of a job's processes as JSON lines `{attempt, source, line}`, attempt after attempt, until the job is over or
    rests paused. Raises NotFoundError without such a job.
    """
    services.store.get_job(caller.project_id, job_id)
    look = partial(_look_at_logs, services, caller.project_id, job_id, rank)
    tell = partial(_log_lines, services, job_id, rank, lines)
    key = ("logs", caller.project_id, job_id, rank)
    return Followed(services.watches, caller.key_id, key, look, tell, every=_every, media_type="application/x-ndjson")


def _look_at_logs(services: Services, project_id: str, job_id: str, rank: int | None) -> _Logs:
    # The job is read first: one that had ended by then has printed its last line.
    job = services.store.get_job(project_id, job_id)
    ended = job.phase is None and job.state in (*TERMINAL, State.PAUSED)
    return job.attempt, ended, _files(services, job_id, job.attempt, rank)


def _files(services: Services, job_id: str, attempt: int, rank: int | None) -> tuple[log_tail.LogFile, ...]:
    folder = Attempt(services.places.run(job_id), attempt).find_logs() if attempt else None
    return log_tail.sized(log_tail.log_files(folder, rank))


async def _log_lines(services: Services, job_id: str, rank: int | None, lines: int, watch: Watch[_Logs]) -> AsyncIterator[str]:
    """`lines`: how many of those already there come first, of each file."""
    attempt, places = 0, dict[str, int]()
    try:
        while True:
            seen = watch.seen
            newest, ended, files = seen
            if attempt and newest != attempt:
                rest = await watch.read(("files", attempt), partial(_files, services, job_id, attempt, rank))
                async for text in _grown(watch, attempt, rest, places, last=True):
                    yield text
                attempt, places = newest, {}
            elif newest and not attempt:
                attempt = newest
                places = dict(await watch.read(("begin", lines), partial(log_tail.beginnings, files, lines)))
            async for text in _grown(watch, newest, files, places, last=ended):
                yield text
            if ended or (watch.failed and watch.seen == seen):
                return
            await watch.changed(seen, KEEP_ALIVE_SECONDS)
    except FtError:
        return


async def _grown(
    watch: Watch[_Logs], attempt: int, files: tuple[log_tail.LogFile, ...], places: dict[str, int], *, last: bool
) -> AsyncIterator[str]:
    """What files have beyond the places up to which a follower has read them, which are moved on. `last`: no more will come."""
    for file in files:
        while (place := places.get(file.source, 0)) < file.size:
            work = partial(_lines, attempt, file, place, last)
            text, places[file.source] = await watch.read((attempt, file.source, place, last), work)
            if text:
                yield text
            if places[file.source] == place:  # the line is not complete
                break


def _lines(attempt: int, file: log_tail.LogFile, place: int, last: bool) -> tuple[str, int]:
    lines, place = log_tail.read_lines(file, place, last)
    return "".join(json.dumps({"attempt": attempt, "source": file.source, "line": line}) + "\n" for line in lines), place
