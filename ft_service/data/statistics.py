"""What data files are like in numbers, before anything is trained on them, and what to change because of that. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Literal

from ft_service.data.records import Record
from ft_service.spec import DataFileRef, JobSpec, TrainingOptions

SHOWN_LINES = 5
"""Lines that are named of those that share a trait."""
NEAR_EMPTY = 1
"""Learned tokens of an answer beside the end of its turn, at most, that make it nearly empty."""
FEW_SAMPLES = 10
FEW_STEPS = 20
"""Below these a training hardly changes anything."""
MUCH_PADDING = 0.25
LITTLE_LEARNED = 0.01
"""Of the tokens."""
FEW_VALIDATED = 8


@dataclass(frozen=True)
class Lines:
    """Records that share a trait."""

    count: int = 0
    first: tuple[int, ...] = ()
    """Numbers of the first ones in their file."""

    def joined_by(self, number: int) -> Lines:
        first = (*self.first, number) if len(self.first) < SHOWN_LINES else self.first
        return Lines(self.count + 1, first)

    def text(self, word: str) -> str:
        """`4 samples (lines 2, 3, 7, 9)`. `word`: what a record of the file is called."""
        shown = ", ".join(map(str, self.first)) + (", …" if self.count > len(self.first) else "")
        return f"{_samples(self.count)} ({word}{'s' if self.count > 1 else ''} {shown})"


@dataclass(frozen=True)
class Spread:
    """How a count is spread over samples. A percentile is one of the counts."""

    least: int = 0
    mean: float = 0.0
    median: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0


@dataclass(frozen=True)
class Bucket:
    """Samples of so many tokens, both ends included."""

    begin: int
    end: int
    samples: int


@dataclass(frozen=True)
class FileStatistics:
    """The samples of one file, or of the part of it that is for training or validation."""

    name: str
    word: str
    """What one of its records is called."""
    samples: int
    """That are trained on, or validated with; a pair is one."""
    tokens: int
    """Of these, once they were cut; a pair's of both answers."""
    targets: int
    """Of these tokens, those that the model is trained to produce."""
    lengths: Spread
    """Tokens of every sample, before any were cut; each answer of a pair is one."""
    learned: Spread
    """Targets of every sample, likewise."""
    histogram: tuple[Bucket, ...]
    """Of the lengths, all of one width."""
    cut: Lines = Lines()
    """They lose tokens to training.max_length."""
    lost_tokens: int = 0
    dropped: Lines = Lines()
    """They are left out: no target is left of them."""
    duplicates: Lines = Lines()
    """The same tokens stand further up."""
    near_empty: Lines = Lines()
    """NEAR_EMPTY learned tokens beside the end of the turn, or fewer."""


@dataclass(frozen=True)
class Statistics:
    """What a job trains on, and validates with."""

    training: FileStatistics
    validation: FileStatistics | None
    overlap: Lines
    """Samples of the validation file whose very tokens are trained on."""
    items: int
    """That training.batch_size counts: samples or pairs, of documents rows of training.max_length tokens."""
    steps: int
    """Optimizer steps."""
    trained_tokens: int
    """Over all steps, about."""
    padding_saved: float
    """Share of padding, in [0, 1), were each batch padded to its longest sample: packed rows have none."""
    seconds: float | None = None
    """That training takes by the plan; None: the machine's figures are not known."""
    flops: float | None = None
    """Of the whole training by the plan, over all ranks."""


@dataclass(frozen=True)
class Measure:
    """What is to be measured: files as a job trains on them."""

    training_file: DataFileRef
    validation_file: DataFileRef | None
    training: TrainingOptions
    validation_split: float | None = None
    seed: int = 0

    @property
    def is_of_one_file(self) -> bool:
        """Whether the two files are the same."""
        return self.validation_file is not None and self.validation_file.sha256 == self.training_file.sha256

    @classmethod
    def of(cls, spec: JobSpec) -> Measure:
        return cls(spec.training_data, spec.validation_data, spec.training, spec.validation_split, spec.seed)


class Records:
    """The records of a file as they are counted without a base: how many, and which are the same. 8 bytes a record."""

    def __init__(self, name: str) -> None:
        self.name, self.word = name, "line"
        self.count = 0
        self._contents: dict[int, int] = {}
        self._again = Lines()

    def add(self, number: int, record: Record) -> None:
        content = int.from_bytes(hashlib.blake2b(repr(record).encode(), digest_size=8).digest())
        self.count += 1
        if self._contents.setdefault(content, number) != number:
            self._again = self._again.joined_by(number)

    def statistics(self) -> FileStatistics:
        """Nothing of tokens."""
        none = Spread()
        return FileStatistics(self.name, self.word, self.count, 0, 0, none, none, (), duplicates=self._again)

    def overlap(self, other: Records) -> Lines:
        """Records that another file has too. Of equal ones the first counts."""
        found = Lines()
        for content, number in self._contents.items():
            found = found.joined_by(number) if content in other._contents else found
        return found


