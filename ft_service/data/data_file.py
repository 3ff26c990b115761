"""Reports on data files (format, lines at fault, tokens to train on), and requests to the process
that makes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from ft_service.data.fault_groups import FaultGroup, FaultGroups, Skipped, may_skip
from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.data.formats.detect_format import Container, Format
from ft_service.data.formats.reading import FileFormat, open_data
from ft_service.data.label_balance import balance_messages
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Pair, Record, images_of, is_unanswered, label_of
from ft_service.data.sample_request import RecordRange, SamplePage
from ft_service.data.sensitive_text import sensitive_kinds
from ft_service.data.statistics import (
    Comparison,
    DataStatistics,
    Lines,
    Measure,
    Records,
    advice_on_records,
    alike_text,
    unanswered_text,
)
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.rundir.documents import ErrorInfo
from ft_service.spec import LossOptions
from ft_service.spec.options import Applied
from ft_service.wording import counted

if TYPE_CHECKING:  # the planner counts samples, and needs no library that compares them
    from ft_service.data.record_comparison import RecordComparison

SHOWN_FAULTS = 20
"""Faults that a report keeps, and reasons that its message lists; the rest is counted."""
PROGRESS_SECONDS = 30.0
"""Interval of progress messages while a file is read."""

RENDER_SECONDS = 10.0
"""Processor time in which the base's chat template must render a sample, in seconds."""
MEMORY_BYTES = 4 * 1024**3
"""Memory that reading a file may take; half of the host's memory if that is less.

The longest line takes two fifths of it.
"""
CHECK_SECONDS = 600.0
"""Processor time in which a file must be read, rendered and tokenised, in seconds, whatever its
size.
"""
CHECK_BYTES_PER_SECOND = 64 * 1024
"""Bytes for which there is one more second. Ordinary chats take a sixteenth of that or less."""
PAIRING = 2
"""Version of the samples that `answers` and preference_line.py make of a pair; increase it when
they change.
"""

Param = Literal["training_file", "validation_file"]
TWO_ANSWERS = "is a preference pair, which needs method: {type: dpo}"
_ONE_ANSWER = (
    "has one answer, of supervised training: give method: {type: supervised}, or pairs of answers"
)


@dataclass(frozen=True)
class Counts:
    """The samples and tokens of a file that can be trained on, with the base's tokenizer and chat
    template.
    """

    samples: int = 0
    """Samples that are trained on; each answer of a pair is one."""
    pairs: int = 0
    """Pairs of answers that are trained on; 0: the file holds no pairs."""
    tokens: int = 0
    """Tokens of these samples after they were cut."""
    targets: int = 0
    """Tokens among these that the model is trained to produce."""
    longest: int = 0
    """Tokens of the longest sample before it was cut."""
    cut: int = 0
    """Samples that are cut to training.max_length tokens."""
    lost_tokens: int = 0
    """Tokens that are cut from them."""
    dropped: int = 0
    """Samples left out because the cut leaves no target, and pairs of which one answer has no
    target left.
    """
    several: Lines = field(default_factory=Lines)
    """Conversations that make several samples, since the chat template writes an answer otherwise
    once more follows.
    """
    alike: Lines = field(default_factory=Lines)
    """Pairs left out because their two answers are the same tokens after the cut: their loss has no
    gradient, and would only dilute that of the others.
    """
    image_tokens: int = 0
    """Tokens that stand for images, before the cut."""


