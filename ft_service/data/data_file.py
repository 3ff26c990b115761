"""Data files line by line, and reports on them: lines at fault, and tokens to train on.

Shared by the service and the workers, so that what one accepts the other trains on. One pass, in memory bounded by the longest
line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from pydantic import TypeAdapter

from ft_service.data.chat_line import MAX_LINE_BYTES, LineError, Sample, parse_line
from ft_service.data.preference_line import Pair, parse_pair
from ft_service.rundir.documents import ErrorInfo

SHOWN_FAULTS = 20
"""Faults that are kept, and reasons that the error message spells out; the rest is counted."""
SHOWN_LINES = 5
"""Lines that are named of those that are at fault for one reason."""
_GROUPS = 100
"""Reasons that are told apart; further ones are counted together."""
_NUMBER = re.compile(r"\d+")

PROGRESS_SECONDS = 30.0
"""How often it is said how far a file has been read."""

RENDER_SECONDS = 10.0
"""Of a processor's time, that the base's chat template may take for one sample."""
MEMORY_BYTES = 4 * 1024**3
"""That reading a file may take, at most; half of the host's where that is less. The longest line takes a quarter of it."""
GIVE_UP_AFTER = 3
"""Samples beyond a limit after which the rest of a file is not read: each has cost seconds, and more would tell nothing new."""

Param = Literal["training_file", "validation_file"]
Parsed = TypeVar("Parsed", Sample, Pair)


@dataclass(frozen=True)
class Fault:
    """One line's fault."""

    line: int
    """From 1; 0: the file as a whole."""
    field: str
    """Dotted place in the line; empty: the line as a whole."""
    reason: str
    last_line: int = 0
    """Where it is one of several lines, and not known which; 0: it is this one."""
    over_limit: bool = False
    """A limit of time or memory was exceeded, which another host may not find."""

    def __str__(self) -> str:
        several = self.last_line > self.line
        place = f"lines {self.line} to {self.last_line}: " if several else f"line {self.line}: " if self.line else ""
        return f"{place}{self.field} {self.reason}" if self.field else f"{place}{self.reason}"


@dataclass(frozen=True)
class FaultGroup:
    """Lines that are at fault for the same reason."""

    first: Fault
    count: int = 1
    lines: tuple[int, ...] = ()
    """The first ones."""

    def __str__(self) -> str:
        if self.count == 1:
            return str(self.first)
        more = ", …" if self.count > len(self.lines) else ""
        lines = f"{self.count:,} lines ({', '.join(map(str, self.lines))}{more})"
        return f"{lines}: {' '.join(part for part in (self.first.field, self.first.reason) if part)}"

    def joined_by(self, fault: Fault) -> FaultGroup:
        """The group with one more line. A place in which its lines differ gets a star: `messages.*.role`."""
        field = self.first.field if fault.field == self.first.field else _NUMBER.sub("*", fault.field)
        lines = (*self.lines, fault.line) if len(self.lines) < SHOWN_LINES else self.lines
        return FaultGroup(replace(self.first, field=field), self.count + 1, lines)


@dataclass(frozen=True)
class Counts:
    """The samples and tokens of a file that can be trained on, by the base's tokenizer and chat template."""

    samples: int = 0
    """Those that are trained on; of pairs each answer is one."""
    pairs: int = 0
    """Pairs of answers that are trained on; 0: the file holds none."""
    tokens: int = 0
    """Of these, once they were cut."""
    targets: int = 0
    """Of these tokens: the assistant's, which the model is trained to produce."""
    longest: int = 0
    """Tokens of the longest sample, before any were cut."""
    cut: int = 0
    """Samples that lose tokens to training.max_length."""
    lost_tokens: int = 0
    """Tokens that they lose."""
    dropped: int = 0
    """Samples left out because no target is left of them, pairs because none is left of one answer."""


@dataclass(frozen=True)
class DataReport:
    """The contents of a data file, as far as training is concerned."""

    examples: int
    """Lines that can be trained on."""
    faults: list[Fault]
    """The first ones, in the order of the file."""
    faults_total: int
    counts: Counts | None = None
    """None: no tokens were counted, or there are faults."""
    unread: bool = False
    """Reading was given up: what is behind the last fault is not known."""
    groups: list[FaultGroup] = field(default_factory=list)
    """All faults by their reason, in the order of the file; empty: told by a version that did not group them."""

    @property
    def is_lasting(self) -> bool:
        """Whether every host would report the same, at any time."""
        return not self.unread and not any(fault.over_limit for fault in self.faults)

    def error(self, param: Param, filename: str) -> ErrorInfo | None:
        """The job's error, naming file, lines and reasons; None if every line is fine."""
        if not self.faults_total:
            return None
        shown = "; ".join(self.reasons())
        lines = "line" if self.faults_total == 1 else "lines"
        count = f" ({self.faults_total} {lines} at fault, {self.examples} fine)" if self.faults[0].line else ""
        if self.unread:
            count = "; the rest was not read"
        return ErrorInfo(code=f"invalid_{param}", message=f"{filename}: {shown}{count}.", param=param)

    def reasons(self) -> list[str]:
        """Why lines are at fault, each reason once, with its lines."""
        groups = self.groups or [FaultGroup(fault) for fault in self.faults]
        shown = [str(group) for group in groups[:SHOWN_FAULTS]]
        told = sum(group.count for group in groups[:SHOWN_FAULTS])
        return [*shown, f"and {self.faults_total - told:,} more"] if told < self.faults_total else shown

    def messages(self, name: str, max_length: int) -> Iterator[tuple[Literal["info", "warn"], str]]:
        """Level and sentence for events: what is trained on, and what is left out and why. `name`: the file's."""
        counts = self.counts
        if counts is None:
            return
        of = f"{counts.pairs:,} pairs of answers" if counts.pairs else f"{counts.samples:,} samples"
        yield (
            "info",
            f"{name}: {of} of {counts.tokens:,} tokens, {counts.targets:,} of them the assistant's to "
            f"learn; the longest sample has {counts.longest:,} tokens.",
        )
        if counts.cut:
            yield (
                "warn",
                f"{name}: {counts.cut:,} samples are cut to training.max_length = {max_length} tokens; "
                f"{counts.lost_tokens:,} tokens are lost. A larger max_length keeps them.",
            )
        if counts.dropped:
            what = "pairs" if counts.pairs else "samples"
            yield "warn", f"{name}: {counts.dropped:,} {what} are left out: no assistant token within {max_length} tokens."