def without_base(training: Records, validation: Records | None, options: TrainingOptions) -> Statistics:
    """What is known of a job's files before any tokenizer has seen them."""
    steps = options.max_steps or options.epochs * -(-training.count // options.batch)
    overlap = validation.overlap(training) if validation is not None else Lines()
    held_out = validation.statistics() if validation is not None else None
    return Statistics(training.statistics(), held_out, overlap, training.count, steps, trained_tokens=0, padding_saved=0.0)


Level = Literal["info", "warn"]


def messages(found: Statistics, asked: Measure) -> Iterator[tuple[Level, str]]:
    """Level and sentence for events, beside what reports on the files have said: warnings last."""
    training, validation = found.training, found.validation
    if asked.validation_split is not None and validation is not None:
        yield (
            "info",
            f"{validation.samples:,} of the {training.samples + validation.samples:,} samples of {training.name} are set aside "
            f"for validation (validation_split {asked.validation_split:g}, seed {asked.seed}).",
        )
    lengths = training.lengths
    if lengths.most > asked.training.max_length and not training.cut.count:
        yield (
            "info",
            f"{training.name}: what is longer than training.max_length = {asked.training.max_length} tokens is split into "
            "windows, and nothing is lost.",
        )
    if found.items < training.samples:
        yield "info", f"{training.name}: {training.samples:,} samples fill {found.items:,} rows, which batch_size counts."
    yield (
        "info",
        f"{found.steps:,} steps over {_samples(training.samples)}, half of them no longer than {lengths.median:,} tokens, 99 % "
        f"no longer than {lengths.p99:,}; {share(training.targets, training.tokens)} of all tokens are learned.",
    )
    for sentence in advice(found, asked):
        yield "warn", sentence


def advice(found: Statistics, asked: Measure) -> Iterator[str]:
    """What to change, a sentence each: the lines or the option at fault, and what to do. Nothing where all is well."""
    for file in (found.training, found.validation):
        if file is not None:
            yield from _about(file)
    yield from _about_both(found, asked)
    yield from _about_steps(found, asked.training)


def _about(file: FileStatistics) -> Iterator[str]:
    if file.cut.count:
        lengths = file.lengths
        near = f", {lengths.p99} one in a hundred" if lengths.p99 < lengths.most else ""
        yield (
            f"{file.name}: {file.cut.text(file.word)} cut, {file.lost_tokens:,} tokens lost. training.max_length: "
            f"{lengths.most} would cut none{near}."
        )
    if file.duplicates.count:
        yield (
            f"{file.name}: {file.duplicates.text(file.word)} with the very tokens of one further up, learned as often as they "
            "stand there. Remove them, unless that is meant."
        )
    if 0 < file.near_empty.count <= file.samples // 2:  # more of them, and short answers are what the file is about
        yield (
            f"{file.name}: {file.near_empty.text(file.word)} with an answer of at most {NEAR_EMPTY} token. Look at them with "
            "`ft data show`, and remove those whose answer is missing."
        )
    if file.targets < LITTLE_LEARNED * file.tokens:
        yield (
            f"{file.name}: only {share(file.targets, file.tokens)} of its tokens are learned. Shorten the prompts, or learn "
            "more of each conversation (training.train_on, weight)."
        )


def _about_both(found: Statistics, asked: Measure) -> Iterator[str]:
    validation = found.validation
    if validation is not None and asked.is_of_one_file:
        yield (
            f"{validation.name} is the training file, so that the validation loss says nothing of new samples. Give another "
            "validation_file, or validation_split in its place."
        )
    elif found.overlap.count and validation is not None:
        yield (
            f"{validation.name}: {found.overlap.text(validation.word)} in {found.training.name} too, so that the validation "
            "loss looks better than it is. Remove them from one of the two."
        )
    if validation is not None and validation.samples < FEW_VALIDATED:
        where = "Raise validation_split" if asked.validation_split is not None else f"Add to {validation.name}"
        yield f"Validation has only {_samples(validation.samples)}, so that its loss jumps about. {where}."


def _about_steps(found: Statistics, options: TrainingOptions) -> Iterator[str]:
    samples, steps = found.training.samples, found.steps
    if samples < FEW_SAMPLES:
        yield f"{found.training.name}: only {_samples(samples)} to train on. Give at least {FEW_SAMPLES}, better hundreds."
    elif options.batch > samples:
        yield f"training.batch_size = {options.batch}: every step takes all {samples} samples. Lower it."
    elif steps < FEW_STEPS:
        yield (
            f"Training has only {steps} steps of {options.batch} samples. Lower training.batch_size, or raise "
            f"{'training.n_epochs' if options.max_steps is None else 'training.max_steps'}."
        )
    if found.validation is not None and options.eval_steps is not None and options.eval_steps > steps:
        yield f"training.eval_steps = {options.eval_steps}: of {steps} steps, so that validation is only at the end. Lower it."
    if not options.packing and found.padding_saved > MUCH_PADDING:
        yield (
            f"training.packing = false: about {found.padding_saved:.0%} of what is computed is padding. Give packing: true if "
            "the base allows it, or group_by_length: true."
        )


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"


def share(part: float, whole: float) -> str:
    """A percentage, exact enough to tell little from nothing."""
    portion = part / whole if whole else 0.0
    return f"{100 * portion:.0f} %" if portion >= 0.1 else f"{100 * portion:.2g} %"


def bars(buckets: Sequence[Bucket], width: int = 40) -> list[tuple[str, str, str]]:
    """A histogram as rows, from the first that is not empty: tokens, samples, and a bar of at most `width` signs."""
    buckets = list(dropwhile(lambda bucket: not bucket.samples, buckets))
    most = max((bucket.samples for bucket in buckets), default=0)
    return [
        (f"{bucket.begin:,} to {bucket.end:,}", f"{bucket.samples:,}", "█" * -(-bucket.samples * width // most) if most else "")
        for bucket in buckets
    ]
