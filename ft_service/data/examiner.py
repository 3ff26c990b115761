"""The process beside this one that reads data files and counts their tokens (ft_service/data/tokens/examine.py).

It has imported what tokenizers need, which takes a second, and is kept for the next file. Reading in a process of its own keeps
a large file from holding up this process's threads, and can be ended at any moment.

Where a chat template or a tokenizer loops, or grows without bound, the process is killed, or dies. Its last task tells whose
fault that is: that of the lines that it was reading, or the base's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ft_service.data.data_file import (
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
from ft_service.data.samples import SamplePage, ShownSample
from ft_service.data.statistics import Measure, Statistics
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokenizer_files import tokenizer_state
from ft_service.data.whereabouts import Doing, Task, Whereabouts
from ft_service.errors import DataError, SpecError, UnavailableError
from ft_service.host.environment import child_environment
from ft_service.host.hardware import memory_bytes
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import DataFileRef, JobSpec

COMMAND = (sys.executable, "-P", "-m", "ft_service.data.tokens.examine")
KNOWN_REPORTS = 1000
STUCK_SECONDS = 120.0
"""That loading a tokenizer, rendering a sample or tokenising a chunk of them may take before the process is killed. Rendering
that takes long is mostly ended before, by the process itself (RENDER_SECONDS)."""
WATCH_SECONDS = 0.5
"""How often it is looked whether the process is stuck."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Ends that come from within: what was read then is at fault, and would be again."""
_OUT_OF_MEMORY = ("MemoryError", "memory allocation of")
"""Last words of a process that was refused memory: Python's and Rust's."""
_LAST_WORDS = 2000
_OF_DATA = ("training_file", "validation_file", "validation_split")
"""Parameters that a file's contents are at fault of."""


Tell = Callable[[str], object]
"""Is given a sentence for the job's user."""


class ExaminerLost(UnavailableError):
    """The process has ended without an answer: it crashed, or was stopped."""

    code = "data_check_failed"

    def __init__(self, why: str) -> None:
        often = ""
        if "ImportError" in why or "ModuleNotFoundError" in why:
            often = " Install what is missing: pip install 'ft-service[api]'."
        elif "signal" in why:
            often = " Often the host ran out of memory."
        super().__init__(f"The process that reads data files ended without an answer: {why}.{often}")


class _AtFault(Exception):
    """The process ended for a reason that will not go away: its last task, and why that is at fault."""

    def __init__(self, doing: Sequence[Doing], why: str) -> None:
        super().__init__(why)
        self.doing = doing
        self.why = why

    def report(self) -> DataReport:
        """A report that faults the lines being read. Raises SpecError if the base is at fault."""
        if any(doing.task is Task.LOADING for doing in self.doing):
            raise SpecError(f"The base's tokenizer cannot be loaded: that {self.why}.", param="model")
        first, last = (
            min((doing.first for doing in self.doing), default=0),
            max((doing.last for doing in self.doing), default=0),
        )
        fault = Fault(first, "", f"{_named(self.doing)} {self.why}", last_line=last, over_limit=True)
        return DataReport(0, [fault], 1, unread=True)


def _named(doing: Sequence[Doing]) -> str:
    names = {Task.LOADING: "tokenizer", Task.RENDERING: "chat template", Task.ENCODING: "tokenizer"}
    return f"the base's {' or '.join(names[each.task] for each in doing)}" if doing else "reading it"


