"""Whose base the preview's process holds next."""

from __future__ import annotations

import pytest

from ft_service.serving.base_turns import BaseTurns, is_over


def test_a_project_with_many_bases_has_no_more_turns_than_one_with_one() -> None:
    turns, wanted = BaseTurns[str](), [("b", f"b{number}") for number in range(9)]
    taken: list[str] = []
    for now in range(0, 60, 10):
        taken.append(turns.take([own for own in (*wanted, ("a", "a0")) if own[1] not in taken[-1:]], float(now)))
    assert taken == ["b0", "a0", "b1", "a0", "b2", "a0"]


def test_a_project_whose_base_was_held_for_long_waits_for_the_others() -> None:
    turns, wanted = BaseTurns[str](), [("a", "x"), ("b", "y"), ("b", "z")]
    assert turns.take(wanted, 0.0) == "x"
    assert [turns.take(wanted[1:], 100.0), turns.take([wanted[0], wanted[2]], 110.0)] == ["y", "z"]
    assert turns.take(wanted[:2], 210.0) == "x"


def test_what_nobody_waits_for_any_more_has_no_turn() -> None:
    turns = BaseTurns[str]()
    assert turns.take([("a", "x"), ("b", "y")], 0.0) == "x"
    assert turns.take([("c", "z")], 1.0) == "z"


@pytest.mark.parametrize(
    ("waited_since", "ready_at", "load_seconds", "ends_at"),
    [(100.0, 0.0, 1.0, 110.0), (100.0, 98.0, 1.0, 110.0), (100.0, 105.0, 1.0, 115.0), (100.0, 105.0, 60.0, 165.0)],
)
def test_when_a_turn_is_over(waited_since: float, ready_at: float, load_seconds: float, ends_at: float) -> None:
    for now, over in ((ends_at - 0.1, False), (ends_at, True)):
        assert is_over(now, waited_since=waited_since, ready_at=ready_at, load_seconds=load_seconds) is over
