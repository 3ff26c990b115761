"""Statistics of data files before training, and advice from them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Literal

from ft_service.data.sample_kinds import Conversation, Pair, Record
from ft_service.spec import DataFileRef, JobSpec, TrainingOptions
from ft_service.wording import counted

SHOWN_LINES = 5
"""Lines that a message names of those with the same property."""
NEAR_EMPTY = 1
"""An answer with at most this many learned tokens, not counting the end of its turn, is nearly
empty.
"""
FEW_SAMPLES = 10
FEW_STEPS = 20
"""Fewer samples or steps hardly change a model."""
MUCH_PADDING = 0.25
LITTLE_LEARNED = 0.01
"""Shares of the tokens."""
FEW_VALIDATED = 8
MOST_COMPARED = 1_000_000
"""Records of a file whose contents are remembered to find copies of them, in some 150 MB."""


@dataclass(frozen=True)
class Lines:
    """Records with a common property."""

    count: int = 0
    first: tuple[int, ...] = ()
    """Numbers of the first records in their file."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Lines:
        """Records by all their numbers."""
        return cls(len(numbers), tuple(int(number) for number in numbers[:SHOWN_LINES]))

    def with_line(self, number: int) -> Lines:
        first = (*self.first, number) if len(self.first) < SHOWN_LINES else self.first
        return Lines(self.count + 1, first)

    def text(self, word: str, what: str = "sample") -> str:
        """The records as text: `4 samples (lines 2, 3, 7, 9)`.

        `word`: the name of the file's records.
        """
        shown = ", ".join(map(str, self.first)) + (", …" if self.count > len(self.first) else "")
        return f"{counted(self.count, what)} ({word}{'s' if self.count > 1 else ''} {shown})"


@dataclass(frozen=True)
class Comparison:
    """What was found when records were compared with each other, and with the texts that a model is
    measured by (ft_service/data/record_comparison.py).
    """

    near_copies: Lines = Lines()
    """Records that are nearly copies of an earlier one, without exact copies."""
    overlaps: Mapping[str, Lines] = field(default_factory=dict)
    """Where a text is → records that share words with it."""
    compared: int | None = None
    """The first records alone were compared, so many; None: all were, or none."""

    def advice(self, name: str, word: str) -> Iterator[str]:
        """Advice on what was found. `name`: the file's; `word`: the name of its records."""
        if self.near_copies.count:
            yield (
                f"{name}: {self.near_copies.text(word)} nearly the same as an earlier one. `ft "
                "data check --drop OUT` writes the file without them."
            )
        for where, lines in self.overlaps.items():
            yield (
                f"{name}: {lines.text(word)} with what {where} asks, so that scores there look "
                "better than they are. `ft data check --drop OUT` writes the file without them."
            )
        if self.compared is not None and (self.near_copies.count or self.overlaps):
            yield f"{name}: only the first {self.compared:,} of its records were compared."


@dataclass(frozen=True)
class Spread:
    """The distribution of a count over samples.

    Percentiles are counts of samples, not interpolated.
    """

    least: int = 0
    mean: float = 0.0
    median: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0


@dataclass(frozen=True)
class Bucket:
    """A bucket of a histogram: samples of `begin` to `end` tokens, both included."""

    begin: int
    end: int
    samples: int


