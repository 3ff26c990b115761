"""Makes the exports that were asked for, one after the other, each by a process beside the server (`workers.tasks.export`).

What is asked for lies below FT_HOME/exports as an empty file, until it is made or has failed: a server that starts again goes
on with it. The process ends with the server, leaves GPUs alone and lets training have the processors first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.host.environment import child_environment
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.directory import RunDir, unfinished
from ft_service.rundir.documents import Export, ExportFormat, export_key, read_export, state_key
from ft_service.rundir.intact import refuse_damaged
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WORKER = (sys.executable, "-P", "-m", "workers.tasks.beside_server")
_WRONG = 64

Make = Callable[[Path, Path, ExportFormat, threading.Event], dict[str, Any]]
"""(adapter, out, format, stop) → report. Raises FtError with what is to be told, and Stopped."""


class Stopped(Exception):
    """The server ends: what was under way is begun anew by the next one."""


def ask(job: Job, to: ExportFormat, settings: Settings, places: Places) -> Export:
    """Have an export made; one that is there, or under way, is answered as it is. Raises SpecError where none is made here."""
    refuse_elsewhere(settings)
    run = places.run(job.id)
    there = read_export(run, to)
    if there is not None and there.status in ("queued", "running"):
        return there
    if there is not None and there.status == "succeeded" and run.plain(export_key(to)) is not None:
        return there
    asked = Export(format=to, status="queued", created_at=time.time())
    run.write(state_key(to), asked)
    folder = _queue(settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job.project_id}@{job.id}@{to.value}").touch()
    return asked


def refuse_elsewhere(settings: Settings) -> None:
    if settings.launcher != "local":
        raise SpecError(
            "Exports are made where jobs run as processes of the server's host, and this one runs them in a cluster. On a host "
            "that has the base: ft export ID --base DIR, which downloads the adapter.",
            param="format",
            code="no_exports_here",
        )


def remove(job: Job, to: ExportFormat, settings: Settings, places: Places) -> None:
    """Remove an export, made or asked for. Repeating it does nothing."""
    run = places.run(job.id)
    (_queue(settings) / f"{job.project_id}@{job.id}@{to.value}").unlink(missing_ok=True)
    run.path(state_key(to)).unlink(missing_ok=True)
    shutil.rmtree(run.path(export_key(to)), ignore_errors=True)


def folder_of(job: Job, to: ExportFormat, places: Places) -> Path:
    """The files of an export. Raises NotFoundError unless it is made and there."""
    run = places.run(job.id)
    there, folder = read_export(run, to), run.plain(export_key(to))
    if there is None or there.status != "succeeded" or not isinstance(folder, Path):
        state = "was not asked for" if there is None else f"is {there.status}" if there.status != "succeeded" else "is gone"
        raise NotFoundError(
            f"The export {to.value} of job {job.id} {state}: POST …/exports makes it.", param="format", code="no_export"
        )
    return folder


def run(settings: Settings, store: Store, meters: Meters, stop: threading.Event) -> None:
    """Until `stop` is set."""
    if settings.launcher != "local":
        return
    while not stop.is_set():
        try:
            make_all(settings, store, stop)
        except Exception:
            log.exception("an export failed in an unexpected way; the next try is in %g seconds", POLL_SECONDS)
        stop.wait(POLL_SECONDS)


def make_all(settings: Settings, store: Store, stop: threading.Event, make: Make | None = None) -> None:
    """Everything that waits, the oldest first. `make`: None: by a process."""
    places = Places.of(settings)
    for order, project_id, job_id, to in _waiting(settings):
        try:
            job = store.get_job(project_id, job_id)
        except NotFoundError:
            order.unlink(missing_ok=True)
            continue
        try:
            _make_one(job, to, places, store, make or by_process, stop)
        except Stopped:
            return
        order.unlink(missing_ok=True)


def _make_one(job: Job, to: ExportFormat, places: Places, store: Store, make: Make, stop: threading.Event) -> None:
    run_dir = places.run(job.id)
    begun = read_export(run_dir, to) or Export(format=to, status="queued", created_at=time.time())
    run_dir.write(state_key(to), begun.model_copy(update={"status": "running"}))
    started = time.monotonic()
    try:
        refuse_damaged(run_dir.path("adapter"), str(job.tuned_name))
        report = make(run_dir.path("adapter"), run_dir.path(export_key(to)), to, stop)
    except (FtError, OSError) as error:
        _tell(run_dir, begun, store, job, {"status": "failed", "error": str(error)})
        return
    size = sum(path.stat().st_size for path in run_dir.path(export_key(to)).rglob("*") if path.is_file())
    log.info("job %s was exported as %s in %.0f s", job.id, to.value, time.monotonic() - started)
    _tell(run_dir, begun, store, job, {"status": "succeeded", "report": report, "bytes": size})


def _tell(run_dir: RunDir, begun: Export, store: Store, job: Job, changes: dict[str, Any]) -> None:
    ended = begun.model_copy(update={**changes, "finished_at": time.time()})
    run_dir.write(state_key(ended.format), ended)
    if ended.status == "failed":
        event = NewEvent(level="warn", message=f"It was not exported as {ended.format.value}: {ended.error}")
    else:
        event = NewEvent(level="info", message=f"Exported as {ended.format.value}: {ended.bytes or 0:,} bytes to download.")
    store.tell(job, [event])


def by_process(adapter: Path, out: Path, to: ExportFormat, stop: threading.Event) -> dict[str, Any]:
    """Make an export by a process of its own, which is ended when `stop` is set. If somebody else ends it, it is made anew,
    once. Nothing half done stays.
    """
    if to is ExportFormat.PEFT:
        raise SpecError("The adapter as it was trained is downloaded as it is: GET …/adapter.", param="format")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = _tried(adapter, out, to, stop) or _tried(adapter, out, to, stop)
    finally:
        shutil.rmtree(unfinished(out), ignore_errors=True)
    if report is None:
        raise FtError("its process was killed twice, which a host does that has too little memory for it.")
    return report


def _tried(adapter: Path, out: Path, to: ExportFormat, stop: threading.Event) -> dict[str, Any] | None:
    """What the process reports; None: it was killed."""
    command = [*WORKER, str(os.getpid()), str(adapter), str(out), "--format", to.value]
    environment = child_environment(os.environ, PYTHONSAFEPATH="1", CUDA_VISIBLE_DEVICES="")
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for us
    ) as process:
        said, last = _heard(process, stop)
    if process.returncode < 0:
        log.warning("an export's process was ended by signal %d", -process.returncode)
        return None
    lines = said.splitlines()
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    if process.returncode == _WRONG and lines:
        raise SpecError(json.loads(lines[-1])["error"])
    words = (last.strip().splitlines() or [f"the process ended with code {process.returncode}"])[-1]
    raise FtError(words)


def _heard(process: subprocess.Popen[str], stop: threading.Event) -> tuple[str, str]:
    """What it has printed, once it has ended. Raises Stopped."""
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if stop.is_set():
                process.kill()
                process.communicate()
                raise Stopped from None


def _queue(settings: Settings) -> Path:
    return settings.home / "exports"


def _waiting(settings: Settings) -> Iterator[tuple[Path, str, str, ExportFormat]]:
    """Orders, the oldest first: the file, project, job and format."""
    orders = sorted(_queue(settings).glob("*@*@*"), key=lambda path: path.stat().st_mtime)
    for order in orders:
        project_id, job_id, to = order.name.split("@")
        yield order, project_id, job_id, ExportFormat(to)
