"""Reports on data files: their format, the lines at fault, and the tokens to train on; and what is asked of the process that
makes them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.formats.reading import Shape, open_data
from ft_service.data.formats.recognise import Container, Format
from ft_service.data.line_errors import Fault, counted
from ft_service.data.records import Pair, Record
from ft_service.data.samples import Page, SamplePage
from ft_service.data.statistics import Measure, Statistics
from ft_service.data.token_options import DEFAULT, TokenOptions
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
PAIRING = 1
"""Of `answers` and preference_line.py: another number wherever they make other samples of a pair than before."""
GIVE_UP_AFTER = 3
"""Samples beyond a limit after which the rest of a file is not read: each has cost seconds, and more would tell nothing new."""

Param = Literal["training_file", "validation_file"]
TWO_ANSWERS = "is a preference pair, which needs method: {type: dpo}"
_ONE_ANSWER = "has one answer, of supervised training: give method: {type: supervised}, or pairs of answers"


@dataclass(frozen=True)
class FaultGroup:
    """Lines that are at fault for the same reason."""

    first: Fault
    count: int = 1
    lines: tuple[int, ...] = ()
    """The first ones."""

    def text(self, word: str) -> str:
        """`word`: what a line of this file is called."""
        if self.count == 1:
            return self.first.text(word)
        more = ", …" if self.count > len(self.lines) else ""
        lines = f"{self.count:,} {word}s ({', '.join(map(str, self.lines))}{more})"
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
    shape: str = ""
    """The file's format and container, in words; empty: OpenAI's chat lines."""
    unused: tuple[str, ...] = ()
    """Keys or columns that its format has not, and that are left out."""
    word: str = "line"
    """What one of its records is called."""
    is_bare: bool = False
    """It holds text or prompts with completions, which no chat template writes."""

    @property
    def is_lasting(self) -> bool:
        """Whether every host would report the same, at any time."""
        return not self.unread and not any(fault.over_limit for fault in self.faults)

    def error(self, param: Param, filename: str) -> ErrorInfo | None:
        """The job's error, naming file, lines and reasons; None if every line is fine."""
        if not self.faults_total:
            return None
        return ErrorInfo(code=f"invalid_{param}", message=self.fault_text(filename), param=param)

    def fault_text(self, filename: str, also: str = "") -> str:
        """What is wrong with a file, wherever it is told: how many of its lines, and below it each reason once, with its lines.
        `also`: a sentence for the end of the first line."""
        more = f" {also}" if also else ""
        if not self.faults[0].line:  # the file as a whole
            return f"{filename}: {self.faults[0]}.{more}"
        total = self.faults_total
        if self.unread:
            which = f"{counted(total, self.word)} cannot be trained on, and the rest was not read"
        else:
            which = f"{total:,} of {counted(total + self.examples, self.word)} cannot be trained on"
        return "\n".join([f"{filename}: {which}.{more}", *self.reasons()])

    def fine_text(self, filename: str) -> str:
        """What a file is whose records are fine, as far as they were read."""
        kind = self.shape or "OpenAI chat (messages) in JSON lines"
        read = counted(self.examples, self.word)
        if self.unread:
            return f"{filename}: {kind}; the first {read} can be trained on. The rest was not read: a job reads it."
        return f"{filename}: {kind}; {read}, {'and it is fine' if self.examples == 1 else 'all of them fine'}."

    def reasons(self) -> list[str]:
        """Why lines are at fault, each reason once, with its lines."""
        groups = self.groups or [FaultGroup(fault) for fault in self.faults]
        shown = [group.text(self.word) for group in groups[:SHOWN_FAULTS]]
        told = sum(group.count for group in groups[:SHOWN_FAULTS])
        return [*shown, f"and {self.faults_total - told:,} more"] if told < self.faults_total else shown

    def messages(self, name: str, max_length: int, *, cut: bool = True) -> Iterator[tuple[Literal["info", "warn"], str]]:
        """Level and sentence for events: what is trained on, and what is left out and why. `name`: the file's. `cut` False:
        statistics tell of samples that lose tokens.
        """
        if self.shape:
            yield "info", f"{name}: {self.shape}."
        if self.unused:
            columns = "column is" if len(self.unused) == 1 else "columns are"
            yield "warn", f"{name}: {len(self.unused)} {columns} not of this format, and left out: {', '.join(self.unused)}."
        counts = self.counts
        if counts is None:
            return
        pairs = f"{counted(counts.pairs, 'pair')} of answers"
        of = pairs if counts.pairs else counted(counts.samples, "sample")
        whose = "" if self.is_bare else "the assistant's "
        yield (
            "info",
            f"{name}: {of} of {counts.tokens:,} tokens, {counts.targets:,} of them {whose}to "
            f"learn; the longest sample has {counted(counts.longest, 'token')}.",
        )
        if counts.cut and cut:
            yield (
                "warn",
                f"{name}: {counted(counts.cut, 'sample', 'is', 'are')} cut to training.max_length = {max_length} tokens; "
                f"{counted(counts.lost_tokens, 'token', 'is', 'are')} lost. A larger max_length keeps them.",
            )
        if counts.dropped:
            left_out = counted(counts.dropped, "pair" if counts.pairs else "sample", "is", "are")
            yield "warn", f"{name}: {left_out} left out: no assistant token within {max_length} tokens."


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
    """Lines hold pairs of answers."""
    tokens: str = ""
    """Folder in which the tokens are kept if no line is at fault, and looked for; empty: they are not."""
    files: tuple[str, ...] = ()
    """Of a folder, in their order; empty: `path` is a file."""
    options: TokenOptions = DEFAULT
    show: Page | None = None
    """Samples that are asked for in place of a report. The file's digest is not looked at."""
    measure: Measure | None = None
    """Statistics that are asked for in place of a report. Tokens are made only of what is not kept already."""


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
    """One of the five. `progress` comes before the report, once or more often for a file that takes long."""

    report: DataReport | None = None
    error: ErrorInfo | None = None
    """The base's tokenizer cannot be used."""
    progress: ReadProgress | None = None
    page: SamplePage | None = None
    """Asked for by `show`."""
    statistics: Statistics | None = None
    """Asked for by `measure`."""


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

    def report(self, shape: Shape, counts: Counts | None = None, *, unread: bool = False) -> DataReport:
        """The report, at the end of the file or where reading was given up."""
        if not self.examples and not self.faults_total:
            self.fault(Fault(0, "", "the file holds no examples"))
        usual = shape.format in (None, Format.CHAT) and shape.container is Container.LINES and shape.compression is None
        return DataReport(
            self.examples,
            self._faults,
            self.faults_total,
            None if self.faults_total else counts,
            unread,
            list(self._groups.values()),
            shape="" if usual else str(shape),
            unused=shape.unused,
            word=shape.word,
            is_bare=shape.format in (Format.TEXT, Format.PROMPT_COMPLETION),
        )


