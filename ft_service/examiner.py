"""The process beside this one that reads data files and counts their tokens (ft_service/tokens/examine.py).

It has imported what tokenizers need, which takes a second, and is kept for the next file. Reading in a process of its own keeps
a large file from holding up this process's threads, and can be ended at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ft_service.dataset import ANSWER, REQUEST, Answer, DataReport, Param, Progress, Request
from ft_service.errors import SpecError, UnavailableError
from ft_service.processes import without_secrets
from ft_service.rundir import ErrorInfo
from ft_service.spec import DataFileRef, JobSpec

COMMAND = (sys.executable, "-P", "-m", "ft_service.tokens.examine")
KNOWN_REPORTS = 1000
TOKENIZER_FILES = (
    *("tokenizer*", "chat_template*", "*.jinja", "*.model", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "config.json"),
)
"""What of a base folder decides how text becomes tokens."""
_LAST_WORDS = 2000


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


class Known:
    """Reports that were made before, so that repeats and sweeps over the same file cost nothing. For any thread."""

    def __init__(self, limit: int = KNOWN_REPORTS) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._reports: OrderedDict[tuple[str, str, int], DataReport] = OrderedDict()

    def get(self, request: Request) -> DataReport | None:
        with self._guard:
            return self._reports.get(_key(request))

    def put(self, request: Request, report: DataReport) -> None:
        with self._guard:
            self._reports[_key(request)] = report
            if len(self._reports) > self._limit:
                self._reports.popitem(last=False)


class Examiner:
    """At most one process at a time. `stop` may be called from any thread, everything else belongs to one.

    The process ends with the thread that started it, however that ends.
    """

    def __init__(self, known: Known | None = None, *, command: Sequence[str] = COMMAND) -> None:
        """`known`: shared with others. `command`: of the process."""
        self._known = known or Known()
        self._command = command
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: IO[bytes] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process; None: there never was one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Have the process there, or on its way. Raises ExaminerLost if it was stopped for good."""
        with self._guard:
            if self._closed:
                raise ExaminerLost("it was stopped")
            if self._process is None or self._process.poll() is not None:
                self._forget()
                self._last_words = tempfile.TemporaryFile()  # noqa: SIM115 - it is the process's
                self._process = subprocess.Popen(
                    [*self._command, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._last_words,
                    env={**without_secrets(os.environ), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                    start_new_session=True,  # a terminal's Ctrl-C is for us
                )

    def examine_file(self, param: Param, data: DataFileRef, path: Path, spec: JobSpec, tell: Tell) -> DataReport | ErrorInfo:
        """What a job's file, at `path` on this host, holds for its base; or why none can train on it. Raises ExaminerLost.

        `tell`: how far it has been read, if that takes long.
        """
        try:
            path.stat()
        except OSError as error:
            return unreadable(param, data, error)
        tokenizer = tokenizer_digest(spec.model.path)
        request = Request(str(path), data.sha256, spec.model.path, tokenizer, spec.training.max_length)
        try:
            report = self.examine(request, lambda progress: tell(progress.message(param)))
        except SpecError as error:
            return ErrorInfo(code=error.code, message=error.message, param=error.param)
        return report.error(param, data.name) or report

    def examine(self, request: Request, note: Callable[[Progress], object] = lambda _: None) -> DataReport:
        """Blocks for as long as the file takes. `note`: how far it has been read, if that takes long.

        Raises SpecError if the base's tokenizer cannot be used, ExaminerLost.
        """
        if (known := self._known.get(request)) is not None:
            return known
        self.start()
        self._ask(request)
        while (answer := self._answer()).progress is not None:
            note(answer.progress)
        if answer.error is not None:
            raise SpecError(answer.error.message, param=answer.error.param, code=answer.error.code)
        assert answer.report is not None, "one of the two"
        self._known.put(request, answer.report)
        return answer.report

    def stop(self, *, for_good: bool = False) -> None:
        """Kill the process: what it examines now raises ExaminerLost. The next file gets a new one, unless `for_good`."""
        with self._guard:
            self._closed = self._closed or for_good
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Kill it for good, and let go of what led to it."""
        self.stop(for_good=True)
        self._forget()

    def _ask(self, request: Request) -> None:
        """That nobody reads it is for `_answer` to find out."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(REQUEST.dump_json(request) + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Answer:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            code = process.wait()
            raise ExaminerLost(f"killed by signal {-code}" if code < 0 else self._said() or f"exit code {code}")
        return ANSWER.validate_json(line)

    def _said(self) -> str:
        """The last line that the process has written."""
        assert self._last_words is not None
        end = self._last_words.seek(0, os.SEEK_END)
        self._last_words.seek(max(0, end - _LAST_WORDS))
        lines = self._last_words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _forget(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout, self._last_words):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def data_files(spec: JobSpec) -> list[tuple[Param, DataFileRef]]:
    """Those that a job has."""
    training: list[tuple[Param, DataFileRef]] = [("training_file", spec.training_data)]
    return training if spec.validation_data is None else [*training, ("validation_file", spec.validation_data)]


def unreadable(param: Param, data: DataFileRef, error: OSError) -> ErrorInfo:
    return ErrorInfo(code=f"invalid_{param}", message=f"{data.name} cannot be read: {error.strerror}.", param=param)


def tokenizer_digest(model_path: str) -> str:
    """Of the state of a base's tokenizer files: changes when one of them does."""
    folder = Path(model_path)
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    states = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in sorted(paths) if path.is_file()]
    return hashlib.sha256(repr((str(folder), states)).encode()).hexdigest()


def _key(request: Request) -> tuple[str, str, int]:
    return request.sha256, request.tokenizer, request.max_length