@dataclass(frozen=True)
class DataReport:
    """The result of reading a data file for training."""

    examples: int
    """Lines that can be trained on."""
    faults: list[Fault]
    """The first SHOWN_FAULTS faults, in the order of the file."""
    faults_total: int
    counts: Counts | None = None
    """None: no tokens were counted, or there are faults."""
    unread: bool = False
    """Reading stopped early: the lines after the last fault are not known."""
    groups: list[FaultGroup] = field(default_factory=list)
    """All faults, grouped by reason, in the order of the file; empty: the version that wrote the
    report did not group them.
    """
    shape: str = ""
    """The file's format and container, in words; empty: OpenAI's chat lines."""
    unused: tuple[str, ...] = ()
    """Keys or columns that the format does not have and that are left out."""
    columns: tuple[str, ...] = ()
    """Keys or columns of the first record, in its order."""
    word: str = "line"
    """The name of the file's records in messages."""
    is_bare: bool = False
    """The file holds texts, or prompts with completions; the chat template is not applied to
    them.
    """
    of_prompts: bool = False
    """The file holds prompts to grade, of which nothing is learned."""
    joined: tuple[str, ...] = ()
    """The file's names of prompt and completion, if these are strings; empty: there are no such
    records, or the base has no chat template.
    """
    has_context: bool = False
    """Samples 2i and 2i + 1 are what a student and its teacher read."""
    as_chats: bool | None = False
    """Whether these become conversations, which the base's chat template writes
    (data.apply_chat_template). None: where the base has one.
    """
    unread_names: Mapping[str, Lines] = field(default_factory=dict)
    """Role → records with names of participants of this role, which the base's chat template does
    not write.
    """
    unanswered: Lines = field(default_factory=Lines)
    """Records with messages after the last answer."""
    sensitive: Mapping[str, Lines] = field(default_factory=dict)
    """Kind of secret or personal data → records with it; empty: there are none, or nobody asked for
    them.
    """
    duplicates: Lines = field(default_factory=Lines)
    """Copies of earlier records; none if statistics of the tokens report them."""
    near_empty: Lines = field(default_factory=Lines)
    """Records with an empty answer, likewise."""
    images: int = 0
    """Images, each as often as a sample has it, or a record where no tokens were counted."""
    good: int = 0
    """Records whose label says that the answer is a good one."""
    bad: int = 0
    """Records whose label says that it is not."""
    comparison: Comparison = field(default_factory=Comparison)
    """Of its records with each other, and with texts; nothing if nobody asked for it."""
    skipped: Skipped = field(default_factory=Skipped)
    may_skip: int | None = None
    """Lines that may be skipped for their images, where there were more; None: there were not."""
    unused_bounds: bool = False
    """The job gives bounds for the pixels of images, and no record has one."""

    @property
    def is_lasting(self) -> bool:
        """True if every host would report the same at any time."""
        grouped = [group.first for group in (*self.groups, *self.skipped.groups)]
        faults = [*self.faults, *grouped]
        return not self.unread and not any(fault.over_limit or fault.passing for fault in faults)

    def error(self, param: Param, filename: str) -> ErrorInfo | None:
        """The job's error, which names file, lines and reasons.

        None: every line can be trained on.
        """
        if not self.faults_total:
            return None
        return ErrorInfo(code=f"invalid_{param}", message=self.fault_text(filename), param=param)

    def fault_text(self, filename: str, also: str = "") -> str:
        """The message for a file with faults: how many lines, then each reason with its lines on a
        line of its own. `also`: a sentence for the end of the first line.
        """
        more = f" {also}" if also else ""
        if not self.faults[0].line:  # the fault is the whole file's
            return f"{filename}: {self.faults[0]}.{more}"
        total = self.faults_total
        if self.unread:
            which = f"{counted(total, self.word)} cannot be trained on, and the rest was not read"
        else:
            which = f"{total:,} of {counted(total + self.examples, self.word)} cannot be trained on"
        if self.may_skip is not None:
            which += f", and at most {self.may_skip:,} may be skipped for an image"
        groups = self.groups or [FaultGroup(fault) for fault in self.faults]
        reasons = [group.text(self.word) for group in groups[:SHOWN_FAULTS]]
        listed = sum(group.count for group in groups[:SHOWN_FAULTS])
        rest = [f"and {total - listed:,} more"] if listed < total else []
        return "\n".join([f"{filename}: {which}.{more}", *reasons, *rest])

    def fine_text(self, filename: str) -> str:
        """The message for a file without faults in the part that was read."""
        kind = self.shape or "OpenAI chat (messages) in JSON lines"
        read = counted(self.examples, self.word)
        if self.unread:
            return (
                f"{filename}: {kind}; the first {read} can be trained on. The rest was not "
                "read: a job reads it."
            )
        if self.skipped:
            skipped = counted(len(self.skipped.lines), self.word, "is", "are")
            return f"{filename}: {kind}; {read} can be trained on, {skipped} skipped."
        return (
            f"{filename}: {kind}; {read}, "
            f"{'and it is fine' if self.examples == 1 else 'all of them fine'}."
        )

    def messages(
        self,
        name: str,
        max_length: int,
        *,
        cut: bool = True,
        loss: LossOptions | None = None,
    ) -> Iterator[tuple[Literal["info", "warn"], str]]:
        """Level and sentence for events: what is trained on, what is left out and why.

        `name`: the file's. `cut`: False if statistics report what the cut does to samples.
        `loss`: options of the job's method; None: the defaults.
        """
        if self.shape:
            yield "info", f"{name}: {self.shape}."
        if self.unused:
            columns = "column is" if len(self.unused) == 1 else "columns are"
            yield (
                "warn",
                f"{name}: {len(self.unused)} {columns} not of this format, and left out: "
                f"{', '.join(self.unused)}.",
            )
        if self.skipped:
            yield "warn", self.skipped.text(name, self.word, self.examples)
        if self.joined:
            yield self._joined_message(name)
        if self.counts is not None:
            yield from self._count_messages(self.counts, name, max_length, cut=cut)
        if self.good or self.bad:
            yield from balance_messages(name, self.good, self.bad, loss)
        if self.images:
            tokens = self.counts.image_tokens if self.counts is not None else 0
            of_them = f", {counted(tokens, 'token')} of them" if tokens else ""
            yield "info", f"{name}: {counted(self.images, 'image')}{of_them}."
        if self.unused_bounds:
            yield (
                "warn",
                f"{name}: no {self.word} has an image, so data.min_pixels and data.max_pixels have "
                "no effect: leave them out.",
            )
        for role, lines in self.unread_names.items():
            yield (
                "warn",
                f"{name}: {lines.text(self.word)} with a name in messages of the role {role}. The "
                "base's chat template does "
                "not write it, so it has no effect: write it into the content, or leave it out.",
            )
        if self.unanswered.count:
            yield "warn", unanswered_text(name, self.word, self.unanswered)
        for kind, lines in self.sensitive.items():
            yield (
                "warn",
                f"{name}: {lines.text(self.word)} with {kind}, which the model may learn to "
                "repeat. Leave it out, or write a "
                "made-up one.",
            )
        for sentence in advice_on_records(
            name, self.word, self.examples, self.duplicates, self.near_empty
        ):
            yield "warn", sentence
        for sentence in self.comparison.advice(name, self.word):
            yield "warn", sentence

    def _joined_message(self, name: str) -> tuple[Literal["info", "warn"], str]:
        prompt, completion = self.joined
        if self.as_chats is not False:
            base = (
                "by the base's chat template"
                if self.as_chats
                else "for a base with a chat template, bare text for another"
            )
            text = (
                f"{prompt} and {completion} are the turns of conversations {base} "
                "(data.apply_chat_template)"
            )
            return "info", f"{name}: {text}."
        return (
            "warn",
            f"{name}: {prompt} and {completion} are joined as bare text, without the chat "
            "template by which chats and "
            "evaluation ask. For a base that has one, make conversations of them: "
            f"data: {{instruction: {prompt}, output: {completion}}}.",
        )

    def _count_messages(
        self, counts: Counts, name: str, max_length: int, *, cut: bool
    ) -> Iterator[tuple[Literal["info", "warn"], str]]:
        behind = ", each also behind the teacher's context," if self.has_context else ""
        if self.of_prompts:
            prompts = counted(counts.pairs or counts.samples, "prompt")
            yield (
                "info",
                f"{name}: {prompts}{behind} of {counts.tokens:,} tokens; the longest has "
                f"{counted(counts.longest, 'token')}.",
            )
            return
        pairs = f"{counted(counts.pairs, 'pair')} of answers"
        if self.has_context:
            pairs = f"{counted(counts.pairs, 'sample')}{behind}"
        of = pairs if counts.pairs else counted(counts.samples, "sample")
        whose = "" if self.is_bare and not (self.joined and self.as_chats) else "the assistant's "
        yield (
            "info",
            f"{name}: {of} of {counts.tokens:,} tokens, {counts.targets:,} of them {whose}to "
            f"learn; the longest sample has {counted(counts.longest, 'token')}.",
        )
        if counts.several.count:
            yield (
                "info",
                f"{name}: {counts.several.text(self.word, 'conversation')}, of which each answer "
                "is not the same once more "
                "follows, by the base's chat template: earlier answers are learned in samples of "
                "their own, behind what stands "
                "before them. training.train_on = 'last_assistant' learns the last ones alone.",
            )
        if counts.cut and cut:
            yield (
                "warn",
                f"{name}: {counted(counts.cut, 'sample', 'is', 'are')} cut to training.max_length "
                f"= {max_length} tokens; "
                f"{counted(counts.lost_tokens, 'token', 'is', 'are')} lost. A larger max_length "
                "keeps them.",
            )
        if counts.alike.count and cut:
            yield "warn", alike_text(name, counts.alike, self.word, max_length)
        if counts.dropped:
            is_pair = counts.pairs and not self.has_context
            left_out = counted(counts.dropped, "pair" if is_pair else "sample", "is", "are")
            yield (
                "warn",
                f"{name}: {left_out} left out: no assistant token within {max_length} tokens.",
            )