def check_lines(
    path: Path,
    limit: int = SHOWN_FAULTS,
    files: Sequence[str] = (),
    *,
    columns: Columns = AS_THEY_ARE,
    pairs: bool | None = None,
    note: Callable[[int, Record], object] = lambda number, record: None,
    stop: Callable[[], bool] = lambda: False,
) -> DataReport:
    """Report on a data file, without counting tokens. `files`: of a folder; `columns`: what they call theirs; `pairs`: it must
    hold pairs of answers, or must not; None: either will do. `note`: is given every record that is fine. `stop`: asked after
    each record whether to leave the rest unread. Raises OSError if it cannot be read.
    """
    findings = Findings(limit)
    stopped = False
    with open_data(path, files, columns) as reader:
        for number, record in reader if pairs is None else for_method(reader, pairs=pairs):
            if isinstance(record, Fault):
                findings.fault(record)
            else:
                findings.examples += 1
                note(number, record)
            if stopped := stop():
                break
    return findings.report(reader.shape, unread=stopped)


def for_method(records: Iterable[tuple[int, Record | Fault]], *, pairs: bool) -> Iterator[tuple[int, Record | Fault]]:
    """The records, and a fault for each that the method cannot train on. `pairs`: it compares two answers."""
    for number, record in records:
        fits = isinstance(record, Fault) or isinstance(record, Pair) == pairs
        yield number, (record if fits else Fault(number, "", _ONE_ANSWER if pairs else TWO_ANSWERS))


def answers(
    records: Iterable[tuple[int, Record | Fault]], widths: deque[int] | None = None
) -> Iterator[tuple[int, Record | Fault]]:
    """Both answers of every pair by its number, the preferred one first, so that those of pair i are samples 2i and 2i + 1; or
    its fault. `widths`: takes how many they were, record by record.
    """
    for number, record in for_method(records, pairs=True):
        found = (record.preferred, record.rejected) if isinstance(record, Pair) else (record,)
        if widths is not None:
            widths.append(len(found))
        yield from ((number, answer) for answer in found)
