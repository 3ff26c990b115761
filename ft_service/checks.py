"""Checks of a job that take longer than a request may: its data files, read line by line in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from ft_service import offline
from ft_service.dataset import check_file
from ft_service.errors import FtError
from ft_service.job import Job
from ft_service.places import Places
from ft_service.rundir import ErrorInfo
from ft_service.spec import AdapterRef, DataFileRef, JobSpec

SMALL_CHECK_SECONDS = 0.2
"""How long a check is waited for before the loop turns to other jobs."""

Check = Callable[[Job], ErrorInfo | None]


def check_data(job: Job, places: Places) -> ErrorInfo | None:
    """Read a job's data files, and get the adapter ready that it goes on from. The first error, or None."""
    spec = JobSpec.model_validate(job.spec)
    error = _prepare(spec.parent, places) if spec.parent else None
    error = error or _check_one("training_file", spec.training_data, places)
    if error is None and spec.validation_data is not None:
        error = _check_one("validation_file", spec.validation_data, places)
    return error


def _prepare(parent: AdapterRef, places: Places) -> ErrorInfo | None:
    """Make the adapter of a checkpoint, unless it is there already; a job's outcome always is."""
    folder = Path(parent.path)
    if places.fetched(folder).is_dir():
        return None
    try:
        offline.checkpoint_adapter(places.whole_run(parent.job_id, folder.name), folder.name)
    except FtError as error:
        return ErrorInfo(code="model_not_found", message=f"{parent.name}: {error.message}", param="model")
    return None


def _check_one(param: Literal["training_file", "validation_file"], data: DataFileRef, places: Places) -> ErrorInfo | None:
    try:
        return check_file(places.fetched(Path(data.path))).error(param, data.name)
    except OSError as error:
        return ErrorInfo(code=f"invalid_{param}", message=f"{data.name} cannot be read: {error.strerror}.", param=param)


@dataclass(frozen=True)
class Checked:
    """What a finished check found."""

    error: ErrorInfo | None


class Checks:
    """Checks of data files, one after the other in a thread of their own: a large file must not keep other jobs waiting.

    The thread is a daemon, which an executor's is not: a check only reads, so a service that ends need not wait half a minute
    for it. The next start checks anew.
    """

    def __init__(self, check: Check, on_done: Callable[[], None]) -> None:
        self._check = check
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._waiting: SimpleQueue[tuple[Future[ErrorInfo | None], Job] | None] = SimpleQueue()
        self._closed = False
        self._running: dict[str, Future[ErrorInfo | None]] = {}

    def result(self, job: Job) -> Checked | None:
        """What the check of this job found; None: it is under way. Raises what the check raised, and then forgets it."""
        future = self._running.get(job.id)
        if future is None:
            future = self._running[job.id] = self._submit(job)
            future.add_done_callback(lambda _: self._on_done())
            futures.wait([future], SMALL_CHECK_SECONDS)
        if not future.done():
            return None
        if future.exception() is not None:
            self.forget(job)
        return Checked(future.result())

    def forget(self, job: Job) -> None:
        self._running.pop(job.id, None)

    def close(self) -> None:
        """No further check begins; one under way is not waited for."""
        self._closed = True
        self._waiting.put(None)

    def _submit(self, job: Job) -> Future[ErrorInfo | None]:
        future: Future[ErrorInfo | None] = Future()
        self._waiting.put((future, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="data-check", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closed:
            future, job = item
            try:
                found = self._check(job)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(found)
