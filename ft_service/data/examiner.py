"""The helper process that reads data files and counts their tokens
(ft_service/data/tokens/examine.py), seen from outside.

The process imports the tokenizers' packages, which takes a second, and then serves one file after
another. Reading in a process of its own keeps a large file from blocking this process's threads,
and can be stopped at any time. If a chat template or a tokenizer takes too much processor time or
memory, the process is killed or dies; its last task shows what is at fault: the lines that it was
reading, or the base. A process that the host kills or gives no time says nothing of either.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ft_service.data.current_task import CurrentTask, RunningTask, Task
from ft_service.data.data_file import (
    CHECK_BYTES_PER_SECOND,
    CHECK_SECONDS,
    MEMORY_BYTES,
    RENDER_SECONDS,
    REPLY,
    REQUEST,
    DataReport,
    ExamineReply,
    ExamineRequest,
    Param,
    ReadProgress,
)
from ft_service.data.line_errors import Fault
from ft_service.data.sample_request import SamplePage, ShownSample
from ft_service.data.statistics import DataStatistics, Measure
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokenizer_files import tokenizer_state
from ft_service.data.tokens.image_fetch import ALLOW_PRIVATE
from ft_service.errors import DataError, SpecError, UnavailableError
from ft_service.host.hardware import memory_bytes
from ft_service.host.helper_process import (
    LATER_SECONDS,
    HelperFailed,
    HelperProcess,
    Program,
    ran_out_of_memory,
)
from ft_service.host.processes import CRASHES
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import DataFileRef, JobSpec

COMMAND = (sys.executable, "-P", "-m", "ft_service.data.tokens.examine")
KNOWN_REPORTS = 1000
STUCK_SECONDS = 300.0
"""Processor time for loading a tokenizer, rendering a sample or tokenising a chunk of samples,
after which the process is killed. Most slow rendering is interrupted earlier, by the process itself
(RENDER_SECONDS).
"""
LOST_SECONDS = 3600.0
"""Time for the same, after which the host is said to have had no processor for it."""
WATCH_SECONDS = 0.5
"""Interval between checks whether the process is stuck."""
_DATA_PARAMS = ("training_file", "validation_file", "validation_split")
"""Parameters whose errors are errors of the data."""
_PARTS = {Task.LOADING: "tokenizer", Task.RENDERING: "chat template", Task.ENCODING: "tokenizer"}
"""Task → the part of a base that works on it."""

Tell = Callable[[str], object]
"""A function that receives a sentence for the job's user."""


class ExaminerLost(UnavailableError):
    """The process ended without a reply: it crashed, or was stopped."""

    code = "data_check_failed"

    def __init__(self, reason: str, *, is_lost: bool = True) -> None:
        """`is_lost`: whether the host ended it, or its owner; False: it ended by itself."""
        hint = ""
        if "ImportError" in reason or "ModuleNotFoundError" in reason:
            hint = " Install what is missing: pip install 'ft-service[api]'."
        elif "signal" in reason:
            hint = " Often the host ran out of memory."
        super().__init__(
            f"The process that reads data files ended without an answer: {reason}.{hint}",
            retry_after=LATER_SECONDS,
        )
        self.is_lost = is_lost


class TakesTooLongError(SpecError):
    """A file takes more processor time than its request allows."""

    code = "takes_too_long"


class _FileAtFault(Exception):
    """The process ended for a reason that will not go away."""

    def __init__(self, tasks: Sequence[RunningTask], reason: str) -> None:
        """`tasks`: those that the process had not finished."""
        super().__init__(reason)
        self.tasks = tasks
        self.reason = reason

    def report(self) -> DataReport:
        """A report with a fault of the lines that were being read.

        Raises SpecError if the base is at fault.
        """
        if any(running.task is Task.LOADING for running in self.tasks):
            raise SpecError(
                f"The base's tokenizer cannot be loaded: that {self.reason}.", param="model"
            )
        first = min((running.first for running in self.tasks), default=0)
        last = max((running.last for running in self.tasks), default=0)
        names = " or ".join(_PARTS[running.task] for running in self.tasks)
        subject = f"the base's {names}" if names else "reading it"
        fault = Fault(first, "", f"{subject} {self.reason}", last_line=last, over_limit=True)
        return DataReport(0, [fault], 1, unread=True)