@dataclass(frozen=True)
class ExamineRequest:
    """A file to be examined by the process that has the tokenizers (examiner.py). Paths are as that process sees them."""

    path: str
    sha256: str
    """Of the bytes at submission; others are a fault."""
    model_path: str
    tokenizer: str
    """Digest of the state of the base's tokenizer and chat template."""
    max_length: int
    progress_seconds: float = PROGRESS_SECONDS
    """From the beginning to the first Progress, and from one to the next."""
    render_seconds: float = RENDER_SECONDS
    memory_bytes: int = MEMORY_BYTES
    pairs: bool = False
    """Lines hold pairs of answers (preference_line.py)."""
    tokens: str = ""
    """Folder in which the tokens are kept if no line is at fault, and looked for; empty: they are not."""


@dataclass(frozen=True)
class ReadProgress:
    """The part of a file that has been read."""

    lines: int
    share: float
    """Of its bytes."""

    def message(self, param: Param) -> str:
        return f"Validating {param.replace('_', ' ')}: {self.lines:,} lines ({int(100 * self.share)} %)."


@dataclass(frozen=True)
class ExamineReply:
    """One of the three. `progress` comes before the report, once or more often for a file that takes long."""

    report: DataReport | None = None
    error: ErrorInfo | None = None
    """The base's tokenizer cannot be used."""
    progress: ReadProgress | None = None


REQUEST = TypeAdapter(ExamineRequest)
REPLY = TypeAdapter(ExamineReply)


class Findings:
    """Collects faults while a file is read, in the order of its lines. Keeps the first `limit` and counts the rest."""

    def __init__(self, limit: int = SHOWN_FAULTS) -> None:
        self._limit = limit
        self._faults: list[Fault] = []
        self._groups: dict[tuple[str, str], FaultGroup] = {}
        self.faults_total = 0
        self.examples = 0

    def fault(self, fault: Fault) -> None:
        self.faults_total += 1
        if len(self._faults) < self._limit:
            self._faults.append(fault)
        alike = (_NUMBER.sub("#", fault.field), _NUMBER.sub("#", fault.reason))
        if alike in self._groups:
            self._groups[alike] = self._groups[alike].joined_by(fault)
        elif len(self._groups) < _GROUPS:
            self._groups[alike] = FaultGroup(fault, 1, (fault.line,))

    def report(self, counts: Counts | None = None, *, unread: bool = False) -> DataReport:
        """The report, at the end of the file or where reading was given up."""
        if not self.examples and not self.faults_total:
            self.fault(Fault(0, "", "the file holds no examples"))
        groups = list(self._groups.values())
        return DataReport(self.examples, self._faults, self.faults_total, None if self.faults_total else counts, unread, groups)


def check_lines(path: Path, limit: int = SHOWN_FAULTS, *, pairs: bool = False) -> DataReport:
    """Report on a file of chat lines, or of pairs, without counting tokens. Raises OSError if it cannot be read."""
    findings = Findings(limit)
    with path.open("rb") as file:
        for _, found in read_pairs(file) if pairs else read_samples(file):
            if isinstance(found, Fault):
                findings.fault(found)
            else:
                findings.examples += 1
    return findings.report()


def read_samples(file: BinaryIO) -> Iterator[tuple[int, Sample | Fault]]:
    """Every line by its number, from 1: its conversation, or its fault."""
    for number, line in _lines(file):
        yield number, _parse(number, line, parse_line)


def read_pairs(file: BinaryIO) -> Iterator[tuple[int, Pair | Fault]]:
    """Every line by its number, from 1: its pair of answers, or its fault."""
    for number, line in _lines(file):
        yield number, _parse(number, line, parse_pair)


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


def _parse(number: int, line: bytes | None, parse: Callable[[str], Parsed]) -> Parsed | Fault:
    if line is None:
        return Fault(number, "", f"is longer than {MAX_LINE_BYTES} bytes")
    if not line:
        return Fault(number, "", "is blank; blank lines may only stand at the end")
    if line.startswith(b"\xef\xbb\xbf"):
        return Fault(number, "", "starts with a byte order mark: save the file as UTF-8 without one")
    try:
        return parse(line.decode())
    except UnicodeDecodeError as error:
        return Fault(number, "", f"is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except LineError as error:
        return Fault(number, error.field, error.reason)
