"""Checks of a job that take too long for a request: its data files, line by line and token by
token, and its adapter.

Processes of their own read the files (examiner.py), in lanes for short and long checks
(check_lanes.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from ft_service.control.checks.check_lanes import LONG_LANES, LONG_OF_PROJECT, Lanes
from ft_service.data.data_file import Counts
from ft_service.data.examiner import Examiner, ExaminerLost, Tell, data_files, unreadable
from ft_service.data.formats.reading import open_data
from ft_service.data.statistics import DataStatistics, Level, Measure, messages
from ft_service.data.token_folder import NOT_KEPT
from ft_service.errors import FtError, SpecError, UnavailableError, is_lost
from ft_service.jobs.states import Job
from ft_service.plan.admit import Admitted
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.rundir.documents import ErrorInfo
from ft_service.serving import worker_tasks
from ft_service.spec import AdapterRef, JobSpec
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent

log = logging.getLogger(__name__)

SMALL_CHECK_SECONDS = 0.2
"""How long the loop waits for a check before it turns to other jobs, if no other check runs."""
LARGE_BYTES = 32 * 1024**2
"""Size above which files are read in a long lane from the beginning."""
MAX_TRIES = 3
"""How often the process may end without an answer before the job waits, if the host ended it, or
else fails.
"""
WAITS = "The check of its files waits for its turn"
_WAITS_LONG = (
    f"{WAITS}: checks that take long are made {LONG_LANES} at a time, {LONG_OF_PROJECT} "
    "of a project"
)


@dataclass(frozen=True)
class Checked:
    """The result of a finished check."""

    error: ErrorInfo | None = None
    waits: str | None = None
    """Text for the user why the check cannot be finished now, through no fault of data or job;
    None: it is finished.
    """
    events: tuple[NewEvent, ...] = ()
    """Events about the samples that are trained on, and those that are not."""
    planned: Job | None = None
    """The job with its plan, if it was stored without one."""
    settled: Admitted | None = None
    """The choices for "auto" by the counted samples; None: unknown."""


Plan = Callable[[Job, int | None], tuple[Job, list[NewEvent]]]
"""(job, bytes of its training file, if it has one) → the job with its plan, and events; for a job
that was stored before its base was described. Raises SpecError for a job that admission would have
refused, UnavailableError.
"""
Settle = Callable[[JobSpec, SampleLengths], Admitted]
"""Chooses the values of "auto" options from counted samples. Raises FtError."""
NoteImages = Callable[[JobSpec, int, int], str]
"""The sentence about a job's images, of this number and so many tokens.

Raises SpecError for a base that cannot learn from them, UnavailableError.
"""
Check = Callable[[Job, Examiner, Tell], Checked]
"""Checks a job, and reports its progress if that takes long.

