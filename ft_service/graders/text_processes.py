"""Processes that carry out tasks on tenants' texts (text_program.py): a few, which stay for a while
and die first when memory runs out.

Comparing two texts takes up to seconds, in C code that lets no other thread of its process run. So
nothing of it is done in the service. Projects take turns of about a second of a processor. A task
beyond a limit is an error of its case alone; a process that the host kills is replaced, and its
task is tried again.
"""

from __future__ import annotations

import marshal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ft_service.errors import UnavailableError
from ft_service.graders.grades import Case, GradingError
from ft_service.graders.text_program import CPU_SECONDS, MEMORY_BYTES
from ft_service.graders.text_tasks import Task
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program
from ft_service.shared_work.losses import Losses
from ft_service.shared_work.places import Kind, Places

PROGRAM = Program(
    command=(sys.executable, "-P", "-m", "ft_service.graders.text_program"),
    memory_bytes=MEMORY_BYTES,
    niceness=5,
    expendable=True,
)
TEXTS = Kind(
    name="grading texts", places=2, of_project=1, seconds=60.0, busy="Texts are being graded"
)
"""A place has a process of about 30 MB."""
BATCH_BYTES = 1024**2
"""Bytes of tasks that are written at once; a single one may have more."""
WALL_SECONDS = 300.0
"""Time for one task on a busy host, after which its process is killed."""
IDLE_SECONDS = 60.0
"""Time after which a process without work ends."""
TRIES = 3
"""Tries of a task whose process the host has ended, before the caller hears that it must wait."""

Work = tuple[Task, Case]


class TextsLost(UnavailableError):
    """The host has ended a process that grades texts, or has not let it start."""


@dataclass(frozen=True)
class TaskResult:
    """What came of a task."""

    value: Any = None
    error: GradingError | None = None
    seconds: float = 0.0
    """Time of a processor."""


class TextProcesses:
    """The processes of a service. Thread-safe."""

    def __init__(self, kind: Kind = TEXTS) -> None:
        self.places = Places(kind)
        self.losses = Losses("The grading of a project's texts")
        self._guard = threading.Lock()
        self._idle: list[tuple[float, HelperProcess]] = []
        """When each began to be idle."""
        self._timer: threading.Timer | None = None

    def carry_out(self, project: str, work: Sequence[Work]) -> list[TaskResult]:
        """Return the result of each task.

        Blocks. Raises UnavailableError if the project's turn does not come in time, or the host has
        ended the process of a task TRIES times.
        """
        results: dict[int, TaskResult] = {}
        tries = 0
        while left := [number for number in range(len(work)) if number not in results]:
            try:
                self._take_turn(project, work, left, results)
                tries = 0
            except TextsLost as lost:
                tries = tries + 1 if left[0] not in results else 1
                if tries == TRIES:
                    pause = self.losses.add(project, lost.message)
                    raise UnavailableError(
                        f"Texts cannot be graded: {lost.message}.", retry_after=int(pause)
                    ) from None
        self.losses.forget(project)
        return [results[number] for number in range(len(work))]

    def close(self) -> None:
        """End the processes that have no work."""
        self._end_idle(0.0)

    def _take_turn(
        self,
        project: str,
        work: Sequence[Work],
        left: Sequence[int],
        results: dict[int, TaskResult],
    ) -> None:
        """Carry out tasks until a turn is over.

        `left`: numbers of the tasks. Raises UnavailableError.
        """
        with self.places.hold(project) as place:
            message, sent = _batch(work, left, results)
            place.cost = 0.0
            try:
                with self._process() as process:
                    process.send(message)
                    for number in sent:
                        try:
                            reply = _reply(process)
                        except HelperFailed as error:
                            if error.is_lost:
                                raise TextsLost(error.message) from None
                            results[number] = TaskResult(error=_fault(error), seconds=CPU_SECONDS)
                            break
                        if reply is not None:
                            results[number] = _result(*reply)
            finally:
                place.cost = sum(results[number].seconds for number in left if number in results)
                self.places.charge(project, place.cost)

    @contextmanager
    def _process(self) -> Iterator[HelperProcess]:
        """Give a process, which is kept unless it has ended or the block is left early.

        Raises TextsLost.
        """
        process = self._idle_one() or _started()
        try:
            yield process
        except BaseException:
            process.close()
            raise
        if process.exit_code is not None:
            process.close()
            return
        with self._guard:
            self._idle.append((time.monotonic(), process))
            if self._timer is None:
                self._timer = _later(self._end_idle)

    def _idle_one(self) -> HelperProcess | None:
        while True:
            with self._guard:
                if not self._idle:
                    return None
                _, process = self._idle.pop()
            if process.exit_code is None:
                return process
            process.close()

    def _end_idle(self, seconds: float | None = None) -> None:
        """End the processes that had no work for so long; None: IDLE_SECONDS."""
        before = time.monotonic() - (IDLE_SECONDS if seconds is None else seconds)
        with self._guard:
            ended = [process for since, process in self._idle if since <= before]
            self._idle = [(since, process) for since, process in self._idle if since > before]
            self._timer = _later(self._end_idle) if self._idle else None
        for process in ended:
            process.close()


TEXT_PROCESSES = TextProcesses()
"""Those of this service."""


def _later(work: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(IDLE_SECONDS, work)
    timer.daemon = True
    timer.start()
    return timer


def _started() -> HelperProcess:
    """Return a process that is ready. Raises TextsLost."""
    process = None
    try:
        process = HelperProcess(PROGRAM)
        if process.receive(WALL_SECONDS) is None:
            raise process.took_too_long(WALL_SECONDS)
        return process
    except (HelperFailed, OSError) as error:
        if process is not None:
            process.close()
        raise TextsLost(error.message if isinstance(error, HelperFailed) else str(error)) from None


def _batch(
    work: Sequence[Work], left: Sequence[int], results: dict[int, TaskResult]
) -> tuple[bytes, list[int]]:
    """The first tasks as text_program.py reads them, and their numbers.

    Tasks that cannot be written get their results.
    """
    written = bytearray()
    sent = []
    item = None
    for number in left:
        task, case = work[number]
        own = case.sample
        sample = (
            own.output_text,
            [dict(call) for call in own.output_tools],
            own.finish_reason,
            own.reasoning,
            list(map(dict, own.messages)),
            list(map(dict, own.calls)),
        )
        try:
            first = marshal.dumps((task, sample))
            second = b"" if case.item is item else marshal.dumps(dict(case.item))
        except ValueError:
            why = "a value is nested too deeply, or is none of JSON's"
            results[number] = TaskResult(error=GradingError("sample_parse_error", why))
            continue
        item = case.item
        written += b"%d %d\n" % (len(first), len(second)) + first + second
        sent.append(number)
        if len(written) >= BATCH_BYTES:
            break
    return bytes(written), sent  # `send` adds the newline that ends the batch


def _reply(process: HelperProcess) -> list[Any] | None:
    """Raises HelperFailed."""
    line = process.receive(WALL_SECONDS)
    if line is None:
        raise process.took_too_long(WALL_SECONDS)
    return process.parsed(line)


def _result(seconds: float, value: Any, detail: str | None = None) -> TaskResult:
    error = None if detail is None else GradingError(value, detail)
    return TaskResult(None if error else value, error, seconds)


def _fault(error: HelperFailed) -> GradingError:
    """The error of a case that ended the process itself."""
    if error.failure is Failure.CPU:
        return GradingError(
            "unresponsive_reward_error",
            f"the texts need more than {CPU_SECONDS} seconds of a processor",
        )
    return GradingError(
        "other_error", f"the texts end the process that grades them: {error.message}"
    )