@dataclass(frozen=True)
class ExamineRequest:
    """A request to the process that examines files (examiner.py), with paths as that process sees
    them.
    """

    path: str
    sha256: str
    """Digest of the file at submission; a file with another one is at fault."""
    model_path: str
    tokenizer: str
    """Digest of the state of the base's tokenizer and chat template."""
    max_length: int
    progress_seconds: float = PROGRESS_SECONDS
    """Seconds from the beginning to the first ReadProgress, and from one to the next."""
    render_seconds: float = RENDER_SECONDS
    memory_bytes: int = MEMORY_BYTES
    pairs: bool = False
    """Lines hold pairs of answers."""
    tokens: str = ""
    """Folder that keeps the tokens of files without faults; empty: tokens are not kept."""
    files: tuple[str, ...] = ()
    """Files of the folder `path`, in their order; empty: `path` is a file."""
    options: TokenOptions = DEFAULT
    cpu_seconds: float = CHECK_SECONDS
    """Processor time for the whole request, after which the process is killed."""
    show: RecordRange | None = None
    """Samples to return in place of a report. The file's digest is not checked."""
    measure: Measure | None = None
    """Statistics to return in place of a report. Files whose tokens are not kept are tokenised."""


@dataclass(frozen=True)
class ReadProgress:
    """The part of a file that has been read."""

    lines: int
    share: float
    """The share of its bytes, in [0, 1]."""

    def message(self, param: Param) -> str:
        return (
            f"Validating {param.replace('_', ' ')}: {self.lines:,} lines "
            f"({int(100 * self.share)} %)."
        )