Raises ExaminerLost if the process gave no answer.
"""


def check_data(
    job: Job,
    examiner: Examiner,
    tell: Tell,
    places: Places,
    plan: Plan | None = None,
    settle: Settle | None = None,
    note_images: NoteImages | None = None,
) -> Checked:
    """Plan a job that has no plan, read its data files, and prepare the adapter that it continues
    from. Stops at the first error. `plan`: None: jobs stay without a plan. `settle`: None: the
    ranks choose what is "auto". `note_images`: None: the ranks
    say what is to be said of images.
    """
    if job.work is not None or job.seat is not None or plan is None:
        return _check_files(job, examiner, tell, places, settle, note_images)
    data = job.spec.training_data
    try:
        size = None if data is None else open_data(places.fetched(Path(data.path)), data.files).size
        planned, events = plan(job, size)
    except UnavailableError as error:
        return Checked(waits=error.message)
    except FtError as error:
        return Checked(ErrorInfo(code=error.code, message=error.message, param=error.param))
    except OSError as error:
        assert data is not None, "only a file can be unreadable"
        return Checked(unreadable("training_file", data, error))
    checked = _check_files(planned, examiner, tell, places, settle, note_images)
    return replace(checked, events=(*events, *checked.events), planned=planned)


def _check_files(
    job: Job,
    examiner: Examiner,
    tell: Tell,
    places: Places,
    settle: Settle | None,
    note_images: NoteImages | None,
) -> Checked:
    spec = job.spec
    for adapter in spec.adapters_read:
        if (unfit := _prepare(adapter, places)) is not None:
            return unfit
    told: list[tuple[Level, str]] = []
    counts: dict[str, Counts | None] = {}
    paths: dict[str, Path] = {}
    for param, data in data_files(spec):
        try:
            path = paths[data.path] = places.fetched(Path(data.path))
        except OSError as error:
            return Checked(unreadable(param, data, error))
        report = examiner.examine_file(param, data, path, spec, tell)
        if isinstance(report, ErrorInfo):
            return Checked(report)
        counts[param] = report.counts
        if report.images and note_images is not None:
            assert report.counts is not None, "the request asks for them"
            try:
                note = note_images(spec, report.images, report.counts.image_tokens)
            except UnavailableError as error:
                return Checked(waits=error.message)
            except SpecError as error:
                return Checked(ErrorInfo(code=error.code, message=error.message, param=error.param))
            told.append(("info", note))
        try:
            places.share_tokens(data.sha256)
        except (OSError, UnavailableError):  # workers then make them themselves
            log.exception("the tokens of %s could not be brought to object storage", data.name)
        told += report.messages(data.name, spec.training.max_length, cut=False, loss=spec.loss)
    if not counts:
        return Checked()
    if spec.reinforcement is not None:
        settled = _settled(spec, counts["training_file"], None, settle)
        return Checked(
            events=tuple(NewEvent(level=level, message=message) for level, message in told),
            settled=settled,
        )
    measured = examiner.measure_job(spec, paths)
    if isinstance(measured, ErrorInfo):
        return Checked(waits=measured.message) if measured.code == NOT_KEPT else Checked(measured)
    told += messages(measured, Measure.of(spec))
    settled = _settled(spec, counts["training_file"], measured, settle)
    if settled is not None:
        told.append(settled.events[0])  # the other sentences are events of the job already
    return Checked(
        events=tuple(NewEvent(level=level, message=message) for level, message in told),
        settled=settled,
    )


def _settled(
    spec: JobSpec, counts: Counts | None, measured: DataStatistics | None, settle: Settle | None
) -> Admitted | None:
    if counts is None or settle is None:
        return None
    try:
        lengths = (
            SampleLengths.of_prompts(counts, spec)
            if measured is None
            else SampleLengths.of_data(counts, measured, spec)
        )
        return settle(spec, lengths)
    except FtError as error:  # the ranks then choose, and report why they cannot
        log.info("what is auto is left to the ranks: %s", error.message)
        return None


def _prepare(adapter: AdapterRef, places: Places) -> Checked | None:
    """Make the adapter of a checkpoint unless it exists, which a job's outcome always does.

    Returns why the job cannot use it, or not yet.
    """
    folder = Path(adapter.path)
    if places.fetched(folder).is_dir():
        return None
    try:
        places.share(
            worker_tasks.make_checkpoint_adapter(
                places.whole_run(adapter.job_id, folder.name), folder.name
            )
        )
    except FtError as error:
        if is_lost(error):
            return Checked(waits=f"{adapter.name} cannot be prepared now: {error.message}")
        return Checked(
            ErrorInfo(
                code="model_not_found", message=f"{adapter.name}: {error.message}", param="model"
            )
        )
    return None


class Checks:
    """Checks of jobs, for one thread.

    The result of a check is kept until it is forgotten or dropped.
    """

    def __init__(
        self, check: Check, on_done: Callable[[], None], tokens: Path | None = None
    ) -> None:
        """`on_done`: called in another thread when a check has ended.

        `tokens`: folder for the ranks' tokens; None: they are not kept.
        """
        self._check = check
        self._lanes = Lanes(tokens)
        self._on_done = on_done
        self._started: dict[str, _RunningCheck] = {}

    def warm(self) -> None:
        """Start a process for the first job."""
        self._lanes.warm()

    def result(self, job: Job) -> Checked | None:
        """The result of this job's check, which is started if need be; None: it runs.

        Raises the check's error, and forgets it.
        """
        check = self._started.get(job.id)
        if check is None:
            check = self._started[job.id] = _RunningCheck(job, self._check)
            check.future.add_done_callback(lambda _: self._on_done())
            waits = any(
                not other.future.done() for other in self._started.values() if other is not check
            )
            self._lanes.put(check)
            if not waits:  # else it will not end soon, and many such waits would delay the loop
                futures.wait([check.future], SMALL_CHECK_SECONDS)
        if not check.future.done():
            return None
        if check.future.exception() is not None:
            self.forget(job)
        return check.future.result()

    def news(self, job: Job) -> list[NewEvent]:
        """Progress of the job's check, if reported since the last call."""
        check = self._started.get(job.id)
        if check is None or check.progress is None:
            return []
        progress = check.progress
        check.progress = None
        return [NewEvent(level="info", message=progress)]

    def waits(self, job: Job) -> str | None:
        """Text for the user that the job's check waits for a lane; None: it does not."""
        check = self._started.get(job.id)
        if check is None or check.future.done() or check in self._lanes.under_way():
            return None
        check.is_said_to_wait = True
        return f"{_WAITS_LONG if check.is_long else WAITS}."

    def begun(self) -> list[Job]:
        """Jobs that were said to wait for a lane, and whose check has begun since the last call."""
        begun = [
            work
            for work in self._lanes.under_way()
            if isinstance(work, _RunningCheck) and work.is_said_to_wait
        ]
        for check in begun:
            check.is_said_to_wait = False
        return [check.job for check in begun]

    def forget(self, job: Job) -> None:
        self._started.pop(job.id, None)

    def finished(self) -> list[Job]:
        """Jobs whose check has ended since the last call."""
        done = [
            check
            for check in self._started.values()
            if check.future.done() and not check.is_reported
        ]
        for check in done:
            check.is_reported = True
        return [check.job for check in done]

    def under_way(self) -> list[Job]:
        """Jobs whose check runs now."""
        return [work.job for work in self._lanes.under_way() if isinstance(work, _RunningCheck)]

    def demote_slow(self) -> None:
        """Move checks that take too long out of the short lane. Call it often."""
        self._lanes.demote_slow()

    def drop(self, job: Job) -> None:
        """End a check whose result is no longer needed."""
        check = self._started.pop(job.id, None)
        if check is not None:
            self._lanes.drop(check)

    def close(self) -> None:
        """End all checks; no more begin."""
        self._lanes.close()


