"""Whose base the preview's process holds next."""

from __future__ import annotations

import pytest

from ft_service.serving.base_turns import BaseTurns, is_over


def test_a_project_with_many_bases_has_no_more_turns_than_one_with_one() -> None:
    turns = BaseTurns[str]()
    wanted = [("b", f"b{number}") for number in range(9)]
    taken: list[str] = []
    for _ in range(6):
        taken.append(
            turns.take([own for own in (*wanted, ("a", "a0")) if own[1] not in taken[-1:]])
        )
    assert taken == ["b0", "a0", "b1", "a0", "b2", "a0"]


def test_what_nobody_waits_for_any_more_has_no_turn() -> None:
    turns = BaseTurns[str]()
    assert turns.take([("a", "x"), ("b", "y")]) == "x"
    assert turns.take([("c", "z")]) == "z"


@pytest.mark.parametrize(
    ("waited_since", "ready_at", "load_seconds", "ends_at"),
    [
        (100.0, 0.0, 1.0, 110.0),
        (100.0, 98.0, 1.0, 110.0),
        (100.0, 105.0, 1.0, 115.0),
        (100.0, 105.0, 60.0, 165.0),
    ],
)
def test_when_a_turn_is_over(
    waited_since: float, ready_at: float, load_seconds: float, ends_at: float
) -> None:
    for now, over in ((ends_at - 0.1, False), (ends_at, True)):
        assert (
            is_over(now, waited_since=waited_since, ready_at=ready_at, load_seconds=load_seconds)
            is over
        )
