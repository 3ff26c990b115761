"""Turns: projects alternate by what their work costs, whatever came first."""

from __future__ import annotations

import random

from ft_service.shared_work.turns import Turns


def test_projects_alternate_whatever_came_first() -> None:
    turns = Turns[int](places=1)
    for number in range(6):
        turns.put("many", number)
    turns.put("one", 100)

    began = []
    while (turn := turns.take()) is not None:
        began.append(turn.item)
        turns.end(turn)

    assert began.index(100) <= 1
    assert [item for item in began if item < 100] == list(range(6))


def test_a_project_has_less_than_all_places() -> None:
    turns = Turns[int](places=3, of_project=2)
    for number in range(5):
        turns.put("many", number)

    assert [turns.take().item for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert turns.take() is None
    turns.put("one", 100)
    assert turns.take().item == 100  # type: ignore[union-attr]
    assert turns.projects() == {"many": (3, 2), "one": (0, 1)}


def test_turns_are_shared_by_cost_and_not_by_number() -> None:
    turns = Turns[float](places=1)
    used = {"dear": 0.0, "cheap": 0.0}
    dice = random.Random(1)
    for _ in range(400):
        turns.put("dear", dice.uniform(5, 15), cost=1.0)  # what it really costs is known at its end
        turns.put("cheap", dice.uniform(0.5, 1.5), cost=1.0)

    while sum(used.values()) < 500:
        turn = turns.take()
        assert turn is not None
        used[turn.project] += turn.item
        turns.end(turn, cost=turn.item)

    assert abs(used["dear"] - used["cheap"]) <= 15


def test_a_project_that_was_idle_has_saved_up_no_turns() -> None:
    turns = Turns[str](places=1)
    for number in range(50):
        turns.put("busy", f"busy {number}")
    for _ in range(20):
        turns.end(turns.take())  # type: ignore[arg-type]
    for number in range(50):
        turns.put("late", f"late {number}")

    began = []
    for _ in range(10):
        turn = turns.take()
        assert turn is not None
        began.append(turn.project)
        turns.end(turn)

    assert 4 <= began.count("busy") <= 6


def test_costs_that_were_expected_too_high_put_off_nobody_who_comes_later() -> None:
    turns = Turns[str](places=8, of_project=7)
    for number in range(100):
        turns.put("busy", f"busy {number}", cost=1.0)
    running = [turns.take() for _ in range(7)]
    for turn in running:
        assert turn is not None
        turns.end(turn, cost=0.01)
    turns.put("late", "late", cost=1.0)
    turns.put("late", "late too", cost=1.0)

    began = [turns.take() for _ in range(3)]
    assert [turn.project for turn in began if turn is not None].count("late") >= 1


def test_a_pause_does_not_make_a_project_forget_what_it_has_used() -> None:
    turns = Turns[str](places=2)
    turns.put("other", "long")
    running = turns.take()
    assert running is not None
    turns.put("dear", "first", cost=100)
    turns.end(turns.take())  # type: ignore[arg-type]
    turns.put("dear", "second")
    turns.put("third", "only")

    assert turns.take().item == "only"  # type: ignore[union-attr]


def test_work_that_may_not_begin_does_not_hold_up_the_rest_of_its_project() -> None:
    turns = Turns[str](places=2)
    turns.put("a", "too large")
    turns.put("a", "small")

    assert turns.take(lambda item: item != "too large").item == "small"  # type: ignore[union-attr]
    assert turns.drop("too large")
    assert not turns.drop("too large")
    assert len(turns) == 0
