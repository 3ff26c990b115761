"""Work that takes several places, such as bytes."""

from __future__ import annotations

import pytest

from ft_service.shared_work.turns import Turns


def test_sizes_count_for_a_project_and_for_all() -> None:
    turns = Turns[str](places=10, of_project=6)
    turns.put("many", "five", size=5)
    turns.put("many", "two", size=2)
    turns.put("one", "six", size=6)
    first = turns.take()
    assert first is not None
    assert first.item == "five"
    assert turns.take() is None, "two are too many for its project, and six for all"
    turns.put("small", "four", size=4)
    assert turns.take() is None, "what is smaller does not pass what is next"
    turns.end(first)
    began = [turn.item for _ in range(3) if (turn := turns.take()) is not None]
    assert began == ["six", "four"]
    assert turns.projects() == {"many": (1, 0), "one": (0, 6), "small": (0, 4)}


def test_what_could_never_begin_is_no_work() -> None:
    with pytest.raises(ValueError, match="7 places"):
        Turns[str](places=10, of_project=6).put("many", "seven", size=7)
