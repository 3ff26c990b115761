"""Numbers of the sets that are trained on, counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ft_service.data.records import Text
from ft_service.data.statistics import (
    Bucket,
    FileStatistics,
    Lines,
    Measure,
    Records,
    Spread,
    Statistics,
    advice,
    bars,
    messages,
    share,
    without_base,
)
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.measure import Part, histogram, measure, padding
from ft_service.spec import DataFileRef, TrainingOptions

END = 99


def chat(prompt: Sequence[int], answer: Sequence[int]) -> Tokens:
    ids = [*prompt, *answer, END]
    return Tokens(np.array(ids, np.int32), np.arange(len(ids)) >= len(prompt))


def part(samples: Sequence[Tokens], name: str = "a.jsonl", *, pairs: bool = False) -> Part:
    return Part(TokenSet.of(samples), "line", name, pairs=pairs)


def asked(split: float | None = None, validation: bool = False, **training: Any) -> Measure:
    file = DataFileRef(name="a.jsonl", path="a.jsonl", sha256="a")
    other = DataFileRef(name="b.jsonl", path="b.jsonl", sha256="b")
    return Measure(file, other if validation else None, TrainingOptions(**training), split, seed=3)


FEW = [
    chat([1, 2, 3], [4, 5]),
    chat([1, 2], [5, 5, 5]),
    chat([1, 2, 3], [4, 5]),
    chat([3, 3, 3], []),
    chat([1] * 10, [4, 5, 6]),
    chat([1] * 3, [8]),
]


def test_the_numbers_of_a_file() -> None:
    found = measure(asked(max_length=8, batch_size=2, n_epochs=3), part(FEW), None).training
    assert (found.samples, found.tokens, found.targets) == (5, 6 + 6 + 6 + 4 + 5, 3 + 4 + 3 + 1 + 2)
    assert found.lengths == Spread(least=4, mean=41 / 6, median=6, p90=14, p99=14, most=14)
    assert (found.learned.least, found.learned.most) == (1, 4)
    assert found.cut == Lines(1, (5,))
    assert found.lost_tokens == 6
    assert found.dropped == Lines(1, (5,)), "all of its answer is behind the limit"
    assert found.duplicates == Lines(1, (3,))
    assert found.near_empty == Lines(2, (4, 6)), "nothing, and one token, before the end of the turn"
    assert sum(bucket.samples for bucket in found.histogram) == 6


def test_steps_and_tokens_over_all_of_training() -> None:
    found = measure(asked(max_length=20, batch_size=4, n_epochs=3), part(FEW), None)
    assert (found.steps, found.trained_tokens) == (3 * 2, 3 * 41)
    bounded = measure(asked(max_length=20, batch_size=4, max_steps=12), part(FEW), None)
    assert (bounded.steps, bounded.trained_tokens) == (12, 12 * 4 * 41 // 6)


def test_pairs_are_counted_once_and_their_tokens_twice() -> None:
    pairs = [made for number in range(4) for made in (chat([1, number], [2, 3]), chat([1, number], [4]))]
    found = measure(asked(max_length=20, batch_size=2, n_epochs=1), part(pairs, pairs=True), None)
    assert (found.training.samples, found.training.tokens, found.steps) == (4, 4 * (5 + 4), 2)
    assert found.training.near_empty.count == 4, "one of each pair is short"
    assert found.training.duplicates == Lines()


def test_the_overlap_is_what_both_files_hold() -> None:
    held_out = [chat([9], [9, 9]), FEW[0], FEW[1]]
    found = measure(asked(validation=True, max_length=20), part(FEW), part(held_out, "b.jsonl"))
    assert found.overlap == Lines(2, (2, 3))
    assert found.validation is not None
    assert (found.training.samples, found.validation.samples) == (6, 3)


def test_what_is_set_aside_is_measured_beside_what_is_trained_on() -> None:
    numbered = [chat([1, number], [2, 3, 4]) for number in range(40)]
    found = measure(asked(0.25, batch_size=5, n_epochs=1), part(numbered), None)
    assert found.validation is not None
    assert (found.training.samples, found.validation.samples, found.steps) == (30, 10, 6)
    assert found.overlap == Lines()
    told = [sentence for _, sentence in messages(found, asked(0.25))]
    assert told[0] == "10 of the 40 samples of a.jsonl are set aside for validation (validation_split 0.25, seed 3)."


@pytest.mark.parametrize(("longest", "width"), [(1, 1), (12, 1), (13, 2), (40, 4), (100, 10), (2048, 200), (9000, 800)])
def test_a_histogram_has_few_buckets_of_a_round_width(longest: int, width: int) -> None:
    lengths = np.array([1, longest, longest])
    buckets = list(histogram(lengths))
    assert buckets[0] == Bucket(1, width, 3 if longest == 1 else 3 if longest <= width else 1)
    assert len(buckets) <= 12
    assert buckets[-1].begin <= longest <= buckets[-1].end
    assert sum(bucket.samples for bucket in buckets) == 3


def test_padding_is_what_the_longest_of_a_batch_makes_of_the_others() -> None:
    lengths = np.array([10, 10, 10, 10])
    assert padding(lengths, TrainingOptions(batch_size=2)) == 0
    assert padding(np.array([1, 9]), TrainingOptions(batch_size=2)) == pytest.approx(1 - 10 / 18)
    assert padding(np.array([], np.int64), TrainingOptions()) == 0


FINE = FileStatistics("a.jsonl", "line", 400, 40_000, 9_000, Spread(5, 100, 90, 180, 200, 220), Spread(), ())


def found(training: FileStatistics = FINE, validation: FileStatistics | None = None, **changed: Any) -> Statistics:
    known: dict[str, Any] = {
        "overlap": Lines(),
        "items": 400,
        "steps": 150,
        "trained_tokens": 120_000,
        "padding_saved": 0.4,
        **changed,
    }
    return Statistics(training, validation, **known)


def told(statistics: Statistics, measured: Measure | None = None) -> list[str]:
    return list(advice(statistics, measured or asked()))


def like_fine(**changed: Any) -> FileStatistics:
    return FileStatistics(**{**vars(FINE), **changed})


def test_nothing_is_said_where_all_is_well() -> None:
    assert told(found()) == []
    assert told(found(validation=like_fine(name="b.jsonl"))) == []


@pytest.mark.parametrize(
    ("statistics", "measured", "sentence"),
    [
        (
            found(like_fine(cut=Lines(9, (1, 4, 5, 6, 7)), lost_tokens=1200)),
            asked(),
            "a.jsonl: 9 samples (lines 1, 4, 5, 6, 7, …) cut, 1,200 tokens lost. training.max_length: 220 would cut none, 200 "
            "one in a hundred.",
        ),
        (
            found(like_fine(duplicates=Lines(1, (8,)))),
            asked(),
            "a.jsonl: 1 sample (line 8) with the very tokens of one further up, learned as often as they stand there. Remove "
            "them, unless that is meant.",
        ),
        (
            found(like_fine(near_empty=Lines(2, (3, 4)), word="row")),
            asked(),
            "a.jsonl: 2 samples (rows 3, 4) with an answer of at most 1 token. Look at them with `ft data show`, and remove "
            "those whose answer is missing.",
        ),
        (
            found(like_fine(targets=92)),
            asked(),
            "a.jsonl: only 0.23 % of its tokens are learned. Shorten the prompts, or learn more of each conversation "
            "(training.train_on, weight).",
        ),
        (
            found(validation=like_fine(name="b.jsonl"), overlap=Lines(2, (5, 6))),
            asked(validation=True),
            "b.jsonl: 2 samples (lines 5, 6) in a.jsonl too, so that the validation loss looks better than it is. Remove them "
            "from one of the two.",
        ),
        (
            found(validation=like_fine(name="c.jsonl"), overlap=Lines(400, (1, 2, 3, 4, 5))),
            replace(asked(), validation_file=DataFileRef(name="c.jsonl", path="c.jsonl", sha256="a")),
            "c.jsonl is the training file, so that the validation loss says nothing of new samples. Give another "
            "validation_file, or validation_split in its place.",
        ),
        (
            found(validation=like_fine(samples=3)),
            asked(0.01),
            "Validation has only 3 samples, so that its loss jumps about. Raise validation_split.",
        ),
        (
            found(like_fine(samples=4)),
            asked(),
            "a.jsonl: only 4 samples to train on. Give at least 10, better hundreds.",
        ),
        (
            found(like_fine(samples=40)),
            asked(batch_size=64),
            "training.batch_size = 64: every step takes all 40 samples. Lower it.",
        ),
        (
            found(steps=9),
            asked(),
            "Training has only 9 steps of 8 samples. Lower training.batch_size, or raise training.n_epochs.",
        ),
        (
            found(validation=FINE),
            asked(eval_steps=500),
            "training.eval_steps = 500: of 150 steps, so that validation is only at the end. Lower it.",
        ),
        (
            found(),
            asked(packing=False),
            "training.packing = false: about 40% of what is computed is padding. Give packing: true if the base allows it, or "
            "group_by_length: true.",
        ),
    ],
)
def test_each_warning_names_the_lines_or_the_option_and_the_change(
    statistics: Statistics, measured: Measure, sentence: str
) -> None:
    assert told(statistics, measured) == [sentence]


def test_short_answers_that_are_what_a_file_is_about_are_no_fault() -> None:
    assert told(found(like_fine(near_empty=Lines(390, (1, 2))))) == []


def test_shares_tell_little_from_nothing() -> None:
    assert [share(part, 1000) for part in (0, 2, 25, 333, 1000)] == ["0 %", "0.2 %", "2.5 %", "33 %", "100 %"]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    rows = bars((Bucket(-9, 0, 0), Bucket(1, 10, 1), Bucket(11, 20, 400), Bucket(21, 30, 0)), width=40)
    assert [(tokens, samples, len(bar)) for tokens, samples, bar in rows] == [
        ("1 to 10", "1", 1),
        ("11 to 20", "400", 40),
        ("21 to 30", "0", 0),
    ]


def test_what_is_told_of_files_without_a_base() -> None:
    training, validation = Records("a.jsonl"), Records("b.jsonl")
    for number, text in enumerate("abcabdefghijk", 1):
        training.add(number, Text(text))
    for number, text in enumerate("xyazuvws", 1):
        validation.add(number, Text(text))
    options = TrainingOptions(batch_size=2)
    assert told(without_base(training, validation, options), asked(validation=True, batch_size=2)) == [
        "a.jsonl: 2 samples (lines 4, 5) with the very tokens of one further up, learned as often as they stand there. Remove "
        "them, unless that is meant.",
        "b.jsonl: 1 sample (line 3) in a.jsonl too, so that the validation loss looks better than it is. Remove them from one "
        "of the two.",
    ]
