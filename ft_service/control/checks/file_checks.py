"""Reports on data files without a base or a job, each by a process of its own."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_service.data.data_file import MEMORY_BYTES, DataReport
from ft_service.data.file_check import COMMAND, REPORT, REQUEST, FileCheckRequest, file_at_fault
from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.errors import UnavailableError
from ft_service.host.hardware import memory_bytes
from ft_service.host.helper_process import LATER_SECONDS, Failure, HelperFailed, Program, run_once
from ft_service.shared_work.places import Kind, Places

SECONDS = 10.0
"""Time to read a file; the report on a larger one covers its beginning."""
START_SECONDS = 10
"""Additional processor time for the process, for its start and its last record."""
LOST_SECONDS = 120.0
"""Time after which the host is said to have had no processor for it."""
AT_ONCE = 2
"""Limit of such processes; each project has at most one."""
WAITING = 8
"""Limit of a project's waiting checks."""
KNOWN_REPORTS = 1000
CHECK_BYTES = 1024**3
"""Memory limit of such a process."""


@dataclass(frozen=True)
class FileCheck:
    """A file, and how a job would read it. `pairs`: whether it must hold pairs of answers; None:
    either. `sensitive`: whether secrets and personal data are looked for."""

    sha256: str
    columns: Columns = AS_THEY_ARE
    pairs: bool | None = None
    sensitive: bool = False


class FileChecks:
    """The checks of one service, in one event loop. Reports are cached."""

    def __init__(self, command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> None:
        """`command`: starts the process."""
        self._command = command
        self._seconds = seconds
        self._places = Places(
            Kind(
                name="file_checks",
                places=AT_ONCE,
                of_project=1,
                waiting=WAITING,
                busy="Files are being checked",
            )
        )
        self._known: OrderedDict[FileCheck, DataReport] = OrderedDict()

    async def report(self, project_id: str, asked: FileCheck, path: Path) -> DataReport:
        """The report on the file at `path`, or on its beginning if it takes too long for a request.

        Raises LimitError while a project has too many such requests, UnavailableError if the
        process ended without an answer or the host was too busy.
        """
        if (known := self._known.get(asked)) is not None:
            self._known.move_to_end(asked)
            return known
        async with self._places.held(project_id):
            report = self._known.get(asked) or await self._made(asked, path)
        if not any(fault.over_limit for fault in report.faults):
            self._known[asked] = report
            if len(self._known) > KNOWN_REPORTS:
                self._known.popitem(last=False)
        return report

    async def _made(self, asked: FileCheck, path: Path) -> DataReport:
        limit = min(CHECK_BYTES, MEMORY_BYTES, memory_bytes() // 4)
        request = FileCheckRequest(
            str(path), self._seconds, limit, asked.columns, asked.sensitive, asked.pairs
        )
        cpu_seconds = math.ceil(self._seconds) + START_SECONDS
        over = threading.Event()
        program = Program(
            command=self._command, expendable=True, limits_itself=True, cpu_seconds=cpu_seconds
        )
        try:
            said = await asyncio.to_thread(
                run_once,
                program,
                REQUEST.dump_json(request),
                seconds=LOST_SECONDS,
                stop=over.is_set,
            )
        except HelperFailed as error:
            if error.failure is Failure.CPU:
                return file_at_fault(
                    f"one of its records takes longer than {self._seconds:g} s to read"
                )
            raise UnavailableError(
                "The process that checks files ended without an answer (exit status "
                f"{error.exit_code}). Try again.",
                retry_after=LATER_SECONDS,
            ) from None
        finally:  # the client may have gone
            over.set()
        return REPORT.validate_python(said)
