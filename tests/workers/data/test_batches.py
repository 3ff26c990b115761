from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.tokens.sample import Tokens
from workers.data.batches import (
    TokenCounts,
    batch_of_step,
    collate,
    pack,
    steps_per_epoch,
    total_steps,
)


@pytest.mark.parametrize(("samples", "batch_size"), [(10, 3), (9, 3), (2, 8), (1, 1)])
def test_an_epoch_sees_every_sample_once(samples: int, batch_size: int) -> None:
    steps = steps_per_epoch(samples, batch_size)
    for epoch in range(3):
        seen = [
            i
            for step in range(steps)
            for i in batch_of_step(epoch * steps + step, samples, batch_size, seed=5)
        ]
        assert sorted(seen) == list(range(samples))


def test_order_depends_on_seed_and_epoch_only() -> None:
    first = [batch_of_step(step, 50, 10, seed=1) for step in range(10)]
    assert first == [batch_of_step(step, 50, 10, seed=1) for step in range(10)]
    assert first[:5] != first[5:], "another epoch, another order"
    assert first != [batch_of_step(step, 50, 10, seed=2) for step in range(10)]


def test_total_steps() -> None:
    assert total_steps(10, 4, n_epochs=3, max_steps=None) == 9
    assert total_steps(10, 4, n_epochs=3, max_steps=5) == 5


A = Tokens(np.array([5, 6, 7], dtype=np.int32), np.array([False, False, True]))
B = Tokens(np.array([8, 9], dtype=np.int32), np.array([False, True]))


def test_collate_pads() -> None:
    batch = collate([A, B], torch.device("cpu"))
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert (batch.places.tolist(), batch.targets.tolist()) == ([1, 3], [7, 9])
    assert batch.packing is None


def test_pack_puts_one_behind_the_other() -> None:
    batch = pack([A, B], torch.device("cpu"))
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert (batch.places.tolist(), batch.targets.tolist()) == ([1, 3], [7, 9])
    assert batch.packing is not None
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.packing.starts.tolist() == batch.packing.starts_on_device.tolist() == [0, 3, 5]
    assert batch.packing.longest == 3


def test_a_row_is_filled_by_a_sample_that_nothing_learns() -> None:
    samples = [Tokens(np.arange(1, n + 1, dtype=np.int32), np.ones(n, bool)) for n in (200, 100)]
    batch = pack(samples, torch.device("cpu"), keys=[3, 4])
    assert batch.packing is not None
    assert batch.packing.starts.tolist() == [0, 200, 300, 304]
    assert batch.packing.longest == 200
    assert batch.ids[0, 300:].tolist() == [0] * 4
    assert batch.positions is not None
    assert batch.positions[0, 298:].tolist() == [98, 99, 0, 1, 2, 3]
    assert batch.places.tolist() == [*range(199), *range(200, 299)]
    assert batch.lengths is not None
    assert batch.lengths[0, [0, 199, 200, 299, 300]].tolist() == [200, 200, 100, 100, 4]
    assert batch.keys is not None
    assert batch.keys.shape == (1, 304)
    last = pack(samples[1:], torch.device("cpu"), keys=[4]).keys
    assert last is not None
    assert torch.equal(batch.keys[:, 200:300], last)


@pytest.mark.parametrize("make", [collate, pack])
def test_nothing_takes_part_without_a_target(make: Any) -> None:
    batch = make([], torch.device("cpu"))
    assert batch.ids.shape == (1, 2)
    assert batch.places.shape == batch.targets.shape == (0,)


def test_the_first_token_is_no_target() -> None:
    assert Tokens(np.array([1, 2], dtype=np.int32), np.array([True, True])).target_count == 1


def test_batches_by_length_pad_less_and_hold_every_sample_once() -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 1003)
    lengths = TokenCounts(tokens)
    steps = steps_per_epoch(len(tokens), 8)
    batches = [batch_of_step(step, len(tokens), 8, 7, lengths) for step in range(steps)]
    assert sorted(sample for batch in batches for sample in batch) == list(range(1003))
    assert [len(batch) for batch in batches] == [8] * 125 + [3]

    def padded(given: list[list[int]]) -> int:
        return sum(len(batch) * int(tokens[batch].max()) for batch in given)

    drawn = [batch_of_step(step, len(tokens), 8, 7) for step in range(steps)]
    assert padded(batches) < 1.1 * tokens.sum() < 1.5 * tokens.sum() < padded(drawn)
    longest = [int(tokens[batch].max()) for batch in batches]
    assert longest[:50] != sorted(longest[:50], reverse=True), "their order is drawn"
    assert batches != [
        batch_of_step(step + steps, len(tokens), 8, 7, lengths) for step in range(steps)
    ], "and again"
