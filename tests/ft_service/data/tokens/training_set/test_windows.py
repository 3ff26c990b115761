"""Documents in windows and rows: every token is learned once, and rows are nearly full."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.training_set.windows import are_whole, in_rows, in_windows


def documents(*lengths: int) -> TokenSet:
    """Of tokens that are all different."""
    begins = np.cumsum(lengths) - lengths
    return TokenSet.of(
        Tokens(np.arange(begin, begin + length, dtype=np.int32), np.ones(length, np.bool_))
        for begin, length in zip(begins, lengths, strict=True)
    )


@pytest.mark.parametrize("length", [2, 3, 8, 9, 100])
def test_every_token_but_the_first_of_a_document_is_learned_once(length: int) -> None:
    whole = documents(1, 2, 8, 9, 15, 16, 17, 40)
    windows = in_windows(whole, length)
    learned = Counter(int(token) for sample in windows for token in sample.ids[1:])
    assert set(learned.values()) == {1}
    firsts = {int(sample.ids[0]) for sample in whole}
    assert set(learned) == set(range(108)) - firsts
    assert max(len(sample.ids) for sample in windows) == min(length, 40)
    assert int(windows.target_counts.sum()) == 108 - 8
    assert [sample.target_count for sample in windows] == windows.target_counts.tolist()
    assert windows.ids is whole.ids, "no token is copied"


def test_a_window_goes_on_where_the_one_before_ended() -> None:
    windows = in_windows(documents(10), 4)
    assert [sample.ids.tolist() for sample in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert in_windows(documents(4), 4)[0].ids.tolist() == [0, 1, 2, 3]


def test_only_what_is_learned_whole_is_split() -> None:
    assert are_whole(documents(3, 4))
    behind_a_begin = Tokens(np.arange(4, dtype=np.int32), np.array([False, True, True, True]))
    assert are_whole(TokenSet.of([behind_a_begin])), (
        "nothing predicts the token that a text begins with"
    )
    answer = Tokens(np.arange(4, dtype=np.int32), np.array([False, False, True, True]))
    assert not are_whole(TokenSet.of([behind_a_begin, answer]))
    assert not are_whole(TokenSet.of([]))


@pytest.mark.parametrize("seed", range(10))
def test_rows_hold_every_sample_once_and_are_nearly_full(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = [min(100, 2 + int(drawn.expovariate(1 / 30))) for _ in range(400)]
    rows = in_rows(lengths, 100)
    assert sorted(sample for row in rows for sample in row) == list(range(400))
    assert max(sum(lengths[sample] for sample in row) for row in rows) <= 100
    assert len(rows) <= -(-sum(lengths) // 100) * 1.03 + 1
    assert in_rows(lengths, 100) == rows


def test_a_sample_longer_than_a_row_has_one_of_its_own() -> None:
    assert in_rows([5, 30, 4], 10) == [[1], [0, 2]]
    assert in_rows([], 10) == []