@dataclass(frozen=True)
class FileStatistics:
    """Statistics of one file, or of its part for training or validation."""

    name: str
    word: str
    """The name of the file's records in messages."""
    samples: int
    """Samples that are trained on or validated with; a pair is one."""
    tokens: int
    """Tokens of these samples after the cut, of both answers of a pair."""
    targets: int
    """Tokens among these that the model is trained to produce."""
    lengths: Spread
    """Tokens of each sample before the cut; each answer of a pair is a sample."""
    learned: Spread
    """Targets of each sample before the cut."""
    histogram: tuple[Bucket, ...]
    """Histogram of the lengths, with buckets of equal width."""
    cut: Lines = Lines()
    """Samples that are cut to training.max_length tokens."""
    lost_tokens: int = 0
    dropped: Lines = Lines()
    """Samples that are left out because the cut leaves no target."""
    alike: Lines = Lines()
    """Pairs that are left out because their two answers are the same tokens after the cut."""
    duplicates: Lines = Lines()
    """Samples with the same tokens as an earlier one."""
    near_empty: Lines = Lines()
    """Samples whose answer is nearly empty (NEAR_EMPTY)."""
    skipped: Lines = Lines()
    """Records of the whole file that are left out for an image that cannot be used."""
    beyond_one_rank: Lines = Lines()
    """Samples that are longer than one rank has room for (`Measure.one_rank`)."""


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of a job's training and validation data."""

    training: FileStatistics
    validation: FileStatistics | None
    overlap: Lines
    """Samples of the validation file with the same tokens as a training sample."""
    items: int
    """Units that training.batch_size counts: samples or pairs; for documents, rows of
    training.max_length tokens.
    """
    steps: int
    """Optimizer steps."""
    trained_tokens: int
    """Approximate number of tokens over all steps."""
    padding_saved: float
    """The share of padding, in [0, 1), if each batch were padded to its longest sample; packed rows
    have no padding.
    """
    seconds: float | None = None
    """Estimated duration of training; None: the machine's speed is not known."""
    flops: float | None = None
    """Estimated operations of the whole training, over all ranks."""
    comparison: Comparison = field(default_factory=Comparison)
    """Of the training file's records with each other, with the validation file, with the prompts of
    `evaluation`, and with the suites of `ft eval`.
    """


@dataclass(frozen=True)
class Measure:
    """A request for the statistics of a job's files."""

    training_file: DataFileRef
    validation_file: DataFileRef | None
    training: TrainingOptions
    validation_split: float | None = None
    seed: int = 0
    at_context: bool = False
    """training.max_length is the base's context, to which it was limited."""
    prompts: tuple[str, ...] = ()
    """Texts of the prompts of `evaluation` that the job itself gives."""
    one_rank: int | None = None
    """Tokens of the longest sample that a rank has room for by itself; None: it has for all."""

    @property
    def is_of_one_file(self) -> bool:
        """True if training and validation file have the same contents."""
        return (
            self.validation_file is not None
            and self.validation_file.sha256 == self.training_file.sha256
        )

    @classmethod
    def of(cls, spec: JobSpec, one_rank: int | None = None) -> Measure:
        assert spec.training_data is not None, "the job has a training file"
        limited = "training.max_length" in spec.chosen
        given = spec.evaluation.given if spec.evaluation is not None else ()
        return cls(
            spec.training_data,
            spec.validation_data,
            spec.training,
            spec.validation_split,
            spec.seed,
            limited,
            tuple(prompt.text for prompt in given),
            one_rank,
        )


