"""Checks of a job that take longer than a request may: its data files, line by line and token by token, and its adapter.

Files are read by a process beside this one (examiner.py). What is quickly done has a lane of its own, kept warm; what takes
long steps aside (check_lanes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ft_service.control.checks.check_lanes import Lanes
from ft_service.data.data_file import Counts
from ft_service.data.examiner import Examiner, ExaminerLost, Tell, data_files, unreadable
from ft_service.data.statistics import Level, Measure, Statistics, messages
from ft_service.data.token_folder import NOT_KEPT
from ft_service.errors import FtError, UnavailableError
from ft_service.jobs.states import Job
from ft_service.plan.admit import Admitted, settle_counted
from ft_service.plan.lengths import Lengths
from ft_service.plan.machines import Machine, this_host
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import AdapterRef, JobSpec
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.supervisor import worker_tasks

log = logging.getLogger(__name__)

SMALL_CHECK_SECONDS = 0.2
"""How long a check is waited for before the loop turns to other jobs, if no other is under way."""
LARGE_BYTES = 32 * 1024**2
"""Files above this are read in a long lane from the beginning."""
MAX_TRIES = 3
"""How often the process may end without an answer, and without telling why, before a job fails."""


@dataclass(frozen=True)
class Checked:
    """What a finished check found."""

    error: ErrorInfo | None = None
    waits: str | None = None
    """Why it cannot be finished now though neither the data nor the job is at fault, for the job's user; None: it is."""
    events: tuple[NewEvent, ...] = ()
    """What there is to train on, and what is not trained on, for the job's user."""
    settled: Admitted | None = None
    """The job with what "auto" stands for by its samples, which are counted now. None: that is not known."""


def this_hosts() -> Sequence[Machine]:
    """The machines of a service whose jobs run on this host."""
    return (this_host(),)


Check = Callable[[Job, Examiner, Tell], Checked]
"""Tells how far it is if it takes long. Raises ExaminerLost if it got no answer."""


def check_data(
    job: Job, examiner: Examiner, tell: Tell, places: Places, machines: Callable[[], Sequence[Machine]] = this_hosts
) -> Checked:
    """Read a job's data files, and get the adapter ready that it goes on from. The first error, or what there is to learn.
    `machines`: that may train it."""
    spec = job.spec
    error = _prepare(spec.parent, places) if spec.parent else None
    if error is not None:
        return Checked(error)
    told: list[tuple[Level, str]] = []
    counts: dict[str, Counts | None] = {}
    paths: dict[str, Path] = {}
    for param, data in data_files(spec):
        try:
            path = paths[data.path] = places.fetched(Path(data.path))
        except OSError as error:
            return Checked(unreadable(param, data, error))
        found = examiner.examine_file(param, data, path, spec, tell)
        if isinstance(found, ErrorInfo):
            return Checked(found)
        counts[param] = found.counts
        try:
            places.share_tokens(data.sha256)
        except (OSError, UnavailableError):  # workers make them themselves
            log.exception("the tokens of %s could not be brought to object storage", data.name)
        told += found.messages(data.name, spec.training.max_length, cut=False)
    measured = examiner.measure_job(spec, paths)
    if isinstance(measured, ErrorInfo):
        return Checked(waits=measured.message) if measured.code == NOT_KEPT else Checked(measured)
    told += messages(measured, Measure.of(spec))
    settled = _settled(spec, counts["training_file"], measured, machines)
    if settled is not None:
        told.append(settled.told[0])  # the rest was told when it was created
    return Checked(events=tuple(NewEvent(level=level, message=message) for level, message in told), settled=settled)


def _settled(
    spec: JobSpec, counts: Counts | None, measured: Statistics, machines: Callable[[], Sequence[Machine]]
) -> Admitted | None:
    if counts is None:
        return None
    try:
        return settle_counted(machines(), spec, Lengths.of_data(counts, measured))
    except FtError as error:  # the ranks choose for themselves, and say why they cannot
        log.info("what is auto is left to the ranks: %s", error.message)
        return None


