"""Fairness of rounds."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.rounds import PATIENCE, Turn, next_round

JOBS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=8)
"""(tokens of a micro-batch, priority)"""


@settings(database=None, deadline=None)
@given(JOBS, st.integers(1, 600), st.integers(1, 120))
def test_every_job_computes_within_the_bound_and_the_budget_holds(
    jobs: list[tuple[int, int]], budget: int, rounds: int
) -> None:
    tokens, priorities = zip(*jobs, strict=True)
    used = [0] * len(tokens)
    waited = [0] * len(tokens)
    longest = (len(tokens) - 1) * math.ceil(max(tokens) / min(tokens) + 1) + PATIENCE * (
        len(set(priorities)) > 1
    )
    for _ in range(rounds):
        turns = [
            Turn(used[i], own, trains=True, priority=priorities[i], waited=waited[i])
            for i, own in enumerate(tokens)
        ]
        chosen = next_round(turns, budget)
        assert chosen
        assert len(chosen) == 1 or sum(tokens[i] for i in chosen) <= budget
        for i, own in enumerate(tokens):
            waited[i] = 0 if i in chosen else waited[i] + 1
            used[i] += own * (i in chosen)
        assert max(waited) <= longest


def test_all_that_fit_compute_together() -> None:
    assert next_round(
        [Turn(0, 10, trains=True), Turn(500, 10, trains=True), Turn(3, 10, trains=True)], 30
    ) == [0, 1, 2]


def test_a_round_takes_no_more_memory_than_there_is_but_for_one_that_is_larger() -> None:
    turns = [
        Turn(0, 10, trains=True, bytes=60),
        Turn(1, 10, trains=True, bytes=50),
        Turn(2, 10, trains=True, bytes=40),
    ]
    assert next_round(turns, 100, 100) == [0, 2]
    assert next_round(turns, 100, 50) == [0]
    assert next_round(turns, 100, 150) == [0, 1, 2]


def test_of_what_is_gone_before_the_next_micro_batch_the_largest_counts() -> None:
    turns = [Turn(number, 10, trains=True, bytes=60, passing=50 - number) for number in range(3)]
    assert next_round(turns, 100, 83) == [0, 1, 2]
    assert next_round(turns, 100, 82) == [0, 1]


def test_forwards_without_gradients_have_rounds_of_their_own() -> None:
    turns = [Turn(5, 10, trains=True), Turn(0, 10, trains=False), Turn(9, 10, trains=False)]
    assert next_round(turns, 100) == [1, 2]


def test_a_higher_priority_may_fill_the_budget_alone_for_a_while() -> None:
    def turns(waited: int) -> list[Turn]:
        return [Turn(0, 10, trains=True, waited=waited), Turn(500, 10, trains=True, priority=1)]

    assert next_round(turns(PATIENCE - 1), 10) == [1]
    assert next_round(turns(PATIENCE), 10) == [0]
    assert next_round(turns(0), 20) == [0, 1]