def items_of_steps(steps: int, batch: int, items: int) -> int:
    """The units of training.batch_size that a number of steps takes: the last step of an epoch
    takes those that are left. `items`: those of an epoch, at least 1.
    """
    epochs, rest = divmod(steps, -(-items // batch))
    return epochs * items + min(rest * batch, items)


class Records:
    """Counts the records of a file, and finds copies (of the first MOST_COMPARED) and empty
    answers, without a base's tokenizer.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.word = "line"
        self.count = 0
        self.duplicates = self.near_empty = Lines()
        self._contents: dict[int, int] = {}

    def add(self, number: int, record: Record) -> bool:
        """Count a record. Returns whether it is a copy of an earlier one."""
        content = int.from_bytes(hashlib.blake2b(repr(record).encode(), digest_size=8).digest())
        self.count += 1
        is_copy = content in self._contents
        if is_copy:
            self.duplicates = self.duplicates.with_line(number)
        elif len(self._contents) < MOST_COMPARED:
            self._contents[content] = number
        answers = (record.preferred, record.rejected) if isinstance(record, Pair) else (record,)
        if any(isinstance(answer, Conversation) and answer.is_without_answer for answer in answers):
            self.near_empty = self.near_empty.with_line(number)
        return is_copy

    def statistics(self) -> FileStatistics:
        """Statistics without numbers of tokens."""
        found = FileStatistics(self.name, self.word, self.count, 0, 0, Spread(), Spread(), ())
        return replace(found, duplicates=self.duplicates, near_empty=self.near_empty)

    def overlap(self, other: Records) -> Lines:
        """Records that another file has too, without duplicates."""
        common = [
            number for content, number in self._contents.items() if content in other._contents
        ]
        return Lines.of(common)


def without_base(
    training: Records, validation: Records | None, options: TrainingOptions
) -> DataStatistics:
    """The statistics of a job's files that need no tokenizer."""
    steps = options.max_steps or options.epochs * -(-training.count // options.batch)
    overlap = validation.overlap(training) if validation is not None else Lines()
    held_out = validation.statistics() if validation is not None else None
    return DataStatistics(
        training.statistics(),
        held_out,
        overlap,
        training.count,
        steps,
        trained_tokens=0,
        padding_saved=0.0,
    )


Level = Literal["info", "warn"]


def messages(found: DataStatistics, asked: Measure) -> Iterator[tuple[Level, str]]:
    """Level and sentence for events, in addition to those of DataReport; warnings last."""
    training = found.training
    validation = found.validation
    if asked.validation_split is not None and validation is not None:
        yield (
            "info",
            f"{validation.samples:,} of the {training.samples + validation.samples:,} samples of "
            f"{training.name} are set aside "
            f"for validation (validation_split {asked.validation_split:g}, seed {asked.seed}).",
        )
    lengths = training.lengths
    if lengths.most > asked.training.max_length and not training.cut.count:
        yield (
            "info",
            f"{training.name}: what is longer than training.max_length = "
            f"{asked.training.max_length} tokens is split into "
            "windows, and nothing is lost.",
        )
    if found.items < training.samples:
        yield (
            "info",
            f"{training.name}: {training.samples:,} samples fill {counted(found.items, 'row')}, "
            "which batch_size counts.",
        )
    yield (
        "info",
        f"Half of the samples have at most {lengths.median:,} tokens, 99 % at most "
        f"{lengths.p99:,}; {share(training.targets, training.tokens)} of all tokens are learned, "
        f"in {counted(found.steps, 'step')}.",
    )
    for sentence in advice(found, asked):
        yield "warn", sentence


def advice(found: DataStatistics, asked: Measure) -> Iterator[str]:
    """Sentences of advice, each with the lines or the option to change; none if there is nothing to
    change.
    """
    for file in (found.training, found.validation):
        if file is not None:
            yield from _advice_on_cuts(file, asked)
            if file.alike.count:
                yield alike_text(file.name, file.alike, file.word, asked.training.max_length)
            yield from _advice_on_samples(file)
    yield from found.comparison.advice(found.training.name, found.training.word)
    yield from _advice_on_validation(found, asked)
    yield from _advice_on_steps(found, asked.training)


def _advice_on_cuts(file: FileStatistics, asked: Measure) -> Iterator[str]:
    if file.cut.count:
        lengths = file.lengths
        near = f", {lengths.p99} one in a hundred" if lengths.p99 < lengths.most else ""
        cut = file.cut.text(file.word)
        lost = counted(file.lost_tokens, "token")
        if asked.at_context:
            yield (
                f"{file.name}: {cut} cut, {lost} lost. The base's context is "
                f"{asked.training.max_length:,} tokens: shorten or "
                "split them, or take a base with a longer one."
            )
        else:
            yield f"{file.name}: {cut} cut, {lost} lost. training.max_length: {lengths.most} would cut none{near}."


def alike_text(name: str, alike: Lines, word: str, max_length: int) -> str:
    """The advice on pairs whose two answers are the same tokens. `name`: the file's."""
    return (
        f"{name}: {alike.text(word, 'pair')} whose two answers are the same within "
        f"training.max_length = {max_length} tokens, "
        "left out, since nothing is learned from them. Raise it if the answers differ after that."
    )


def unanswered_text(name: str, word: str, lines: Lines) -> str:
    """The advice on records that end with other messages than an answer.

    `name`: the file's; `word`: that of its records.
    """
    return (
        f"{name}: {lines.text(word)} with messages after the last answer, of which nothing is "
        "learned. Add the answer if it is "
        "missing, or leave those messages out."
    )


def advice_on_records(
    name: str, word: str, samples: int, duplicates: Lines, near_empty: Lines
) -> Iterator[str]:
    """Advice on copies and on empty answers.

    `name`: the file's; `word`: the name of its records; `samples`: their number.
    """
    if duplicates.count:
        yield (
            f"{name}: {duplicates.text(word)} with the same tokens as an earlier one, learned "
            "once for each copy. Remove them, "
            "unless that is intended."
        )
    if (
        0 < near_empty.count <= samples // 2
    ):  # more of them, and short answers are what the file is about
        yield (
            f"{name}: {near_empty.text(word)} with an answer of at most {NEAR_EMPTY} token. Look "
            "at them with `ft data show`, "
            "and remove those whose answer is missing."
        )


def _advice_on_samples(file: FileStatistics) -> Iterator[str]:
    yield from advice_on_records(
        file.name, file.word, file.samples, file.duplicates, file.near_empty
    )
    if file.targets < LITTLE_LEARNED * file.tokens:
        yield (
            f"{file.name}: only {share(file.targets, file.tokens)} of its tokens are learned. "
            "Shorten the prompts, or learn "
            "more of each conversation (training.train_on, weight)."
        )


def _advice_on_validation(found: DataStatistics, asked: Measure) -> Iterator[str]:
    validation = found.validation
    if validation is not None and asked.is_of_one_file:
        yield (
            f"{validation.name} is the training file, so the validation loss says nothing about "
            "new samples. Give another "
            "validation_file, or validation_split in its place."
        )
    elif found.overlap.count and validation is not None:
        yield (
            f"{validation.name}: {found.overlap.text(validation.word)} in {found.training.name} "
            "too, so the validation "
            "loss looks better than it is. Remove them from one of the two."
        )
    if validation is not None and validation.samples < FEW_VALIDATED:
        where = (
            "Raise validation_split"
            if asked.validation_split is not None
            else f"Add to {validation.name}"
        )
        yield f"Validation has only {counted(validation.samples, 'sample')}, so its loss is noisy. {where}."


def _advice_on_steps(found: DataStatistics, options: TrainingOptions) -> Iterator[str]:
    samples = found.training.samples
    steps = found.steps
    if samples < FEW_SAMPLES:
        few = counted(samples, "sample")
        yield f"{found.training.name}: only {few} to train on. Give at least {FEW_SAMPLES}, better hundreds."
    elif options.batch > samples:
        yield f"training.batch_size = {options.batch}: every step takes all {samples} samples. Lower it."
    elif steps < FEW_STEPS:
        yield (
            f"Training has only {counted(steps, 'step')} of {counted(options.batch, 'sample')}. "
            "Lower "
            "training.batch_size, or raise "
            f"{'training.n_epochs' if options.max_steps is None else 'training.max_steps'}."
        )
    if (
        found.validation is not None
        and options.eval_steps is not None
        and options.eval_steps > steps
    ):
        yield (
            f"training.eval_steps = {options.eval_steps}: of {counted(steps, 'step')}, so that "
            "validation is only at the end. "
            "Lower it."
        )
    if not options.packing and found.padding_saved > MUCH_PADDING:
        yield (
            f"training.packing = false: about {found.padding_saved:.0%} of what is computed is "
            "padding. Give packing: true if "
            "the base allows it, or group_by_length: true."
        )


def share(part: float, whole: float) -> str:
    """A percentage, with two significant digits if it is small."""
    portion = part / whole if whole else 0.0
    return f"{100 * portion:.0f} %" if portion >= 0.1 else f"{100 * portion:.2g} %"


def bars(buckets: Sequence[Bucket], width: int = 40) -> list[tuple[str, str, str]]:
    """A histogram as rows (tokens, samples, bar of at most `width` characters), from the first
    bucket that is not empty.
    """
    buckets = list(dropwhile(lambda bucket: not bucket.samples, buckets))
    most = max((bucket.samples for bucket in buckets), default=0)
    return [
        (
            f"{bucket.begin:,} to {bucket.end:,}",
            f"{bucket.samples:,}",
            "█" * -(-bucket.samples * width // most) if most else "",
        )
        for bucket in buckets
    ]