@dataclass(frozen=True)
class ExamineReply:
    """A reply with one of these five. Replies with `progress` come first if reading takes long."""

    report: DataReport | None = None
    error: ErrorInfo | None = None
    """The base's tokenizer cannot be used."""
    progress: ReadProgress | None = None
    page: SamplePage | None = None
    """The samples that `show` asks for."""
    statistics: DataStatistics | None = None
    """The statistics that `measure` asks for."""


REQUEST = TypeAdapter(ExamineRequest)
REPLY = TypeAdapter(ExamineReply)


class Findings:
    """Collects faults while a file is read, in the order of its lines.

    Keeps the first SHOWN_FAULTS and counts the rest.
    """

    def __init__(self, *, strict_images: bool = True) -> None:
        """`strict_images`: lines with pictures that cannot be used are at fault; else they are
        skipped.
        """
        self._strict_images = strict_images
        self._faults: list[Fault] = []
        self._groups = FaultGroups()
        self._skipped_faults: list[Fault] = []
        self._skipped_groups = FaultGroups()
        self._may_skip: int | None = None
        self.skipped_lines: list[int] = []
        """Numbers of the lines that are skipped for their pictures."""
        self.faults_total = 0
        self.examples = 0
        self.images = 0
        self.labels = Counter[bool]()
        """Label → records that have it."""

    def fault(self, fault: Fault) -> bool:
        """Note a fault. Returns False if its line is skipped."""
        if self.skips(fault):
            self.skipped_lines.append(fault.line)
            self._skipped_groups.add(fault)
            if len(self._skipped_faults) < SHOWN_FAULTS:
                self._skipped_faults.append(fault)
            return False
        self.faults_total += 1
        if len(self._faults) < SHOWN_FAULTS:
            self._faults.append(fault)
        self._groups.add(fault)
        return True

    def skips(self, fault: Fault) -> bool:
        """Whether the fault's line is skipped."""
        return fault.of_image and not self._strict_images

    @property
    def skipped(self) -> Skipped:
        return Skipped(tuple(self.skipped_lines), self._skipped_groups.listed)

    @property
    def records(self) -> int:
        """The number of records so far."""
        return self.examples + self.faults_total + len(self.skipped_lines)

    def conclude(self) -> None:
        """At the end of the file: too many lines that are skipped are at fault."""
        most = may_skip(self.records)
        if len(self.skipped_lines) <= most:
            return
        together = sorted([*self._faults, *self._skipped_faults], key=lambda fault: fault.line)
        self._faults = together[:SHOWN_FAULTS]
        self.faults_total += len(self.skipped_lines)
        self._may_skip = most

    def report(
        self,
        shape: FileFormat,
        counts: Counts | None = None,
        *,
        unread: bool = False,
        applied: Applied = False,
    ) -> DataReport:
        """The report, at the end of the file or where reading stopped.

        `applied`: data.apply_chat_template.
        """
        if not self.records:
            self.fault(Fault(0, "", "the file holds no examples"))
        too_many = self._may_skip is not None
        also = self._skipped_groups.listed if too_many else ()
        usual = (
            shape.format in (None, Format.CHAT)
            and shape.container is Container.LINES
            and shape.compression is None
        )
        return DataReport(
            self.examples,
            self._faults,
            self.faults_total,
            None if self.faults_total else counts,
            unread,
            [*self._groups.listed, *also],
            shape="" if usual else str(shape),
            unused=shape.unused,
            columns=shape.columns,
            word=shape.word,
            is_bare=shape.format in (Format.TEXT, Format.PROMPT_COMPLETION),
            joined=shape.joined,
            as_chats=None if applied == "auto" else applied,
            of_prompts=shape.format is Format.PROMPTS,
            images=self.images,
            good=self.labels[True],
            bad=self.labels[False],
            skipped=Skipped() if too_many else self.skipped,
            may_skip=self._may_skip,
        )


