"""Numbers of the sets that are trained on, counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ft_service.data.statistics import (
    Bucket,
    Lines,
    Spread,
    messages,
)
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.token_statistics import (
    RecordGroup,
    histogram,
    measure,
    padding,
)
from ft_service.spec import TrainingOptions
from tests.support.measures import asked

END = 99


def chat(prompt: Sequence[int], answer: Sequence[int]) -> Tokens:
    ids = [*prompt, *answer, END]
    return Tokens(np.array(ids, np.int32), np.arange(len(ids)) >= len(prompt))


def part(samples: Sequence[Tokens], name: str = "a.jsonl", *, pairs: bool = False) -> RecordGroup:
    numbered = [
        replace(sample, continues=pairs and number % 2 == 1)
        for number, sample in enumerate(samples)
    ]
    return RecordGroup(TokenSet.of(numbered), "line", name, pairs=pairs)


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
    assert found.near_empty == Lines(2, (4, 6)), (
        "nothing, and one token, before the end of the turn"
    )
    assert sum(bucket.samples for bucket in found.histogram) == 6


def test_samples_that_one_rank_has_no_room_for() -> None:
    """Not those that are left out; of a pair, once."""
    request = replace(asked(max_length=8), one_rank=5)
    found = measure(request, part(FEW), None).training
    assert found.beyond_one_rank == Lines(3, (1, 2, 3))
    pairs = part([FEW[0], FEW[1], FEW[5], FEW[0]], pairs=True)
    assert measure(request, pairs, part(FEW[:2])).training.beyond_one_rank == Lines(2, (1, 2))
    validated = measure(request, pairs, part(FEW[:2], "b.jsonl")).validation
    assert validated is not None
    assert validated.beyond_one_rank == Lines(2, (1, 2))
    assert measure(asked(max_length=8), part(FEW), None).training.beyond_one_rank == Lines()


def test_pairs_whose_answers_are_alike_after_the_cut() -> None:
    late = [chat([1], [2] * 7 + [3]), chat([1], [2] * 7 + [4, 5])]
    pairs = part([*late, chat([1], [2]), chat([1], [3]), *late], pairs=True)
    cut, whole = (
        measure(asked(max_length=length, batch_size=1, n_epochs=2), pairs, None)
        for length in (8, 9)
    )
    assert (cut.training.alike, cut.training.dropped, cut.training.samples) == (
        Lines(2, (1, 3)),
        Lines(),
        1,
    )
    assert (whole.training.alike, whole.training.samples) == (Lines(), 3)
    assert (cut.steps, whole.steps) == (2, 6)


def test_steps_and_tokens_over_all_of_training() -> None:
    found = measure(asked(max_length=20, batch_size=4, n_epochs=3), part(FEW), None)
    assert (found.steps, found.trained_tokens) == (3 * 2, 3 * 41)
    bounded = measure(asked(max_length=20, batch_size=4, max_steps=12), part(FEW), None)
    assert (bounded.steps, bounded.trained_tokens) == (12, 6 * 41), (
        "the second step of an epoch has two samples"
    )


def test_pairs_are_counted_once_and_their_tokens_twice() -> None:
    pairs = [
        made for number in range(4) for made in (chat([1, number], [2, 3]), chat([1, number], [4]))
    ]
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
    assert (
        told[0]
        == "10 of the 40 samples of a.jsonl are set aside for validation (validation_split 0.25, "
        "seed 3)."
    )


@pytest.mark.parametrize(
    ("longest", "width"), [(1, 1), (12, 1), (13, 2), (40, 4), (100, 10), (2048, 200), (9000, 800)]
)
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