class ReportCache:
    """Earlier reports, so that a file is not read again for each job of a sweep. Thread-safe."""

    def __init__(self, limit: int = KNOWN_REPORTS) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._reports: OrderedDict[Hashable, DataReport] = OrderedDict()

    def get(self, request: ExamineRequest) -> DataReport | None:
        with self._guard:
            return self._reports.get(_key(request))

    def put(self, request: ExamineRequest, report: DataReport) -> None:
        if not report.is_lasting:
            return
        with self._guard:
            self._reports[_key(request)] = report
            if len(self._reports) > self._limit:
                self._reports.popitem(last=False)


class Examiner:
    """Runs at most one helper process at a time.

    `stop` may be called from any thread, all other methods from one thread only.

    The helper process ends with this process, even if this one is killed.
    """

    def __init__(
        self,
        known: ReportCache | None = None,
        *,
        tokens: Path | None = None,
        command: Sequence[str] = COMMAND,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`known`: reports shared with other examiners.  `tokens`: the folder that keeps the
        tokens of files without faults, for the ranks; None: tokens are not kept. `command`: the
        command line of the process, without its last argument.
        """
        self._known = known or ReportCache()
        self._tokens = tokens
        self._command = command
        self._stuck_seconds = stuck_seconds
        self._guard = threading.Lock()
        self._process: HelperProcess | None = None
        self._current_task: CurrentTask | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The id of the process. None: no process was started."""
        return self._process.pid if self._process else None

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the process; 0 if none was started."""
        return self._process.cpu_seconds if self._process else 0.0

    @property
    def is_closed(self) -> bool:
        """True after `close`, and after `stop` for good."""
        return self._closed

    @property
    def is_starting(self) -> bool:
        """True while the process is importing its modules."""
        current_task = self._current_task
        return current_task is not None and not current_task.is_ready

    def start(self) -> None:
        """Start the process if it is not running. Raises ExaminerLost after a stop for good."""
        with self._guard:
            if self._closed:
                raise ExaminerLost("it was stopped")
            if self._process is None or self._process.exit_code is not None:
                self._forget()
                with tempfile.TemporaryFile() as shared:
                    self._current_task = CurrentTask.create(shared.fileno())
                    program = Program(
                        command=(*self._command, str(shared.fileno())),
                        expendable=True,
                        needs=(ALLOW_PRIVATE,),
                        variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                        descriptors=(shared.fileno(),),
                    )
                    self._process = HelperProcess(program)

    def examine_file(
        self, param: Param, data: DataFileRef, path: Path, spec: JobSpec, tell: Tell
    ) -> DataReport | ErrorInfo:
        """The report on a job's file for its base, or the error that prevents training on it.

        Raises ExaminerLost.

        `path`: the file's path on this host. `tell`: called with progress messages if reading takes
        long.
        """
        try:
            for name in data.files or ("",):
                (path / name).stat()
        except OSError as error:
            return unreadable(param, data, error)
        options = TokenOptions.of(spec)
        pairs = spec.in_pairs
        request = self.request(
            data, path, spec.model.path, spec.longest_sample, options, pairs=pairs
        )
        try:
            report = self.examine(request, lambda progress: tell(progress.message(param)))
        except SpecError as error:
            return ErrorInfo(code=error.code, message=error.message, param=error.param)
        return report.error(param, data.name) or report

    def request(
        self,
        data: DataFileRef,
        path: Path,
        model_path: str,
        max_length: int,
        options: TokenOptions,
        *,
        pairs: bool = False,
    ) -> ExamineRequest:
        """A request for a file.

        `path`: the file's path on this host; `pairs`: it holds pairs of answers.
        """
        return ExamineRequest(
            *(str(path), data.sha256, model_path, tokenizer_state(model_path), max_length),
            render_seconds=RENDER_SECONDS,
            memory_bytes=min(MEMORY_BYTES, memory_bytes() // 2),
            pairs=pairs,
            tokens=str(self._tokens or ""),
            files=data.files,
            options=options,
            cpu_seconds=check_seconds(path, data),
        )

    def examine(
        self, request: ExamineRequest, note: Callable[[ReadProgress], object] = lambda _: None
    ) -> DataReport:
        """The report on a file; blocks until the file is read.

        `note`: called with the progress if that takes long.

        Raises SpecError if the base's tokenizer cannot be used, ExaminerLost.
        """
        if (known := self._known.get(request)) is not None:
            return known
        try:
            report = self._reply(request, note).report
        except _FileAtFault as error:
            return error.report()
        except TakesTooLongError as error:
            return DataReport(0, [Fault(0, "", error.message, over_limit=True)], 1, unread=True)
        assert report is not None, "the request asks for it"
        self._known.put(request, report)
        return report

    def measure_job(
        self,
        spec: JobSpec,
        paths: Mapping[str, Path] | None = None,
        one_rank: int | None = None,
    ) -> DataStatistics | ErrorInfo:
        """The statistics of a job's files, which were examined before; or the error that prevents
        training on them. `paths`: path in the spec → path on this host; None: they are the same.
        `one_rank`: as of `Measure`. Raises ExaminerLost.
        """
        here = paths or {}
        training, validation = (
            file and file.model_copy(update={"path": str(here.get(file.path, file.path))})
            for file in (spec.training_data, spec.validation_data)
        )
        assert training is not None, "the job has a training file"
        path = Path(training.path)
        max_length = spec.longest_sample
        options = TokenOptions.of(spec)
        request = self.request(
            training, path, spec.model.path, max_length, options, pairs=spec.in_pairs
        )
        asked = Measure.of(spec, one_rank)
        measure = replace(asked, training_file=training, validation_file=validation)
        if validation is not None:
            seconds = request.cpu_seconds + check_seconds(Path(validation.path), validation)
            request = replace(request, cpu_seconds=seconds)
        try:
            return self.measure(replace(request, measure=measure))
        except (SpecError, DataError) as error:
            return ErrorInfo(code=error.code, message=error.message, param=error.param)

    def measure(self, request: ExamineRequest) -> DataStatistics:
        """The statistics that a request asks for (`measure`).

        Raises SpecError if the base's tokenizer cannot be used, DataError for data that cannot be
        trained on, ExaminerLost.
        """
        try:
            statistics = self._reply(request).statistics
        except _FileAtFault as error:
            raise DataError(error.report().faults[0].reason, param="training_file") from None
        assert statistics is not None, "the request asks for them"
        return statistics

    def show(self, request: ExamineRequest) -> SamplePage:
        """The samples that a request asks for (`show`).

        Raises SpecError if the base's tokenizer cannot be used, OSError if the file cannot be read,
        ExaminerLost.
        """
        try:
            page = self._reply(request).page
        except _FileAtFault as error:
            fault = error.report().faults[0]
            return SamplePage((ShownSample(fault.line, error=fault.reason),), False, "line", "")
        assert page is not None, "the request asks for it"
        return page

    def _reply(
        self, request: ExamineRequest, note: Callable[[ReadProgress], object] = lambda _: None
    ) -> ExamineReply:
        """The last reply to a request. Raises _FileAtFault, SpecError, DataError, ExaminerLost."""
        self.start()
        assert self._process is not None
        begun = self._process.cpu_seconds
        self._process.send(REQUEST.dump_json(request))
        while (reply := self._next_reply(self._process, request, begun)).progress is not None:
            note(reply.progress)
        if reply.error is not None:
            kind = DataError if reply.error.param in _DATA_PARAMS else SpecError
            raise kind(reply.error.message, param=reply.error.param, code=reply.error.code)
        return reply

    def stop(self, *, for_good: bool = False) -> None:
        """Kill the process: an examination in progress raises ExaminerLost.

        The next file gets a new process, unless `for_good`.
        """
        with self._guard:
            self._closed = self._closed or for_good
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Kill the process for good, and release its pipes and files."""
        self.stop(for_good=True)
        self._forget()

    def _next_reply(
        self, process: HelperProcess, request: ExamineRequest, begun: float
    ) -> ExamineReply:
        """The next reply; a stuck process is killed.

        `begun`: its processor time when it got the request. Raises _FileAtFault, TakesTooLongError,
        ExaminerLost.
        """
        current_task = self._current_task
        assert current_task is not None
        try:
            while (line := process.receive(WATCH_SECONDS)) is None:
                running = current_task.running()
                spent = process.cpu_seconds
                if stuck := [
                    task for task in running if spent - task.cpu_begun > self._stuck_seconds
                ]:
                    self.stop()
                    raise _FileAtFault(
                        stuck, f"took longer than {self._stuck_seconds:g} seconds of a processor"
                    )
                if spent - begun > request.cpu_seconds:
                    self.stop()
                    raise _takes_too_long(request)
                if any(task.seconds > LOST_SECONDS for task in running):
                    self.stop()
                    raise ExaminerLost(
                        f"the host had no processor for it in {LOST_SECONDS:g} seconds"
                    )
        except HelperFailed as error:
            tasks = current_task.running()
            raise _error_of(error, tasks, request, is_ready=current_task.is_ready) from None
        return REPLY.validate_json(line)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def check_seconds(path: Path, data: DataFileRef) -> float:
    """Processor time in which the examination of a file must end, in seconds.

    `path`: the file's path on this host.
    """
    try:
        size = sum((path / name).stat().st_size for name in data.files or ("",))
    except OSError:  # which the examination reports
        size = 0
    return CHECK_SECONDS + size / CHECK_BYTES_PER_SECOND


def _takes_too_long(request: ExamineRequest) -> TakesTooLongError:
    text = (
        f"reading, rendering and tokenising it takes more than {request.cpu_seconds:,.0f} seconds "
        "of a processor, the limit "
        "for its size: use a chat template that does less, or give fewer or shorter lines"
    )
    return TakesTooLongError(text, param="training_file")


def _error_of(
    ended: HelperFailed, tasks: Sequence[RunningTask], request: ExamineRequest, *, is_ready: bool
) -> Exception:
    """The error for a process that ended.

    `tasks`: those that it had not finished; `is_ready`: whether it had begun any.
    """
    code = ended.exit_code or 0
    output = ended.last_words
    if is_ready and ran_out_of_memory(output):
        return _FileAtFault(
            tasks, f"needed more than {request.memory_bytes // 2**20:,} MiB of memory"
        )
    if tasks and -code in CRASHES:
        return _FileAtFault(tasks, f"crashed the process that reads data files (signal {-code})")
    reason = (
        f"killed by signal {-code}" if code < 0 else output[-1] if output else f"exit code {code}"
    )
    return ExaminerLost(reason, is_lost=ended.is_lost)


def data_files(spec: JobSpec) -> list[tuple[Param, DataFileRef]]:
    """A job's data files, by parameter."""
    params: tuple[Param, Param] = ("training_file", "validation_file")
    return list(zip(params, spec.data_files, strict=False))


def unreadable(param: Param, data: DataFileRef, error: OSError) -> ErrorInfo:
    """The job's error for a file that cannot be read."""
    return ErrorInfo(
        code=f"invalid_{param}",
        message=f"{data.name} cannot be read: {error.strerror}.",
        param=param,
    )


def _key(request: ExamineRequest) -> Hashable:
    return request.sha256, request.tokenizer, request.max_length, request.options, request.pairs
