"""Advantages and weights against their formulas."""

from __future__ import annotations

import random
from statistics import fmean, stdev

import pytest

from ft_service.reinforcement.advantages import (
    LEAST_DEVIATION,
    advantages,
    step_advantages,
    weights,
)


def test_an_advantage_is_what_exceeds_the_groups_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0], "none") == [0.5, -0.5, -0.5, 0.5]
    deviation = (4 * 0.25 / 3) ** 0.5 + LEAST_DEVIATION
    assert advantages([1.0, 0.0, 0.0, 1.0], "group") == pytest.approx(
        [0.5 / deviation, -0.5 / deviation] * 1 + [-0.5 / deviation, 0.5 / deviation]
    )


@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0, 1.0], [0.1 + 0.2, None, 0.3], [None, None], [2.0, None]]
)
def test_a_group_without_variance_has_none(rewards: list[float | None]) -> None:
    assert advantages(rewards, "group") == [0.0] * len(rewards)


def test_an_answer_without_a_reward_is_no_part_of_the_mean() -> None:
    assert advantages([1.0, None, 0.0], "none") == [0.5, 0.0, -0.5]


def test_a_step_has_the_normalised_rewards_of_it_and_of_later_ones() -> None:
    """DeepSeekMath, section 4.1.3, written out."""
    draw = random.Random(3)
    rewards = [[draw.gauss(0, 2) for _ in range(count)] for count in (3, 1, 0, 4)]
    every = [reward for own in rewards for reward in own]
    for scale, deviation in (("none", 1.0), ("group", stdev(every) + LEAST_DEVIATION)):
        found = step_advantages(rewards, scale)  # type: ignore[arg-type]
        assert list(map(len, found)) == [3, 1, 0, 4]
        for own, steps in zip(rewards, found, strict=True):
            for step, advantage in enumerate(steps):
                later = [(own[j] - fmean(every)) / deviation for j in range(step, len(own))]
                assert advantage == pytest.approx(sum(later), abs=1e-12)


def test_answers_of_one_step_are_as_those_with_one_reward() -> None:
    rewards = [1.0, 0.0, 0.5]
    for scale in ("none", "group"):
        assert [[own] for own in advantages(rewards, scale)] == step_advantages(  # type: ignore[arg-type]
            [[reward] for reward in rewards],
            scale,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("rewards", [[[0.1 + 0.2, 0.3], [0.3]], [[1.0, 0.0], []], [[], []]])
def test_steps_without_variance_or_beside_none_have_none(rewards: list[list[float]]) -> None:
    assert step_advantages(rewards, "group") == [[0.0] * len(own) for own in rewards]


def test_the_weights_of_each_mean() -> None:
    assert weights([2, 6], "dapo", 10) == [1 / 8, 1 / 8]
    assert weights([2, 6], "grpo", 10) == [1 / 4, 1 / 12]
    assert weights([2, 6], "dr_grpo", 10) == [1 / 20, 1 / 20]
    assert weights([], "dapo", 10) == []
