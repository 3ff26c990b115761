"""The process that reports on one data file without a base, and ends: `python -m ft_service.data.file_check PARENT`.

It reads a FileCheckRequest, one line of JSON, and writes a DataReport. A process of its own, since a file is a stranger's:
its time and memory are limited, and whoever waits for it can end it.
"""

from __future__ import annotations

import os
import sys
import time

from ft_service.host.lifetime import die_with_parent

if __name__ == "__main__":  # before anything slow
    die_with_parent(int(sys.argv[1]))

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ft_service.data.data_file import DataReport, check_lines
from ft_service.data.formats.columns import Columns
from ft_service.data.line_errors import Fault
from ft_service.data.tokens.limits import go_first, limit_memory, mebibytes

COMMAND = (sys.executable, "-P", "-m", "ft_service.data.file_check")


@dataclass(frozen=True)
class FileCheckRequest:
    """A file, and how it is to be read."""

    path: str
    seconds: float
    """After which the rest of the file is not read."""
    memory_bytes: int
    """That the process may take."""
    columns: tuple[tuple[str, str], ...] = ()
    """What the file calls its columns (ft_service/data/formats/columns.py)."""
    pairs: bool | None = None
    """It must hold pairs of answers, or must not; None: either will do."""


REQUEST = TypeAdapter(FileCheckRequest)
REPORT = TypeAdapter(DataReport)


def file_at_fault(reason: str) -> DataReport:
    """A report on a file that is at fault as a whole, or could not be read to an end."""
    return DataReport(0, [Fault(0, "", reason, over_limit=True)], 1, unread=True)


def answer(request: FileCheckRequest) -> DataReport:
    """The report on a file, of what was read of it in time."""
    end = time.monotonic() + request.seconds
    limit_memory(request.memory_bytes)
    try:
        return check_lines(
            Path(request.path),
            columns=Columns(request.columns),
            pairs=request.pairs,
            stop=lambda: time.monotonic() > end,
        )
    except MemoryError:
        return file_at_fault(f"to read it takes more than {mebibytes(request.memory_bytes)} of memory")
    except OSError as error:
        return file_at_fault(f"it cannot be read: {error.strerror or error}")


if __name__ == "__main__":
    go_first()
    report = answer(REQUEST.validate_json(sys.stdin.buffer.readline()))
    sys.stdout.buffer.write(REPORT.dump_json(report))
    sys.stdout.buffer.flush()
    os._exit(0)  # a reader's threads are not waited for
