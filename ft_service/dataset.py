"""Check of a data file before a job may train on it: one pass, in memory bounded by the longest line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ft_service.chatlines import MAX_LINE_BYTES, LineError, parse_line
from ft_service.rundir import ErrorInfo

SHOWN_FAULTS = 20
"""Faults that are kept, and spelled out in the error message; the rest is counted."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one line."""

    line: int
    """From 1; 0: the file as a whole."""
    field: str
    """Dotted place in the line; empty: the line as a whole."""
    reason: str

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.field} {self.reason}" if self.field else f"{place}{self.reason}"


@dataclass(frozen=True)
class DataReport:
    """What a data file holds."""

    examples: int
    """Lines that can be trained on."""
    faults: list[Fault]
    """The first ones, in the order of the file."""
    faults_total: int

    def error(self, param: Literal["training_file", "validation_file"], filename: str) -> ErrorInfo | None:
        """The job's error, naming file, lines and reasons; None if every line is fine."""
        if not self.faults_total:
            return None
        shown = "; ".join(str(fault) for fault in self.faults)
        hidden = self.faults_total - len(self.faults)
        more = f"; and {hidden} more" if hidden else ""
        lines = "line" if self.faults_total == 1 else "lines"
        count = f" ({self.faults_total} {lines} at fault, {self.examples} fine)" if self.faults[0].line else ""
        return ErrorInfo(code=f"invalid_{param}", message=f"{filename}: {shown}{more}{count}.", param=param)


def check_file(path: Path, limit: int = SHOWN_FAULTS) -> DataReport:
    """Read a file of chat lines. Keeps the first `limit` faults and counts the rest. Raises OSError if it cannot be read."""
    examples, total = 0, 0
    faults: list[Fault] = []
    with path.open("rb") as file:
        for number, line in _lines(file):
            fault = _fault_of(number, line)
            if fault is None:
                examples += 1
                continue
            total += 1
            if len(faults) < limit:
                faults.append(fault)
    if not examples and not total:
        return DataReport(0, [Fault(0, "", "the file holds no examples")], 1)
    return DataReport(examples, faults, total)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; None for one that is too long. Blank lines count only when something follows them."""
    blank: list[int] = []
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        too_long = len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        if not too_long and not line.strip():
            blank.append(number)
            continue
        yield from ((earlier, b"") for earlier in blank)
        blank.clear()
        yield number, None if too_long else line.rstrip(b"\r\n")


def _fault_of(number: int, line: bytes | None) -> Fault | None:
    if line is None:
        return Fault(number, "", f"is longer than {MAX_LINE_BYTES} bytes")
    if not line:
        return Fault(number, "", "is blank; blank lines may only stand at the end")
    if line.startswith(b"\xef\xbb\xbf"):
        return Fault(number, "", "starts with a byte order mark: save the file as UTF-8 without one")
    try:
        parse_line(line.decode())
    except UnicodeDecodeError as error:
        return Fault(number, "", f"is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except LineError as error:
        return Fault(number, error.field, error.reason)
    return None
