"""A set of samples is the samples that it was made of, cut as each of them is cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet

SAMPLES = [
    Tokens(np.array(ids, dtype=np.int32), np.array(targets, dtype=np.bool_))
    for ids, targets in (
        ([5, 6, 7, 8], [True, False, True, True]),
        ([9], [True]),
        ([], []),
        ([1, 2, 300], [False, False, True]),
        ([4, 4], [False, True]),
    )
]


def same(found: Sequence[Tokens], expected: Sequence[Tokens]) -> bool:
    return len(found) == len(expected) and all(
        a.ids.dtype == b.ids.dtype
        and a.targets.dtype == b.targets.dtype
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.targets, b.targets)
        for a, b in zip(found, expected, strict=True)
    )


def test_a_set_is_its_samples() -> None:
    samples = TokenSet.of(SAMPLES)
    assert same(samples, SAMPLES)
    assert same([samples[-1]], SAMPLES[-1:])
    assert same(samples[1:4], SAMPLES[1:4])
    assert samples.lengths.tolist() == [4, 1, 0, 3, 2]
    assert samples.target_counts.tolist() == [sample.target_count for sample in SAMPLES]
    assert (samples.lengths.dtype, samples.target_counts.dtype) == (np.int64, np.int64)
    assert samples.largest_id == 300
    with pytest.raises(IndexError):
        samples[5]


def test_a_set_of_nothing() -> None:
    nothing = TokenSet.of([])
    assert (len(nothing), list(nothing), nothing.largest_id, nothing.lengths.tolist()) == (
        0,
        [],
        -1,
        [],
    )
    assert len(nothing.cut(3)) == 0


@pytest.mark.parametrize("max_length", [1, 2, 3, 4, 100])
def test_a_set_is_cut_as_its_samples_are(max_length: int) -> None:
    cut = TokenSet.of(SAMPLES).cut(max_length)
    expected = [sample.cut(max_length) for sample in SAMPLES if sample.cut(max_length).target_count]
    assert same(cut, expected)
    assert cut.lengths.tolist() == [len(sample.ids) for sample in expected]
    assert cut.target_counts.tolist() == [sample.target_count for sample in expected]
    assert same(cut.cut(2), [sample.cut(2) for sample in expected if sample.cut(2).target_count]), (
        "cut again"
    )


def test_a_sample_of_a_set_belongs_to_the_caller() -> None:
    samples = TokenSet.of(SAMPLES)
    samples[0].ids[:] = 0
    assert same(samples, SAMPLES)