class _RunningCheck:
    """A check as work of a lane."""

    def __init__(self, job: Job, check: Check) -> None:
        self.job = job
        self.future: Future[Checked] = Future()
        self.is_reported = self.is_said_to_wait = False
        self.progress: str | None = None
        """Progress not yet read by `news`."""
        self._check = check
        self.project = job.project_id
        self.bytes, self.is_long = _size(job)

    def run(self, examiner: Examiner) -> None:
        """Do the check. Raises ExaminerLost if the process was stopped on purpose; it may be run
        again.
        """
        try:
            answer = self._answer(examiner)
        except ExaminerLost:
            raise
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(answer)

    def _answer(self, examiner: Examiner) -> Checked:
        """The result of the check; if its process ended MAX_TRIES times without an answer, the job
        waits or fails.
        """
        for tries in range(1, MAX_TRIES + 1):
            try:
                return self._check(self.job, examiner, self._report)
            except ExaminerLost as error:
                if examiner.is_closed:
                    raise
                if tries == MAX_TRIES:
                    message = (
                        f"The data could not be checked. {error.message} It was tried "
                        f"{MAX_TRIES} times."
                    )
                    return (
                        Checked(waits=message)
                        if error.is_lost
                        else Checked(ErrorInfo(code=error.code, message=message))
                    )
        raise AssertionError("the last try returns")

    def _report(self, sentence: str) -> None:
        self.progress = sentence


def _size(job: Job) -> tuple[int, bool]:
    """Bytes of a job's files, and whether its check will certainly take long: a file is large or
    not on this host yet, or an adapter must be made.
    """
    spec = job.spec
    paths = [Path(data.path) for _, data in data_files(spec)]
    try:
        sizes = [path.stat().st_size for path in paths]
    except OSError:
        return LARGE_BYTES, True
    has_adapter = spec.parent is None or Path(spec.parent.path).is_dir()
    return sum(sizes), max(sizes, default=0) > LARGE_BYTES or not has_adapter
