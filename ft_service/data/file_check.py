"""The process that reports on one data file without a base: `python -m ft_service.data.file_check`.

It reads a FileCheckRequest, one line of JSON, writes a DataReport and ends. It is a process of its
own because the file comes from a user: its time and memory are limited, and the caller can end it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ft_service.data.data_file import DataReport, check_lines
from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.line_errors import Fault
from ft_service.data.record_comparison import (
    RecordComparison,
    References,
    most_records,
    suite_texts,
)
from ft_service.data.tokens.sample_limits import limit_memory, mebibytes

COMMAND = (sys.executable, "-P", "-m", "ft_service.data.file_check")


@dataclass(frozen=True)
class FileCheckRequest:
    """A file to check, with limits."""

    path: str
    seconds: float
    """Time after which the rest of the file is not read."""
    memory_bytes: int
    """Memory limit of the process."""
    columns: Columns = AS_THEY_ARE
    """The file's names of columns."""
    sensitive: bool = False
    """Secrets and personal data are looked for."""
    pairs: bool | None = None
    """It must hold pairs of answers, or must not; None: either is accepted."""


COMPARED_SHARE = 0.4
"""The part of the time in which records are compared with each other."""
REQUEST = TypeAdapter(FileCheckRequest)
REPORT = TypeAdapter(DataReport)


def file_at_fault(reason: str) -> DataReport:
    """A report on a file that is at fault as a whole or could not be read completely."""
    return DataReport(0, [Fault(0, "", reason, over_limit=True)], 1, unread=True)


def answer(request: FileCheckRequest) -> DataReport:
    """The report on the part of a file that was read in time."""
    end = time.monotonic() + request.seconds
    limit_memory(request.memory_bytes)
    try:
        return check_lines(
            Path(request.path),
            columns=request.columns,
            pairs=request.pairs,
            sensitive=request.sensitive,
            comparison=RecordComparison(
                References.of(suite_texts()),
                most_records(request.memory_bytes),
                COMPARED_SHARE * request.seconds,
            ),
            stop=lambda: time.monotonic() > end,
        )
    except MemoryError:
        return file_at_fault(
            f"to read it takes more than {mebibytes(request.memory_bytes)} of memory"
        )
    except OSError as error:
        return file_at_fault(f"it cannot be read: {error.strerror or error}")


if __name__ == "__main__":
    report = answer(REQUEST.validate_json(sys.stdin.buffer.readline()))
    sys.stdout.buffer.write(REPORT.dump_json(report))
    sys.stdout.buffer.flush()
    os._exit(0)  # without waiting for the reader's threads
