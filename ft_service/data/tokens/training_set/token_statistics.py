"""Statistics of token sets as they are used in training."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import ArrayLike

from ft_service.data.statistics import (
    NEAR_EMPTY,
    Bucket,
    DataStatistics,
    FileStatistics,
    Lines,
    Measure,
    Spread,
    items_of_steps,
)
from ft_service.data.tokens.token_set import TokenSet, line_numbers
from ft_service.data.tokens.training_set.split import Split, content_digests, set_aside
from ft_service.data.tokens.training_set.windows import are_whole, in_rows, in_windows
from ft_service.spec import TrainingOptions

BUCKETS = 12
_ROUND = (1, 2, 4, 5, 8)
_ENDING = 3
"""Tokens at the end of a turn, at most: end of turn, white space, end of text."""
_TURN_SAMPLES = 1000
"""Samples from which the tokens at the end of turns are found."""


class RecordGroup:
    """Records of a file, with the properties that do not depend on which of them are used."""

    def __init__(self, samples: TokenSet, word: str, name: str, *, pairs: bool) -> None:
        """`samples`: all uncut samples of the file."""
        self.together = 2 if pairs else 1
        self.samples = samples
        self.word = word
        self.name = name
        self.contents = content_digests(samples)
        self.ending = _ending(samples)
        self.is_whole = not pairs and are_whole(samples)
        """Samples are split into windows instead of cut."""

    def measured(
        self, chosen: np.ndarray, max_length: int, one_rank: int | None = None
    ) -> FileStatistics:
        """The statistics of some records. `chosen`: bool [records]; `one_rank`: as of `Measure`."""
        max_length = sys.maxsize if self.is_whole else max_length
        skipped = self.samples.skipped.lines
        numbers = line_numbers(np.flatnonzero(chosen), skipped)
        samples = self.samples.some(chosen[self.samples.records])
        targets = samples.targets_within(max_length)
        lengths = samples.lengths
        kept = samples.lengths_within(max_length)
        with_targets = (targets > 0).reshape(-1, self.together).all(axis=1)
        alike = (
            samples.alike(max_length)
            if self.together == 2
            else np.zeros(len(samples) // self.together, np.bool_)
        )
        used = with_targets & ~alike
        of_samples = used.repeat(self.together)

        def of_any(which: np.ndarray) -> Lines:
            """The records of which one of the samples is chosen. `which`: bool [samples]."""
            return Lines.of(line_numbers(np.unique(samples.records[which]), skipped).tolist())

        _, first = np.unique(self.contents[chosen], return_index=True)
        again = np.ones(len(numbers), np.bool_)
        again[first] = False
        return FileStatistics(
            name=self.name,
            word=self.word,
            samples=int(np.count_nonzero(used)),
            tokens=int(kept[of_samples].sum()),
            targets=int(targets[of_samples].sum()),
            lengths=spread(lengths),
            learned=spread(samples.target_counts),
            histogram=histogram(lengths),
            cut=of_any(lengths > max_length),
            lost_tokens=int((lengths - kept).sum()),
            dropped=of_any(~with_targets.repeat(self.together)),
            alike=_lines(numbers, alike) if self.together == 2 else Lines(),
            duplicates=_lines(numbers, again),
            near_empty=of_any(samples.target_counts <= NEAR_EMPTY + self.ending),
            skipped=Lines.of(skipped),
            beyond_one_rank=Lines()
            if one_rank is None
            else of_any((lengths > one_rank) & of_samples),
        )


def measure(
    asked: Measure, training: RecordGroup, validation: RecordGroup | None
) -> DataStatistics:
    """The statistics of a job's training and validation data.

    Raises DataError if there are too few samples for its split.
    """
    options = asked.training
    used = np.ones(len(training.contents), np.bool_)
    held_out: FileStatistics | None = None
    overlap = Lines()
    if validation is not None:
        everything = np.ones(len(validation.contents), np.bool_)
        held_out = validation.measured(everything, options.max_length, asked.one_rank)
        numbers = line_numbers(np.arange(len(everything)), validation.samples.skipped.lines)
        overlap = _lines(numbers, np.isin(validation.contents, training.contents))
    elif asked.validation_split is not None:
        aside = set_aside(
            training.contents, Split(asked.validation_split, asked.seed), training.name
        )
        held_out = training.measured(aside, options.max_length, asked.one_rank)
        used = ~aside
    trained = training.measured(used, options.max_length, asked.one_rank)
    samples = training.samples.some(used[training.samples.records])
    if training.is_whole:
        samples = in_windows(samples, options.max_length)
    lengths = samples.lengths_within(options.max_length)
    items = trained.samples
    if training.is_whole:
        items = (
            len(in_rows(lengths.tolist(), options.max_length)) if options.packing else len(lengths)
        )
    steps = options.max_steps or options.epochs * -(-items // options.batch)
    taken = items_of_steps(steps, options.batch, max(1, items))
    return DataStatistics(
        training=trained,
        validation=held_out,
        overlap=overlap,
        items=items,
        steps=steps,
        trained_tokens=trained.tokens * taken // max(1, items),
        padding_saved=padding(lengths, options),
    )


def spread(counts: np.ndarray) -> Spread:
    if not len(counts):
        return Spread()
    middle, p90, p99 = (
        int(value) for value in np.percentile(counts, (50, 90, 99), method="inverted_cdf")
    )
    return Spread(int(counts.min()), float(counts.mean()), middle, p90, p99, int(counts.max()))


def histogram(lengths: np.ndarray) -> tuple[Bucket, ...]:
    """A histogram of lengths with at most BUCKETS buckets of a round width, from 1 token."""
    longest = int(lengths.max(initial=0))
    if not longest:
        return ()
    width = next(
        size
        for power in range(12)
        for size in (factor * 10**power for factor in _ROUND)
        if size * BUCKETS >= longest
    )
    counts = np.bincount((np.maximum(lengths, 1) - 1) // width)
    return tuple(
        Bucket(index * width + 1, (index + 1) * width, int(count))
        for index, count in enumerate(counts)
    )


def padding(lengths: np.ndarray, options: TrainingOptions) -> float:
    """The share of padding if random batches of training.batch_size samples were padded to their
    longest sample, in [0, 1).
    """
    drawn = np.random.default_rng(0).permutation(lengths)
    starts = np.arange(0, len(drawn), options.batch)
    if not len(starts) or not drawn.sum():
        return 0.0
    sizes = np.diff(np.append(starts, len(drawn)))
    return 1 - float(drawn.sum() / (np.maximum.reduceat(drawn, starts) * sizes).sum())


def _lines(numbers: np.ndarray, which: ArrayLike) -> Lines:
    """The chosen records. `which`: bool [records]."""
    return Lines.of(numbers[np.asarray(which)].tolist())


def _ending(samples: TokenSet) -> int:
    """The number of learned tokens with which all samples end, at most _ENDING: the end of a
    turn.
    """
    common: list[int] | None = None
    for index in range(min(len(samples), _TURN_SAMPLES)):
        sample = samples[index]
        last = sample.ids[sample.targets][-_ENDING:].tolist()[::-1]
        same = last if common is None else common
        common = [
            token
            for place, token in enumerate(same)
            if place < len(last) and last[: place + 1] == same[: place + 1]
        ]
    return len(common or ())
