"""What each step has."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from ft_service.reinforcement.schedule import RolloutSchedule, seed_of

SCHEDULE = RolloutSchedule(
    prompts=10,
    batch=4,
    total_steps=6,
    eval_interval=2,
    save_interval=3,
    keep_every=None,
    validates=True,
    steps_ahead=0,
    seed=3,
)


def test_an_epoch_has_each_prompt_once_in_an_order_of_its_own() -> None:
    first = [SCHEDULE.prompts_of(step) for step in (1, 2, 3)]
    second = [SCHEDULE.prompts_of(step) for step in (4, 5, 6)]
    assert [len(own) for own in first] == [4, 4, 2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert SCHEDULE.prompts_of(5) == second[1], "the step alone decides"
    assert replace(SCHEDULE, seed=4).prompts_of(1) != first[0]


def test_what_is_due() -> None:
    assert [after for after in range(7) if SCHEDULE.is_evaluated(after)] == [0, 2, 4, 6]
    assert [after for after in range(7) if SCHEDULE.is_saved(after)] == [3], (
        "the last step has one anyway"
    )
    assert not any(replace(SCHEDULE, validates=False).is_evaluated(after) for after in range(7))
    assert replace(SCHEDULE, total_steps=5).is_evaluated(5)
    assert [after for after in range(7) if replace(SCHEDULE, keep_every=2).is_saved(after)] == [
        2,
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("ahead", "sampled_from"), [(0, [0, 1, 2, 3, 4, 5, 6]), (1, [0, 0, 1, 2, 3, 4, 6])]
)
def test_weights_that_are_at_most_one_step_older(ahead: int, sampled_from: list[int]) -> None:
    schedule = replace(SCHEDULE, steps_ahead=ahead)
    assert [schedule.sampled_from(step) for step in range(1, 8)] == sampled_from


def test_seeds_differ() -> None:
    assert (
        len({seed_of(1, step, prompt) for step in range(-5, 20) for prompt in range(50)}) == 25 * 50
    )
