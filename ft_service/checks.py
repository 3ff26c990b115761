"""Checks of a job that take longer than a request may: its data files, line by line and token by token, and its adapter.

Files are read by a process beside this one (examiner.py). Small files have a thread and a process of their own, kept warm, so
that a large one keeps nobody waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from ft_service import offline
from ft_service.errors import FtError
from ft_service.examiner import Examiner, ExaminerLost, Known, Tell, data_files, unreadable
from ft_service.job import Job
from ft_service.places import Places
from ft_service.rundir import ErrorInfo
from ft_service.spec import AdapterRef, JobSpec
from ft_service.store.base import NewEvent

SMALL_CHECK_SECONDS = 0.2
"""How long a check is waited for before the loop turns to other jobs."""
LARGE_BYTES = 32 * 1024**2
"""Files above this are read by a process of their own."""
IDLE_SECONDS = 600.0
"""Without a file to read for so long, a process is let go."""
MAX_TRIES = 3
"""How often the process may end without an answer before a job fails."""


@dataclass(frozen=True)
class Checked:
    """What a finished check found."""

    error: ErrorInfo | None = None
    events: tuple[NewEvent, ...] = ()
    """What there is to train on, and what is not trained on, for the job's user."""


Check = Callable[[Job, Examiner, Tell], Checked]
"""Tells how far it is if it takes long. Raises ExaminerLost if it got no answer."""


def check_data(job: Job, examiner: Examiner, tell: Tell, places: Places) -> Checked:
    """Read a job's data files, and get the adapter ready that it goes on from. The first error, or what there is to learn."""
    spec = JobSpec.model_validate(job.spec)
    error = _prepare(spec.parent, places) if spec.parent else None
    if error is not None:
        return Checked(error)
    events: list[NewEvent] = []
    for param, data in data_files(spec):
        try:
            path = places.fetched(Path(data.path))
        except OSError as error:
            return Checked(unreadable(param, data, error))
        found = examiner.examine_file(param, data, path, spec, tell)
        if isinstance(found, ErrorInfo):
            return Checked(found)
        told = found.messages(data.name, spec.training.max_length)
        events += [NewEvent(level=level, message=message) for level, message in told]
    return Checked(events=tuple(events))


def _prepare(parent: AdapterRef, places: Places) -> ErrorInfo | None:
    """Make the adapter of a checkpoint, unless it is there already; a job's outcome always is."""
    folder = Path(parent.path)
    if places.fetched(folder).is_dir():
        return None
    try:
        places.share(offline.checkpoint_adapter(places.whole_run(parent.job_id, folder.name), folder.name))
    except FtError as error:
        return ErrorInfo(code="model_not_found", message=f"{parent.name}: {error.message}", param="model")
    return None


class Checks:
    """Checks of jobs, for one thread. A check that was begun goes on until its result is asked for, or it is dropped."""

    def __init__(self, check: Check, on_done: Callable[[], None]) -> None:
        """`on_done`: is told of a check that has ended, in another thread."""
        known = Known()
        self._quick, self._large = _Lane("data-check", check, known), _Lane("large-data-check", check, known)
        self._lanes = (self._quick, self._large)
        self._on_done = on_done
        self._begun: dict[str, _Asked] = {}

    def warm(self) -> None:
        """Have a process ready for the first job."""
        self._quick.begin()

    def result(self, job: Job) -> Checked | None:
        """What the check of this job found; None: it is under way. Raises what the check raised, and then forgets it."""
        asked = self._begun.get(job.id)
        if asked is None:
            asked = self._begun[job.id] = _Asked(job)
            asked.future.add_done_callback(lambda _: self._on_done())
            lane = self._large if _is_large(job) else self._quick
            lane.put(asked)
            futures.wait([asked.future], SMALL_CHECK_SECONDS)
        if not asked.future.done():
            return None
        if asked.future.exception() is not None:
            self.forget(job)
        return asked.future.result()

    def news(self, job: Job) -> list[NewEvent]:
        """How far its check is, if that was said since the last call."""
        asked = self._begun.get(job.id)
        if asked is None or asked.said is None:
            return []
        said, asked.said = asked.said, None
        return [NewEvent(level="info", message=said)]

    def forget(self, job: Job) -> None:
        self._begun.pop(job.id, None)

    def finished(self) -> list[Job]:
        """Of whom results have come up since the last call, and wait to be asked for."""
        done = [asked for asked in self._begun.values() if asked.future.done() and not asked.told]
        for asked in done:
            asked.told = True
        return [asked.job for asked in done]

    def under_way(self) -> list[Job]:
        """Whose files are being read now."""
        return [asked.job for lane in self._lanes if (asked := lane.current) is not None]

    def drop(self, job: Job) -> None:
        """Nobody wants to know any more: end the check."""
        self.forget(job)
        for lane in self._lanes:
            lane.drop(job)

    def close(self) -> None:
        """No further check begins; those under way are ended."""
        for lane in self._lanes:
            lane.close()


