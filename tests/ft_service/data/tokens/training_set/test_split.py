"""Samples set aside for validation: the same ones by content and seed, and none that training has
too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.split import Split, content_digests, set_aside, split_off
from ft_service.errors import DataError


def sample(*ids: int) -> Tokens:
    return Tokens(np.array(ids, np.int32), np.arange(len(ids)) > 0)


def contents(samples: TokenSet) -> list[tuple[int, ...]]:
    return [tuple(own.ids.tolist()) for own in samples]


def of(*numbers: int) -> TokenSet:
    return TokenSet.of(sample(7, number, number + 1) for number in numbers)


def test_a_share_is_set_aside_and_the_rest_is_trained_on_in_the_order_of_the_file() -> None:
    whole = of(*range(100))
    training, validation = split_off(whole, Split(0.1, 3), "a.jsonl")
    assert (len(training), len(validation)) == (90, 10)
    assert sorted(contents(training) + contents(validation)) == contents(whole)
    assert contents(training) == sorted(contents(training))
    assert contents(validation) != contents(whole)[-10:], (
        "not the last ones, whatever order the file is in"
    )


def test_content_and_seed_decide_and_the_order_of_the_file_does_not() -> None:
    def aside(numbers: list[int], seed: int) -> set[tuple[int, ...]]:
        return set(contents(split_off(of(*numbers), Split(0.2, seed), "a.jsonl")[1]))

    ordered = list(range(50))
    assert aside(ordered, 3) == aside(ordered[::-1], 3)
    assert aside(ordered, 3) != aside(ordered, 4)


def test_equal_samples_stay_together() -> None:
    numbers = [number for number in range(40) for _ in range(1 + number % 4)]
    for seed in range(20):
        training, validation = split_off(of(*numbers), Split(0.25, seed), "a.jsonl")
        assert not set(contents(training)) & set(contents(validation))
        assert len(training) + len(validation) == len(numbers)
        assert len(validation) == len(numbers) // 4, "small groups fill what large ones leave"


def test_what_is_learned_of_a_sample_makes_it_no_other_one() -> None:
    own = sample(1, 2, 3)
    other = Tokens(np.array([1, 2, 3], np.int32), np.array([False, False, True]))
    digests = content_digests(TokenSet.of([own, other, sample(1, 2), sample(3)]))
    assert digests[0] == digests[1]
    assert len(set(digests.tolist())) == 3


def test_the_two_of_a_pair_stay_together_and_in_their_order() -> None:
    second = partial(replace, continues=True)
    pairs = TokenSet.of(
        made for number in range(30) for made in (sample(1, number), second(sample(2, number)))
    )
    training, validation = split_off(pairs, Split(0.1, 3), "a.jsonl")
    assert (len(training), len(validation)) == (54, 6)
    for part in (training, validation):
        found = contents(part)
        assert all(
            one[0] == 1 and other == (2, one[1])
            for one, other in zip(found[::2], found[1::2], strict=True)
        )


def test_where_one_sample_is_half_of_the_file_another_is_set_aside() -> None:
    training, validation = split_off(
        of(*[1] * 10, 2, 2, 2, 3, 3, 3, 3, 3), Split(0.1, 3), "a.jsonl"
    )
    assert set(contents(validation)) == {(7, 2, 3)}, "the smallest of those that are all too large"
    assert len(training) == 15


@pytest.mark.parametrize(
    ("numbers", "share", "reason"),
    [
        (
            range(9),
            0.1,
            "a.jsonl has 9 samples, of which that is less than one. Give at least 10 different "
            "samples",
        ),
        ([5] * 40, 0.1, "a.jsonl has 40 samples that are all the same"),
        ([], 0.5, "a.jsonl has 0 samples"),
        (range(9), 1e-310, "a.jsonl has 9 samples, of which that is less than one"),
    ],
)
def test_too_few_are_refused_with_what_to_do(numbers: list[int], share: float, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        split_off(of(*numbers), Split(share, 3), "a.jsonl")
    assert f"validation_split = {share}: {reason}" in caught.value.message
    assert caught.value.param == "validation_split"


def test_a_share_is_exact_where_binary_fractions_are_not() -> None:
    assert int(set_aside(np.arange(100, dtype=np.uint64), Split(0.29, 0), "a.jsonl").sum()) == 29
