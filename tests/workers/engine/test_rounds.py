"""Fairness of rounds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.rounds import Turn, next_round

TOKENS = st.lists(st.integers(1, 300), min_size=1, max_size=8)


@given(TOKENS, st.integers(1, 600), st.integers(1, 40))
def test_every_job_computes_within_the_bound_and_the_budget_holds(tokens: list[int], budget: int, rounds: int) -> None:
    used, waited = [0] * len(tokens), [0] * len(tokens)
    longest = (len(tokens) - 1) * math.ceil(max(tokens) / min(tokens) + 1)
    for _ in range(rounds):
        chosen = next_round([Turn(used[i], own, trains=True) for i, own in enumerate(tokens)], budget)
        assert chosen
        assert len(chosen) == 1 or sum(tokens[i] for i in chosen) <= budget
        for i, own in enumerate(tokens):
            waited[i] = 0 if i in chosen else waited[i] + 1
            used[i] += own * (i in chosen)
        assert max(waited) <= longest


def test_all_that_fit_compute_together() -> None:
    assert next_round([Turn(0, 10, trains=True), Turn(500, 10, trains=True), Turn(3, 10, trains=True)], 30) == [0, 1, 2]


def test_a_round_takes_no_more_memory_than_there_is_but_for_one_that_is_larger() -> None:
    turns = [Turn(0, 10, trains=True, bytes=60), Turn(1, 10, trains=True, bytes=50), Turn(2, 10, trains=True, bytes=40)]
    assert next_round(turns, 100, 100) == [0, 2]
    assert next_round(turns, 100, 50) == [0]
    assert next_round(turns, 100, 150) == [0, 1, 2]


def test_forwards_without_gradients_have_rounds_of_their_own() -> None:
    turns = [Turn(5, 10, trains=True), Turn(0, 10, trains=False), Turn(9, 10, trains=False)]
    assert next_round(turns, 100) == [1, 2]
