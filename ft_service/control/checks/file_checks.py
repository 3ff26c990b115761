"""Reports on data files without a base, before any job: each by a process that ends with the answer. No thread waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ft_service.data.data_file import MEMORY_BYTES, DataReport
from ft_service.data.file_check import COMMAND, REPORT, REQUEST, FileCheckRequest, file_at_fault
from ft_service.errors import LimitError, UnavailableError
from ft_service.host.environment import child_environment
from ft_service.host.hardware import memory_bytes

SECONDS = 10.0
"""That a file is read for; of a larger one the beginning is reported on."""
START_SECONDS = 30.0
"""That the process may take beside that, on a busy host."""
AT_ONCE = 2
"""Such processes beside this one; of each project one."""
WAITING = 8
"""Checks of one project that may wait."""
KNOWN_REPORTS = 1000
CHECK_BYTES = 1024**3
"""Memory that such a process may take, at most."""


@dataclass(frozen=True)
class FileCheck:
    """A file as a job would read it. `columns`: what it calls its own; `pairs`: it must hold pairs of answers, or must not."""

    sha256: str
    columns: tuple[tuple[str, str], ...] = ()
    pairs: bool | None = None


class FileChecks:
    """The checks of one service, in one event loop. What was reported once is known."""

    def __init__(self, command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> None:
        """`command`: that starts the process."""
        self._command = command
        self._seconds = seconds
        self._free = asyncio.Semaphore(AT_ONCE)
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        self._known: OrderedDict[FileCheck, DataReport] = OrderedDict()

    async def report(self, project_id: str, asked: FileCheck, path: Path) -> DataReport:
        """The report on the file at `path`: of its beginning where it takes longer than a request may. Raises LimitError while
        a project has too many such requests, UnavailableError if the process ended without an answer.
        """
        if (known := self._known.get(asked)) is not None:
            self._known.move_to_end(asked)
            return known
        async with self._turn(project_id), self._free:
            report = self._known.get(asked) or await self._made(asked, path)
        if not any(fault.over_limit for fault in report.faults):
            self._known[asked] = report
            if len(self._known) > KNOWN_REPORTS:
                self._known.popitem(last=False)
        return report

    @asynccontextmanager
    async def _turn(self, project_id: str) -> AsyncIterator[None]:
        lock, waiting = self._turns.get(project_id, (asyncio.Lock(), 0))
        if waiting > WAITING:
            raise LimitError("Files of this project are being checked. Try again in a moment.", code="rate_limit_exceeded")
        self._turns[project_id] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._turns[project_id]
            if waiting > 1:
                self._turns[project_id] = lock, waiting - 1
            else:
                del self._turns[project_id]

    async def _made(self, asked: FileCheck, path: Path) -> DataReport:
        limit = min(CHECK_BYTES, MEMORY_BYTES, memory_bytes() // 4)
        request = FileCheckRequest(str(path), self._seconds, limit, asked.columns, asked.pairs)
        process = await asyncio.create_subprocess_exec(
            *(*self._command, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(os.environ),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._seconds + START_SECONDS):
                said, _ = await process.communicate(REQUEST.dump_json(request) + b"\n")
        except TimeoutError:
            return file_at_fault(f"one of its records takes longer than {self._seconds:g} s to read")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        try:
            return REPORT.validate_json(said)
        except ValueError:
            raise UnavailableError(
                f"The process that checks files ended without an answer (exit status {process.returncode}). Try again."
            ) from None
