"""Exports of tuned models, made one after the other, each by a process of its own
(`workers.tasks.export`).

A requested export is an empty file below FT_HOME/exports, its order, until it is made or has failed
and the job's user was told, so that a restarted server continues with it. An export is removed with
its order first: what is written of it afterwards goes too. The process ends with the server, uses
no GPU, and runs at low priority. If the host kills it, the export waits and is begun again, after
growing pauses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError, UnavailableError, is_lost
from ft_service.host.helper_process import HelperFailed, Program, run_once
from ft_service.host.lifetime import try_lock
from ft_service.host.loops import every
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.directory import unfinished
from ft_service.rundir.documents import Export, ExportFormat, export_key, read_export, state_key
from ft_service.rundir.verified_files import refuse_damaged
from ft_service.settings import Settings
from ft_service.shared_work.losses import Losses
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WORKER = (sys.executable, "-P", "-m", "workers.tasks.export")
NICENESS = 10
LONGEST_PAUSE_SECONDS = 3600.0
"""Longest pause before an export whose process the host killed is begun again: each may read and
write a whole model.
"""
_LOCK = "exports.lock"
"""File in FT_HOME, locked by the server that makes exports."""

Make = Callable[[Path, Path, ExportFormat, Callable[[], bool]], dict[str, Any]]
"""(adapter, out, format, stop) → report.

Raises FtError with a message for the user, and Stopped once `stop` returns True.
"""


class Stopped(Exception):
    """The server ends, and the next one starts the export again; or it was removed."""


def ask(job: Job, to: ExportFormat, settings: Settings, places: Places) -> Export:
    """Request an export; one that exists or is being made is returned.

    Raises SpecError if this server makes none.
    """
    refuse_elsewhere(settings)
    run = places.run(job.id)
    there = read_export(run, to)
    if there is not None and there.status == "succeeded" and run.plain(export_key(to)) is not None:
        return there
    if there is None or there.status not in ("queued", "running"):
        there = Export(format=to, status="queued", created_at=time.time())
        run.write(state_key(to), there)
    order = _order(job, to, settings)
    if not order.exists():  # or a server has ended between the two
        order.parent.mkdir(parents=True, exist_ok=True)
        order.touch()
    return there


def refuse_elsewhere(settings: Settings) -> None:
    if settings.launcher != "local":
        raise SpecError(
            "Exports are made where jobs run as processes of the server's host, and this one runs "
            "them in a cluster. On a host "
            "that has the base: ft export ID --base DIR, which downloads the adapter.",
            param="format",
            code="no_exports_here",
        )


def remove(job: Job, to: ExportFormat, settings: Settings, places: Places) -> None:
    """Remove an export or its request. Repeating it does nothing."""
    run = places.run(job.id)
    _order(job, to, settings).unlink(missing_ok=True)
    run.path(state_key(to)).unlink(missing_ok=True)
    shutil.rmtree(run.path(export_key(to)), ignore_errors=True)


def folder_of(job: Job, to: ExportFormat, places: Places) -> Path:
    """Folder of an export. Raises NotFoundError unless it is made and exists."""
    run = places.run(job.id)
    there = read_export(run, to)
    folder = run.plain(export_key(to))
    if there is None or there.status != "succeeded" or not isinstance(folder, Path):
        state = (
            "was not asked for"
            if there is None
            else f"is {there.status}"
            if there.status != "succeeded"
            else "is gone"
        )
        raise NotFoundError(
            f"The export {to.value} of job {job.id} {state}: POST …/exports makes it.",
            param="format",
            code="no_export",
        )
    return folder


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Make exports until `stop` is set."""
    if settings.launcher == "local":
        lost = Losses("an export", longest=LONGEST_PAUSE_SECONDS)
        every(
            POLL_SECONDS, lambda: make_all(settings, store, stop, lost=lost), stop, "making exports"
        )


def make_all(
    settings: Settings,
    store: Store,
    stop: threading.Event,
    make: Make | None = None,
    lost: Losses | None = None,
) -> None:
    """Make all requested exports, oldest first, unless another server of the same FT_HOME makes
    them: both would write to one folder, and each would take the other's end for a removal. `make`:
    None: `by_process`. `lost`: earlier losses of orders; None: there were none.
    """
    if not any(_waiting(settings)):
        return
    lock = try_lock(settings.home / _LOCK)
    if lock is None:
        return
    try:
        _make_all(settings, store, stop, make or by_process, lost or Losses("an export"))
    finally:
        os.close(lock)


