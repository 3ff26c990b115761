"""The current task of the process that reads data files, in memory shared with the process that
waits for it.

The waiting process reads it when the other one is stuck or has died, to name the lines at fault.
Standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_TIME = struct.Struct("d")
_ENTRY = struct.Struct("ddqq")
"""A task's start (seconds of the monotonic clock; 0: it is not running), the process's processor
time then, first and last line.
"""


class Task(Enum):
    """A task that a file's contents or a base can make long.

    The value is its place in the memory.
    """

    LOADING = 0
    """Loading the base's tokenizer."""
    RENDERING = 1
    """Rendering with the base's chat template."""
    ENCODING = 2
    """Tokenising with the base's tokenizer, while the next samples are rendered."""


SIZE = _TIME.size + len(Task) * _ENTRY.size
"""Bytes of the shared memory."""


@dataclass(frozen=True)
class RunningTask:
    """A task in progress."""

    task: Task
    first: int
    """First line that it processes, from 1; 0 while loading."""
    last: int
    seconds: float
    """Time since its start."""
    cpu_begun: float
    """Processor time of the process at its start, in seconds."""


class CurrentTask:
    """`SIZE` bytes of a file that one process writes and another reads."""

    def __init__(self, file: int) -> None:
        """`file`: descriptor of an open file of at least `SIZE` bytes; may be closed afterwards."""
        self._memory = mmap.mmap(file, SIZE)

    @classmethod
    def create(cls, file: int) -> CurrentTask:
        """Use an empty file."""
        os.ftruncate(file, SIZE)
        return cls(file)

    def ready(self) -> None:
        """Note that the process has imported its modules and takes requests."""
        _TIME.pack_into(self._memory, 0, time.monotonic())

    @property
    def is_ready(self) -> bool:
        return _TIME.unpack_from(self._memory, 0)[0] > 0

    @contextlib.contextmanager
    def at(self, task: Task, first: int = 0, last: int = 0) -> Iterator[None]:
        """Note the task while the block runs.

        The start is written last and cleared first, so that a reader never sees the lines of an
        earlier task.
        """
        place = _TIME.size + task.value * _ENTRY.size
        _ENTRY.pack_into(self._memory, place, 0.0, time.process_time(), first, last)
        _TIME.pack_into(self._memory, place, time.monotonic())
        try:
            yield
        finally:
            _TIME.pack_into(self._memory, place, 0.0)

    def running(self) -> list[RunningTask]:
        """The tasks in progress, or in progress when the process died."""
        entries = [
            (task, *_ENTRY.unpack_from(self._memory, _TIME.size + task.value * _ENTRY.size))
            for task in Task
        ]
        now = time.monotonic()
        return [
            RunningTask(task, first, last, now - start, cpu)
            for task, start, cpu, first, last in entries
            if start
        ]
