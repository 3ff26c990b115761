"""Advantages and weights against their formulas."""

from __future__ import annotations

import pytest

from ft_service.reinforcement.advantages import LEAST_DEVIATION, advantages, weights


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


def test_the_weights_of_each_mean() -> None:
    assert weights([2, 6], "dapo", 10) == [1 / 8, 1 / 8]
    assert weights([2, 6], "grpo", 10) == [1 / 4, 1 / 12]
    assert weights([2, 6], "dr_grpo", 10) == [1 / 20, 1 / 20]
    assert weights([], "dapo", 10) == []