def _make_all(
    settings: Settings, store: Store, stop: threading.Event, make: Make, lost: Losses
) -> None:
    places = Places.of(settings)
    for order, project_id, job_id, to in _waiting(settings):
        if lost.pending(order.name) is not None:
            continue
        try:
            job = store.jobs.get_job(project_id, job_id)
        except NotFoundError:
            order.unlink(missing_ok=True)
            continue
        try:
            ended = _make_one(order, job, to, places, make, stop)
            lost.forget(order.name)
        except UnavailableError as error:
            lost.add(order.name, error.message)
            if lost.count(order.name) == 1:
                store.jobs.add_events(job, [NewEvent(level="warn", message=_waits(to, error))])
            continue
        if not order.exists():
            remove(job, to, settings, places)
        elif ended is None:
            return
        else:  # the order goes last: what is missing after a crash, or while the database is away, is done the next time
            store.jobs.add_events(job, [_event(ended)])
            order.unlink(missing_ok=True)


def _make_one(
    order: Path, job: Job, to: ExportFormat, places: Places, make: Make, stop: threading.Event
) -> Export | None:
    """Make an export, unless it is made or has failed already and only its user was not told.

    Its state at the end; None: it was stopped. Raises UnavailableError if it was lost; it then
    waits for the next try.
    """
    run_dir = places.run(job.id)
    begun = read_export(run_dir, to) or Export(format=to, status="queued", created_at=time.time())
    if begun.status in ("succeeded", "failed"):
        return begun
    run_dir.write(state_key(to), begun.model_copy(update={"status": "running", "error": None}))
    started = time.monotonic()
    try:
        refuse_damaged(run_dir.path("adapter"), str(job.tuned_name))
        report = make(
            run_dir.path("adapter"),
            run_dir.path(export_key(to)),
            to,
            lambda: stop.is_set() or not order.exists(),
        )
        size = sum(
            path.stat().st_size
            for path in run_dir.path(export_key(to)).rglob("*")
            if path.is_file()
        )
    except Stopped:
        return None
    except (FtError, OSError) as error:
        if is_lost(error):
            run_dir.write(
                state_key(to), begun.model_copy(update={"status": "queued", "error": str(error)})
            )
            raise
        changes = {"status": "failed", "error": str(error)}
    else:
        log.info(
            "job %s was exported as %s in %.0f s", job.id, to.value, time.monotonic() - started
        )
        changes = {"status": "succeeded", "report": report, "bytes": size, "error": None}
    ended = begun.model_copy(update={**changes, "finished_at": time.time()})
    run_dir.write(state_key(to), ended)
    return ended


def _waits(to: ExportFormat, error: UnavailableError) -> str:
    return f"It could not be exported as {to.value} now, and is tried again: {error.message}."


def _event(ended: Export) -> NewEvent:
    if ended.status == "failed":
        return NewEvent(
            level="warn", message=f"It was not exported as {ended.format.value}: {ended.error}"
        )
    return NewEvent(
        level="info",
        message=f"Exported as {ended.format.value}: {ended.bytes or 0:,} bytes to download.",
    )


def by_process(
    adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Make an export in a process, which is ended when `stop` returns True.

    Incomplete files are removed. Raises as `Make`, and HelperFailed.
    """
    if to is ExportFormat.PEFT:
        raise SpecError(
            "The adapter as it was trained is downloaded as it is: GET …/adapter.", param="format"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    program = Program(
        command=(*WORKER, str(adapter), str(out), "--format", to.value),
        niceness=NICENESS,  # training has priority
        variables={"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        return run_once(program, stop=stop)
    except HelperFailed:
        if stop():
            raise Stopped from None
        raise
    finally:
        shutil.rmtree(unfinished(out), ignore_errors=True)


def _queue(settings: Settings) -> Path:
    return settings.home / "exports"


def _order(job: Job, to: ExportFormat, settings: Settings) -> Path:
    return _queue(settings) / f"{job.project_id}@{job.id}@{to.value}"


def _waiting(settings: Settings) -> Iterator[tuple[Path, str, str, ExportFormat]]:
    """Requests, oldest first: file, project, job and format.

    One that is removed while others are made does not come any more.
    """
    orders: list[tuple[float, tuple[Path, str, str, ExportFormat]]] = []
    for order in _queue(settings).glob("*@*@*"):
        with contextlib.suppress(
            ValueError, FileNotFoundError
        ):  # a file that is no order, or was removed
            project_id, job_id, to = order.name.split("@")
            orders.append((order.stat().st_mtime, (order, project_id, job_id, ExportFormat(to))))
    for _, request in sorted(orders):
        if request[0].exists():
            yield request