class Known:
    """Earlier reports, so that repeats and sweeps over the same file cost nothing. For any thread."""

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
    """At most one process at a time. `stop` may be called from any thread, everything else belongs to one.

    The process ends with the thread that started it, however that ends.
    """

    def __init__(
        self,
        known: Known | None = None,
        *,
        tokens: Path | None = None,
        command: Sequence[str] = COMMAND,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`known`: shared with other examiners. `tokens`: the folder in which the tokens of faultless files are kept, for the
        ranks; None: they are not. `command`: that starts the process."""
        self._known = known or Known()
        self._tokens = tokens
        self._command = command
        self._stuck_seconds = stuck_seconds
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: IO[bytes] | None = None
        self._whereabouts: Whereabouts | None = None
        self._heard = b""
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process's id. None: no process was started."""
        return self._process.pid if self._process else None

    @property
    def is_closed(self) -> bool:
        """Whether it was stopped for good."""
        return self._closed

    @property
    def is_starting(self) -> bool:
        """Whether the process is still importing what it needs."""
        whereabouts = self._whereabouts
        return whereabouts is not None and not whereabouts.is_ready

    def start(self) -> None:
        """Start the process if there is none. Raises ExaminerLost if it was stopped for good."""
        with self._guard:
            if self._closed:
                raise ExaminerLost("it was stopped")
            if self._process is None or self._process.poll() is not None:
                self._forget()
                self._last_words = tempfile.TemporaryFile()  # noqa: SIM115 - it is the process's
                with tempfile.TemporaryFile() as shared:
                    self._whereabouts = Whereabouts.create(shared.fileno())
                    self._process = self._popen(shared.fileno(), self._last_words)

    def _popen(self, shared: int, last_words: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, str(os.getpid()), str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=last_words,
            pass_fds=(shared,),
            env=child_environment(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"),
            start_new_session=True,  # a terminal's Ctrl-C is for us
        )

    def examine_file(self, param: Param, data: DataFileRef, path: Path, spec: JobSpec, tell: Tell) -> DataReport | ErrorInfo:
        """The report on a job's file, at `path` on this host, for its base; or why none can train on it. Raises ExaminerLost.

        `tell`: called with the progress if reading takes long.
        """
        try:
            for name in data.files or ("",):
                (path / name).stat()
        except OSError as error:
            return unreadable(param, data, error)
        options, pairs = TokenOptions.of(spec), spec.dpo is not None
        request = self.request(data, path, spec.model.path, spec.training.max_length, options, pairs=pairs)
        try:
            report = self.examine(request, lambda progress: tell(progress.message(param)))
        except SpecError as error:
            return ErrorInfo(code=error.code, message=error.message, param=error.param)
        return report.error(param, data.name) or report

    def request(
        self, data: DataFileRef, path: Path, model_path: str, max_length: int, options: TokenOptions, *, pairs: bool = False
    ) -> ExamineRequest:
        """A request for a file that lies at `path` on this host. `pairs`: it holds pairs of answers."""
        return ExamineRequest(
            *(str(path), data.sha256, model_path, tokenizer_state(model_path), max_length),
            render_seconds=RENDER_SECONDS,
            memory_bytes=min(MEMORY_BYTES, memory_bytes() // 2),
            pairs=pairs,
            tokens=str(self._tokens or ""),
            files=data.files,
            options=options,
        )

    def examine(self, request: ExamineRequest, note: Callable[[ReadProgress], object] = lambda _: None) -> DataReport:
        """The report on a file; blocks until it is read. `note`: called with the progress if that takes long.

        Raises SpecError if the base's tokenizer cannot be used, ExaminerLost.
        """
        if (known := self._known.get(request)) is not None:
            return known
        try:
            report = self._answered(request, note).report
        except _AtFault as error:
            return error.report()
        assert report is not None, "it was asked for"
        self._known.put(request, report)
        return report

    def measure_job(self, spec: JobSpec, paths: Mapping[str, Path] | None = None) -> Statistics | ErrorInfo:
        """The statistics of a job's files, which were examined before; or why they cannot be trained on. `paths`: where they
        lie on this host, by their path in the spec; None: there. Raises ExaminerLost.
        """
        where = paths or {}
        training, validation = (
            file and file.model_copy(update={"path": str(where.get(file.path, file.path))})
            for file in (spec.training_data, spec.validation_data)
        )
        assert training is not None, "every job has one"
        asked = replace(Measure.of(spec), training_file=training, validation_file=validation)
        of = (spec.model.path, spec.training.max_length, TokenOptions.of(spec))
        request = self.request(training, Path(training.path), *of, pairs=spec.dpo is not None)
        try:
            return self.measure(replace(request, measure=asked))
        except (SpecError, DataError) as error:
            return ErrorInfo(code=error.code, message=error.message, param=error.param)

    def measure(self, request: ExamineRequest) -> Statistics:
        """The statistics that a request asks for (`measure`). Raises SpecError if the base's tokenizer cannot be used,
        DataError for data that cannot be trained on, ExaminerLost.
        """
        assert request.measure is not None
        try:
            found = self._answered(request, lambda _: None).statistics
        except _AtFault as error:
            raise DataError(error.report().faults[0].reason, param="training_file") from None
        assert found is not None, "it was asked for"
        return found

    def show(self, request: ExamineRequest) -> SamplePage:
        """The samples that a request asks for (`show`). Raises SpecError if the base's tokenizer cannot be used, OSError if the
        file cannot be read, ExaminerLost.
        """
        assert request.show is not None
        try:
            page = self._answered(request, lambda _: None).page
        except _AtFault as error:
            fault = error.report().faults[0]
            return SamplePage((ShownSample(fault.line, error=fault.reason),), False, "line", "")
        assert page is not None, "it was asked for"
        return page

    def _answered(self, request: ExamineRequest, note: Callable[[ReadProgress], object]) -> ExamineReply:
        """The answer to a request. Raises _AtFault, SpecError, ExaminerLost."""
        self.start()
        self._ask(request)
        while (answer := self._answer(request)).progress is not None:
            note(answer.progress)
        if answer.error is not None:
            kind = DataError if answer.error.param in _OF_DATA else SpecError
            raise kind(answer.error.message, param=answer.error.param, code=answer.error.code)
        return answer

    def stop(self, *, for_good: bool = False) -> None:
        """Kill the process: an examination in progress raises ExaminerLost. The next file gets a new process, unless
        `for_good`.
        """
        with self._guard:
            self._closed = self._closed or for_good
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Kill the process for good, and release its pipes and files."""
        self.stop(for_good=True)
        self._forget()

    def _ask(self, request: ExamineRequest) -> None:
        """Send a request. A process that does not read it is noticed by `_answer`."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(REQUEST.dump_json(request) + b"\n")
            self._process.stdin.flush()

    def _answer(self, request: ExamineRequest) -> ExamineReply:
        process, whereabouts = self._process, self._whereabouts
        assert process is not None
        assert process.stdout is not None
        assert whereabouts is not None
        readable = select.poll()
        readable.register(process.stdout, select.POLLIN)
        while b"\n" not in self._heard:
            if not readable.poll(WATCH_SECONDS * 1000):
                self._end_if_stuck(whereabouts)
            elif heard := os.read(process.stdout.fileno(), 2**16):
                self._heard += heard
            else:
                raise self._why_ended(process.wait(), whereabouts.doing(), request)
        line, _, self._heard = self._heard.partition(b"\n")
        return REPLY.validate_json(line)

    def _end_if_stuck(self, whereabouts: Whereabouts) -> None:
        """Kill the process if it has been at one task for too long, and raise that task's fault."""
        stuck = [doing for doing in whereabouts.doing() if doing.seconds > self._stuck_seconds]
        if stuck:
            self.stop()
            raise _AtFault(stuck, f"took longer than {self._stuck_seconds:g} seconds")

    def _why_ended(self, code: int, doing: Sequence[Doing], request: ExamineRequest) -> Exception:
        """The error for a process that ended. `code`: exit code, or the negative number of a signal. `doing`: its last task."""
        said = self._said()
        if any(line.startswith(_OUT_OF_MEMORY) for line in said):
            return _AtFault(doing, f"needed more than {request.memory_bytes // 2**20:,} MiB of memory")
        if doing and -code in CRASHES:
            return _AtFault(doing, f"crashed the process that reads data files (signal {-code})")
        return ExaminerLost(f"killed by signal {-code}" if code < 0 else said[-1] if said else f"exit code {code}")

    def _said(self) -> list[str]:
        """The last lines that the process wrote."""
        assert self._last_words is not None
        end = self._last_words.seek(0, os.SEEK_END)
        self._last_words.seek(max(0, end - _LAST_WORDS))
        return self._last_words.read().decode(errors="replace").strip().splitlines()

    def _forget(self) -> None:
        self._heard = b""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout, self._last_words):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def data_files(spec: JobSpec) -> list[tuple[Param, DataFileRef]]:
    """A job's data files, by parameter."""
    training: list[tuple[Param, DataFileRef]] = [("training_file", spec.training_data)]
    return training if spec.validation_data is None else [*training, ("validation_file", spec.validation_data)]


def unreadable(param: Param, data: DataFileRef, error: OSError) -> ErrorInfo:
    return ErrorInfo(code=f"invalid_{param}", message=f"{data.name} cannot be read: {error.strerror}.", param=param)


def _key(request: ExamineRequest) -> Hashable:
    return request.sha256, request.tokenizer, request.max_length, request.options, request.pairs
