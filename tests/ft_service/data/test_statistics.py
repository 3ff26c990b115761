"""Advice on data, from its statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_service.data import statistics
from ft_service.data.sample_kinds import Text
from ft_service.data.statistics import (
    Bucket,
    Comparison,
    DataStatistics,
    FileStatistics,
    Lines,
    Measure,
    Records,
    Spread,
    advice,
    bars,
    share,
    without_base,
)
from ft_service.spec import DataFileRef, TrainingOptions
from tests.support.measures import asked

FINE = FileStatistics(
    "a.jsonl", "line", 400, 40_000, 9_000, Spread(5, 100, 90, 180, 200, 220), Spread(), ()
)


def found(
    training: FileStatistics = FINE, validation: FileStatistics | None = None, **changed: Any
) -> DataStatistics:
    known: dict[str, Any] = {
        "overlap": Lines(),
        "items": 400,
        "steps": 150,
        "trained_tokens": 120_000,
        "padding_saved": 0.4,
        **changed,
    }
    return DataStatistics(training, validation, **known)


def told(statistics: DataStatistics, measured: Measure | None = None) -> list[str]:
    return list(advice(statistics, measured or asked()))


def like_fine(**changed: Any) -> FileStatistics:
    return FileStatistics(**{**vars(FINE), **changed})


def test_copies_and_overlaps_are_told_and_how_many_records_were_compared() -> None:
    found_ones = Comparison(Lines(2, (3, 4)), {"held.jsonl": Lines(1, (7,))}, 100)
    near, overlap, compared = told(found(comparison=found_ones))
    assert near.startswith("a.jsonl: 2 samples (lines 3, 4) nearly the same")
    assert overlap.startswith("a.jsonl: 1 sample (line 7) with what held.jsonl asks")
    assert compared == "a.jsonl: only the first 100 of its records were compared."
    assert told(found(comparison=Comparison(compared=100))) == []


def test_nothing_is_said_where_all_is_well() -> None:
    assert told(found()) == []
    assert told(found(validation=like_fine(name="b.jsonl"))) == []


@pytest.mark.parametrize(
    ("statistics", "measured", "sentence"),
    [
        (
            found(like_fine(cut=Lines(9, (1, 4, 5, 6, 7)), lost_tokens=1200)),
            asked(),
            "a.jsonl: 9 samples (lines 1, 4, 5, 6, 7, …) cut, 1,200 tokens lost. "
            "training.max_length: 220 would cut none, 200 "
            "one in a hundred.",
        ),
        (
            found(like_fine(cut=Lines(1, (1,)), lost_tokens=1200)),
            replace(asked(max_length=128), at_context=True),
            "a.jsonl: 1 sample (line 1) cut, 1,200 tokens lost. The base's context is 128 tokens: "
            "shorten or split them, or "
            "take a base with a longer one.",
        ),
        (
            found(like_fine(alike=Lines(1, (8,)))),
            asked(max_length=128),
            "a.jsonl: 1 pair (line 8) whose two answers are the same within training.max_length = "
            "128 tokens, left out, "
            "since nothing is learned from them. Raise it if the answers differ after that.",
        ),
        (
            found(like_fine(duplicates=Lines(1, (8,)))),
            asked(),
            "a.jsonl: 1 sample (line 8) with the same tokens as an earlier one, learned once for "
            "each copy. Remove them, "
            "unless that is intended.",
        ),
        (
            found(like_fine(near_empty=Lines(2, (3, 4)), word="row")),
            asked(),
            "a.jsonl: 2 samples (rows 3, 4) with an answer of at most 1 token. Look at them with "
            "`ft data show`, and remove "
            "those whose answer is missing.",
        ),
        (
            found(like_fine(targets=92)),
            asked(),
            "a.jsonl: only 0.23 % of its tokens are learned. Shorten the prompts, or learn more "
            "of each conversation "
            "(training.train_on, weight).",
        ),
        (
            found(validation=like_fine(name="b.jsonl"), overlap=Lines(2, (5, 6))),
            asked(validation=True),
            "b.jsonl: 2 samples (lines 5, 6) in a.jsonl too, so the validation loss looks better "
            "than it is. Remove them "
            "from one of the two.",
        ),
        (
            found(validation=like_fine(name="c.jsonl"), overlap=Lines(400, (1, 2, 3, 4, 5))),
            replace(
                asked(), validation_file=DataFileRef(name="c.jsonl", path="c.jsonl", sha256="a")
            ),
            "c.jsonl is the training file, so the validation loss says nothing about new samples. "
            "Give another "
            "validation_file, or validation_split in its place.",
        ),
        (
            found(validation=like_fine(samples=3)),
            asked(0.01),
            "Validation has only 3 samples, so its loss is noisy. Raise validation_split.",
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
            "Training has only 9 steps of 8 samples. Lower training.batch_size, or raise "
            "training.n_epochs.",
        ),
        (
            found(validation=FINE),
            asked(eval_steps=500),
            "training.eval_steps = 500: of 150 steps, so that validation is only at the end. "
            "Lower it.",
        ),
        (
            found(),
            asked(packing=False),
            "training.packing = false: about 40% of what is computed is padding. Give packing: "
            "true if the base allows it, or "
            "group_by_length: true.",
        ),
    ],
)
def test_each_warning_names_the_lines_or_the_option_and_the_change(
    statistics: DataStatistics, measured: Measure, sentence: str
) -> None:
    assert told(statistics, measured) == [sentence]


def test_short_answers_that_are_what_a_file_is_about_are_no_fault() -> None:
    assert told(found(like_fine(near_empty=Lines(390, (1, 2))))) == []


def test_shares_tell_little_from_nothing() -> None:
    assert [share(part, 1000) for part in (0, 2, 25, 333, 1000)] == [
        "0 %",
        "0.2 %",
        "2.5 %",
        "33 %",
        "100 %",
    ]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    rows = bars(
        (Bucket(-9, 0, 0), Bucket(1, 10, 1), Bucket(11, 20, 400), Bucket(21, 30, 0)), width=40
    )
    assert [(tokens, samples, len(bar)) for tokens, samples, bar in rows] == [
        ("1 to 10", "1", 1),
        ("11 to 20", "400", 40),
        ("21 to 30", "0", 0),
    ]


def test_contents_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MOST_COMPARED", 3)
    records = Records("a.jsonl")
    for number, text in enumerate("abcdda", 1):
        records.add(number, Text(text))
    assert records.count == 6
    assert records.duplicates == Lines(1, (6,)), "the fourth was not remembered"


def test_what_is_told_of_files_without_a_base() -> None:
    training = Records("a.jsonl")
    validation = Records("b.jsonl")
    for number, text in enumerate("abcabdefghijk", 1):
        training.add(number, Text(text))
    for number, text in enumerate("xyazuvws", 1):
        validation.add(number, Text(text))
    options = TrainingOptions(batch_size=2)
    assert told(
        without_base(training, validation, options), asked(validation=True, batch_size=2)
    ) == [
        "a.jsonl: 2 samples (lines 4, 5) with the same tokens as an earlier one, learned once for "
        "each copy. Remove them, "
        "unless that is intended.",
        "b.jsonl: 1 sample (line 3) in a.jsonl too, so the validation loss looks better than it "
        "is. Remove them from one "
        "of the two.",
    ]
