"""Limits on time and memory for one sample, in the process that reads data files (examine.py).

Chat templates and tokenizers come with bases, and chats from any user: a sample that takes too long
or too much memory is a fault of its line. Templates run in Python, where a signal interrupts them.
Tokenizers do not: the process that waits for this one sees by its current task that it is stuck,
and kills it.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from ft_service.data.current_task import CurrentTask, Task

TICK_SECONDS = 0.25
"""Interval between checks of a sample's time."""
GIVE_UP_AFTER = 3
"""Samples beyond a limit after which the rest of a file is not read: each takes seconds, and more
would say nothing new.
"""


class TimeUp(BaseException):
    """A sample took too long.

    Not an Exception, so that no handler for errors of the template catches it.
    """


class SampleLimits:
    """The limits while one file is read, for the main thread."""

    def __init__(self, current_task: CurrentTask, seconds: float, memory_bytes: int) -> None:
        """`seconds`: processor time for rendering one sample, without time for other work on the
        host. `memory_bytes`: the limit that `limit_memory` set, for messages.
        """
        self._current_task = current_task
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._started: float | None = None
        self._not_encoding = threading.Event()
        self._not_encoding.set()
        self._exceeded = 0

    def __enter__(self) -> Self:
        signal.signal(signal.SIGALRM, self._check_time)
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    @contextlib.contextmanager
    def rendering(self, line: int) -> Iterator[None]:
        """Limit the time of the block, which renders a line. Raises TimeUp inside the block."""
        with self._current_task.at(Task.RENDERING, line, line):
            self._started = time.thread_time()
            try:
                yield
            finally:
                self._started = None

    @contextlib.contextmanager
    def encoding(self, first: int, last: int) -> Iterator[None]:
        """Note that the block tokenises these lines."""
        self._not_encoding.clear()
        try:
            with self._current_task.at(Task.ENCODING, first, last):
                yield
        finally:
            self._not_encoding.set()

    def wait_for_encoding(self) -> bool:
        """Wait until the tokenizer has freed its memory. False: it was not running."""
        return not self._not_encoding.is_set() and self._not_encoding.wait()

    def exceeded(self) -> bool:
        """Count a sample that exceeded a limit. True: the rest of the file need not be read."""
        self._exceeded += 1
        return self._exceeded >= GIVE_UP_AFTER

    @property
    def time(self) -> str:
        return f"{self._seconds:g} seconds"

    @property
    def memory(self) -> str:
        return mebibytes(self._memory_bytes)

    def _check_time(self, number: int, frame: FrameType | None) -> None:
        if self._started is not None and time.thread_time() - self._started > self._seconds:
            raise TimeUp


def mebibytes(count: int) -> str:
    return f"{count // 2**20:,} MiB"


def held_memory() -> int:
    """The private memory of this process, in bytes."""
    return (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
        * resource.getpagesize()
    )


def limit_memory(count: int) -> None:
    """Make allocations beyond `count` bytes fail, or beyond the host's limit if that is lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
    )