def _is_large(job: Job) -> bool:
    """Whether a file is large, or still has to be fetched to this host."""
    paths = [Path(data.path) for _, data in data_files(JobSpec.model_validate(job.spec))]
    try:
        return any(path.stat().st_size > LARGE_BYTES for path in paths)
    except OSError:
        return True


class _Asked:
    """A check that was asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[Checked] = Future()
        self.dropped = False
        self.told = False
        self.said: str | None = None
        """How far it is; None: that was taken."""

    def say(self, sentence: str) -> None:
        self.said = sentence


class _Lane:
    """Checks one after the other, in a thread of their own with a process of its own.

    The thread is a daemon, which an executor's is not: a service that ends need not wait for it. The next start checks anew.
    """

    def __init__(self, name: str, check: Check, known: Known) -> None:
        self._check = check
        self._examiner = Examiner(known)
        self._waiting: SimpleQueue[_Asked | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False
        self._warm = False
        self.current: _Asked | None = None

    def begin(self) -> None:
        """Start the process before there is anything to check."""
        self._warm = True
        self._begin()

    def put(self, asked: _Asked) -> None:
        self._waiting.put(asked)
        self._begin()

    def drop(self, job: Job) -> None:
        """End the check of a job, if it is the current one."""
        if (asked := self.current) is not None and asked.job.id == job.id:
            asked.dropped = True
            self._examiner.stop()

    def close(self) -> None:
        self._closed = True
        self._waiting.put(None)
        self._examiner.stop(for_good=True)

    def _begin(self) -> None:
        if not self._thread.is_alive() and not self._closed:
            self._thread.start()

    def _work(self) -> None:
        try:
            if self._warm:
                self._examiner.start()
            while (asked := self._next()) is not None and not self._closed:
                self.current = asked
                self._run(asked)
                self.current = None
        except ExaminerLost:  # closed before it began
            pass
        finally:
            self._examiner.close()

    def _next(self) -> _Asked | None:
        try:
            return self._waiting.get(timeout=IDLE_SECONDS)
        except Empty:
            self._examiner.stop()
            return self._waiting.get()

    def _run(self, asked: _Asked) -> None:
        try:
            found = self._answer(asked)
        except Exception as error:
            asked.future.set_exception(error)
        else:
            asked.future.set_result(found)

    def _answer(self, asked: _Asked) -> Checked:
        """What the check found; where its process ends again and again, that. Raises ExaminerLost if it was to be ended."""
        for tries in range(1, MAX_TRIES + 1):
            try:
                return self._check(asked.job, self._examiner, asked.say)
            except ExaminerLost as error:
                if asked.dropped or self._closed:
                    raise
                if tries == MAX_TRIES:
                    return Checked(ErrorInfo(code=error.code, message=_lost(error)))
        raise AssertionError("the last try returns")


def _lost(error: ExaminerLost) -> str:
    return f"The data could not be checked. {error.message} It was tried {MAX_TRIES} times."