def check_lines(
    path: Path,
    files: Sequence[str] = (),
    *,
    columns: Columns = AS_THEY_ARE,
    pairs: bool | None = None,
    records: Records | None = None,
    sensitive: bool = False,
    comparison: RecordComparison | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> DataReport:
    """Report on a data file without counting tokens. Raises OSError if it cannot be read.

    `files`: those of the folder `path`. `columns`: their names of columns. `pairs`: it must hold
    pairs of answers, or must not; None: either is accepted. `records`: receives every record
    without a fault. `sensitive`: secrets and personal data are looked for. `comparison`: receives
    them too, and what it finds is in the report. `stop`: is called after each record; True ends
    reading.
    """
    findings = Findings(strict_images=columns.strict_images)
    records = records or Records()
    unanswered = Lines()
    kinds = dict[str, Lines]()
    stopped = False
    with open_data(path, files, columns) as reader:
        for number, record in reader if pairs is None else for_method(reader, pairs=pairs):
            if isinstance(record, Fault):
                findings.fault(record)
            else:
                findings.examples += 1
                findings.images += images_of(record)
                if (label := label_of(record)) is not None:
                    findings.labels[label] += 1
                is_copy = records.add(number, record)
                if comparison is not None:
                    comparison.add(number, record, is_copy=is_copy)
                unanswered = unanswered.with_line(number) if is_unanswered(record) else unanswered
                for kind in sensitive_kinds(record) if sensitive else ():
                    kinds[kind] = kinds.get(kind, Lines()).with_line(number)
            if stopped := stop():
                break
    records.word = reader.shape.word
    if not stopped:
        findings.conclude()
    report = findings.report(reader.shape, unread=stopped, applied=columns.apply_chat_template)
    copies = records.duplicates
    near_empty = records.near_empty
    return replace(
        report,
        unanswered=unanswered,
        sensitive=kinds,
        duplicates=copies,
        near_empty=near_empty,
        comparison=Comparison() if comparison is None else comparison.finish(),
    )


def for_method(
    records: Iterable[tuple[int, Record | Fault]], *, pairs: bool
) -> Iterator[tuple[int, Record | Fault]]:
    """The records, with a fault for each that the method cannot train on.

    `pairs`: the method compares two answers.
    """
    for number, record in records:
        fits = isinstance(record, Fault) or isinstance(record, Pair) == pairs
        yield number, (record if fits else Fault(number, "", _ONE_ANSWER if pairs else TWO_ANSWERS))


def answers(
    records: Iterable[tuple[int, Record | Fault]],
) -> Iterator[tuple[int, Record | Fault]]:
    """Both answers of every numbered pair, the preferred one first, so that pair i becomes samples
    2i and 2i + 1; or its fault.
    """
    for number, record in for_method(records, pairs=True):
        samples = (record.preferred, record.rejected) if isinstance(record, Pair) else (record,)
        yield from ((number, sample) for sample in samples)
