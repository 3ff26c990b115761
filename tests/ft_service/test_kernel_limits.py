from __future__ import annotations

import random

import pytest

from ft_service import kernel_limits
from ft_service.kernel_limits import (
    chunk_rows,
    cudnn_workspace_bytes,
    filled_group,
    filled_row,
    fp8_fits,
    lots_of,
)


def test_a_chunk_has_at_least_one_row() -> None:
    assert chunk_rows(10**9) == 1
    assert chunk_rows(128_256) == 1024
    assert chunk_rows(262_144) == 1024
    assert chunk_rows(300_000) == 894, "no chunk has more than 2^28 logits"
    assert chunk_rows(4096) == 8192, "of a small vocabulary as many as make 2^25"


@pytest.mark.parametrize(
    ("heads", "groups"), [(32, 8), (64, 8), (14, 2), (32, 32), (6, 2), (71, 1)]
)
def test_lots_are_bounded_and_have_every_sample_once(heads: int, groups: int) -> None:
    rng = random.Random(heads)
    for _ in range(50):
        lengths = [
            rng.randint(1, rng.choice((40, 700, 3000, 20_000))) for _ in range(rng.randint(1, 60))
        ]
        lots, long = lots_of(lengths, heads, groups)
        assert sorted([*long, *(sample for lot in lots for sample in lot.samples)]) == list(
            range(len(lengths))
        )
        for lot in lots:
            assert len(lot.samples) <= lot.count
            assert max(lengths[sample] for sample in lot.samples) <= lot.length
            assert heads % lot.heads == 0
            assert lot.heads % (heads // groups) == 0, "heads that share a key stay together"
            assert lot.heads == heads or lot.heads % 4 == 0, (
                "where a part of the heads begins is a multiple of 16 bytes"
            )
            assert 2 * lot.count * lot.heads * lot.length**2 <= kernel_limits.ATTENTION_SCORE_BYTES
        for sample in long:
            least = next(
                part
                for part in range(groups, 0, -1)
                if groups % part == 0 and (part == 1 or heads // part % 4 == 0)
            )
            assert (
                2 * (heads // least) * lengths[sample] ** 2
                > kernel_limits.ATTENTION_SCORE_BYTES / 4
            )
        assert len({(lot.count, lot.length, lot.heads) for lot in lots}) == len(
            {lot.length for lot in lots}
        )


def test_an_8b_s_micro_batch_is_three_lots() -> None:
    lots, long = lots_of([508, 618, 1125, 550, 2141, 151, 766, 203, 572, 462, 461, 90, 545], 32, 8)
    assert [(len(lot.samples), lot.count, lot.length, lot.heads) for lot in lots] == [
        (11, 16, 1024, 32),
        (1, 4, 2048, 32),
        (1, 1, 4096, 32),
    ]
    assert not long
    assert lots_of([8192], 32, 8)[0][0].heads == 8
    assert lots_of([16_384], 32, 8) == ([], [0])


@pytest.mark.parametrize(("heads", "groups"), [(32, 8), (14, 2), (6, 2)])
def test_no_lot_has_more_scores_than_the_workspace_is_planned_for(heads: int, groups: int) -> None:
    rng = random.Random(heads)
    for _ in range(50):
        lengths = [4096, *(rng.randint(1, 4096) for _ in range(rng.randint(0, 12)))]
        rng.shuffle(lengths)
        lots, _ = lots_of(lengths, heads, groups)
        planned = cudnn_workspace_bytes(sum(lengths), max(lengths), heads, 64, grouped=False)
        assert max(2 * lot.count * lot.heads * lot.length**2 for lot in lots) <= planned
        with_groups = cudnn_workspace_bytes(sum(lengths), max(lengths), heads, 64, grouped=True)
        row = kernel_limits.next_power(sum(lengths))
        assert with_groups - planned == 2 * 4 * row * heads * 64, (
            "a key's and a value's gradient for each head, fp32"
        )


def test_sizes_that_fp8_hardware_takes() -> None:
    assert fp8_fits(4096, 14336)
    assert not fp8_fits(4096, 14344)
    assert not fp8_fits(20, 64)


def test_packed_rows_have_few_lengths() -> None:
    given = (1, 100, 255, 256, 257, 500, 513, 1000, 1025, 5000)
    expected = [1, 100, 255, 256, 272, 512, 544, 1024, 1088, 5056]
    assert list(map(filled_row, given)) == expected
    assert len(set(map(filled_row, range(256, 8192)))) < 200
    for tokens in range(256, 5000, 7):
        assert tokens <= filled_row(tokens) <= min(tokens * 1.0625, tokens + 63)
        assert filled_row(filled_row(tokens)) == filled_row(tokens)


def test_groups_have_few_numbers_of_rows() -> None:
    assert list(map(filled_group, (1, 7, 8, 9, 33, 60, 100, 300))) == [
        1,
        7,
        8,
        10,
        40,
        64,
        112,
        320,
    ]
    assert len(set(map(filled_group, range(1, 8192)))) < 60
    assert all(rows <= filled_group(rows) <= 1.25 * rows for rows in range(1, 5000))