def _prepare(parent: AdapterRef, places: Places) -> ErrorInfo | None:
    """Make the adapter of a checkpoint, unless it is there already; a job's outcome always is."""
    folder = Path(parent.path)
    if places.fetched(folder).is_dir():
        return None
    try:
        places.share(worker_tasks.make_checkpoint_adapter(places.whole_run(parent.job_id, folder.name), folder.name))
    except FtError as error:
        return ErrorInfo(code="model_not_found", message=f"{parent.name}: {error.message}", param="model")
    return None


class Checks:
    """Checks of jobs, for one thread. A check that was begun goes on until its result is asked for, or it is dropped."""

    def __init__(self, check: Check, on_done: Callable[[], None], tokens: Path | None = None) -> None:
        """`on_done`: is told of a check that has ended, in another thread. `tokens`: the folder that keeps tokens for the
        ranks; None: they are not kept."""
        self._check = check
        self._lanes = Lanes(tokens)
        self._on_done = on_done
        self._begun: dict[str, _Asked] = {}

    def warm(self) -> None:
        """Have a process ready for the first job."""
        self._lanes.warm()

    def result(self, job: Job) -> Checked | None:
        """What the check of this job found; None: it is under way. Raises what the check raised, and then forgets it."""
        asked = self._begun.get(job.id)
        if asked is None:
            asked = self._begun[job.id] = _Asked(job, self._check)
            asked.future.add_done_callback(lambda _: self._on_done())
            waits = any(not other.future.done() for other in self._begun.values() if other is not asked)
            self._lanes.put(asked)
            if not waits:  # else it will not be done soon, and each of many would hold the loop up
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
        """Jobs whose check has ended since the last call; their results wait to be asked for."""
        done = [asked for asked in self._begun.values() if asked.future.done() and not asked.told]
        for asked in done:
            asked.told = True
        return [asked.job for asked in done]

    def under_way(self) -> list[Job]:
        """Jobs whose files are being read now."""
        return [work.job for work in self._lanes.under_way() if isinstance(work, _Asked)]

    def make_way(self) -> None:
        """Have what takes long step aside. Call it often."""
        self._lanes.make_way()

    def drop(self, job: Job) -> None:
        """Nobody wants to know any more: end the check."""
        asked = self._begun.pop(job.id, None)
        if asked is not None:
            self._lanes.drop(asked)

    def close(self) -> None:
        """No further check begins; those under way are ended."""
        self._lanes.close()


class _Asked:
    """A check that was asked for, as work of a lane."""

    def __init__(self, job: Job, check: Check) -> None:
        self.job = job
        self.future: Future[Checked] = Future()
        self.told = False
        self.said: str | None = None
        """How far it is; None: that was taken."""
        self._check = check
        self.bytes, self.is_long = _size(job)

    def run(self, examiner: Examiner) -> None:
        """Raises ExaminerLost if the process was stopped for good: it may be run again."""
        try:
            found = self._answer(examiner)
        except ExaminerLost:
            raise
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(found)

    def _answer(self, examiner: Examiner) -> Checked:
        """What the check found; where its process ends again and again, that."""
        for tries in range(1, MAX_TRIES + 1):
            try:
                return self._check(self.job, examiner, self._say)
            except ExaminerLost as error:
                if examiner.is_closed:
                    raise
                if tries == MAX_TRIES:
                    return Checked(ErrorInfo(code=error.code, message=_lost(error)))
        raise AssertionError("the last try returns")

    def _say(self, sentence: str) -> None:
        self.said = sentence


def _size(job: Job) -> tuple[int, bool]:
    """Bytes of a job's files, and whether its check is sure to take long: they are large or not on this host yet, or an adapter
    has to be made."""
    spec = job.spec
    paths = [Path(data.path) for _, data in data_files(spec)]
    try:
        sizes = [path.stat().st_size for path in paths]
    except OSError:
        return LARGE_BYTES, True
    has_adapter = spec.parent is None or Path(spec.parent.path).is_dir()
    return sum(sizes), max(sizes) > LARGE_BYTES or not has_adapter


def _lost(error: ExaminerLost) -> str:
    return f"The data could not be checked. {error.message} It was tried {MAX_TRIES} times."
