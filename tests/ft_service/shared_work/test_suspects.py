"""Work that was under way when the process of all ended by itself."""

from __future__ import annotations

from ft_service.shared_work import suspects as suspects_module
from ft_service.shared_work.suspects import BESIDE, KEPT_SECONDS, Suspects


def test_under_way_at_two_ends_it_is_refused() -> None:
    suspects = Suspects()
    assert not suspects
    suspects.add(["a", "b", "a"])
    assert [suspects.is_refused(work) for work in ("a", "b", "c")] == [False] * 3
    suspects.add(["a", "c"])
    assert [suspects.is_refused(work) for work in ("a", "b", "c")] == [True, False, False]


def test_what_is_beside_the_one_at_fault_is_refused_late() -> None:
    suspects = Suspects()
    suspects.add(["a"])
    for _ in range(3):
        suspects.add(["a"], BESIDE)
    assert "a" in suspects
    assert not suspects.is_refused("a")
    suspects.add(["a"], BESIDE)
    assert suspects.is_refused("a")


def test_what_was_done_between_is_not() -> None:
    suspects = Suspects()
    suspects.add(["a"])
    suspects.forget("a")
    suspects.add(["a"])
    assert not suspects.is_refused("a")


def test_after_a_while_it_may_begin_again() -> None:
    now = 0.0
    suspects = Suspects(lambda: now)
    for _ in range(2):
        suspects.add(["a"])
    assert suspects.is_refused("a")
    now = KEPT_SECONDS
    assert not suspects.is_refused("a")
    suspects.add(["a"])
    assert not suspects.is_refused("a"), "its earlier ends are forgotten"


def test_no_more_than_so_many_are_remembered() -> None:
    suspects = Suspects()
    suspects.add(str(number) for number in range(2 * suspects_module._MOST))
    assert len(suspects) == suspects_module._MOST
