from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workers.data import micro_batches
from workers.data.micro_batches import (
    MicroBatchLimits,
    Rounds,
    attention_share,
    share_out,
    share_out_pairs,
)


def drawn(count: int, seed: int = 0) -> list[int]:
    """Log-normal lengths, as those of chats."""
    return (
        np.clip(np.random.default_rng(seed).lognormal(5.5, 0.8, count), 8, 2048)
        .astype(int)
        .tolist()
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("count", "tokens", "samples"), [(1, 8, None), (5, 300, None), (16, 2048, 3), (100, 4096, None)]
)
def test_every_sample_is_in_one_micro_batch_within_the_limits(
    packed: bool, world: int, count: int, tokens: int, samples: int | None
) -> None:
    lengths = drawn(count, seed=count)
    rounds = share_out(lengths, world, MicroBatchLimits(tokens, samples, packed))
    assert sorted(i for micro in rounds for own in micro for i in own) == list(range(count))
    assert all(len(micro) == world for micro in rounds), "every rank takes part in every round"
    for own in (own for micro in rounds for own in micro if own):
        held = [lengths[i] for i in own]
        size = sum(held) if packed else len(held) * max(held)
        assert size <= max([tokens, *lengths])
        assert samples is None or len(own) <= samples


def test_shares_follow_from_lengths_alone() -> None:
    assert share_out(drawn(50), 3, MicroBatchLimits(2048)) == share_out(
        drawn(50), 3, MicroBatchLimits(2048)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_without_samples_every_rank_takes_part_in_one_round(packed: bool) -> None:
    assert share_out([], 3, MicroBatchLimits(100, packed=packed)) == [[[], [], []]]


def test_a_sample_longer_than_the_budget_is_the_budget() -> None:
    assert share_out([500, 300, 100, 90, 10], 1, MicroBatchLimits(100)) == [[[0]], [[1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("world", "count", "tokens"), [(1, 64, 4096), (2, 64, 4096), (3, 128, 8192), (8, 512, 8192)]
)
def test_ranks_wait_for_each_other_less_than_a_twentieth(
    world: int, count: int, tokens: int
) -> None:
    limits = MicroBatchLimits(tokens, per_token=attention_share(4096))
    for seed in range(5):
        lengths = drawn(count, seed)
        waited = cost(share_out(lengths, world, limits), lengths, limits) / (
            sum(map(limits.cost, lengths)) / world
        )
        assert waited < 1.05


def cost(rounds: Rounds, lengths: list[int], limits: MicroBatchLimits) -> float:
    """Of a step in which every round takes as long as its dearest micro-batch."""
    return sum(max(sum(limits.cost(lengths[i]) for i in own) for own in micro) for micro in rounds)


def test_there_are_hardly_more_rounds_than_tokens_ask_for() -> None:
    lengths = drawn(512)
    assert len(share_out(lengths, 2, MicroBatchLimits(8192))) <= -(-sum(lengths) // (2 * 8192)) + 1


@pytest.mark.parametrize("world", [1, 3])
def test_samples_above_half_the_budget_take_few_tries(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation set is shared out at once, and each of its samples may need a row."""
    lengths = np.random.default_rng(0).integers(900, 1900, 3000).tolist()
    tries = []
    by_cost = micro_batches._by_cost

    def counted(lengths: list[int], costs: list[float], count: int, *limits: Any) -> Any:
        tries.append(count)
        return by_cost(lengths, costs, count, *limits)

    monkeypatch.setattr(micro_batches, "_by_cost", counted)
    limits = MicroBatchLimits(2048)
    rounds = share_out(lengths, world, limits)
    assert len(tries) < 30
    assert all(sum(lengths[i] for i in own) <= 2048 for micro in rounds for own in micro)
    assert (
        by_cost(
            lengths,
            [limits.cost(length) for length in lengths],
            (len(rounds) - 1) * world,
            2048,
            limits,
        )
        is None
    )


def test_samples_of_like_length_are_padded_together() -> None:
    lengths = drawn(64)
    rounds = share_out(lengths, 2, MicroBatchLimits(4096, packed=False))
    padded = sum(
        len(own) * max(lengths[i] for i in own) for micro in rounds for own in micro if own
    )
    assert padded < 1.3 * sum(lengths)
    assert 64 * max(lengths) > 3 * sum(lengths), "what one padded batch would take"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("pairs", [None, 2])
def test_both_samples_of_a_pair_are_in_one_micro_batch(
    packed: bool, world: int, pairs: int | None
) -> None:
    lengths = list(zip(drawn(40), drawn(40, seed=1), strict=True))
    rounds = share_out_pairs(lengths, world, MicroBatchLimits(3000, pairs, packed))
    assert sorted(i for micro in rounds for own in micro for i in own) == list(range(40))
    for own in (own for micro in rounds for own in micro if own):
        held = [length for i in own for length in lengths[i]]
        size = sum(held) if packed else len(held) * max(held)
        assert size <= max(3000, *(sum(pair) if packed else 2 * max(pair) for pair in lengths))
        assert pairs is None or len(own) <= pairs
