"""How tests wait: tests/support/attempts.py."""

from __future__ import annotations

from functools import wraps

import pytest

from tests.support.attempts import wait_for

NEVER = False


def test_an_answer_that_is_empty_is_none() -> None:
    """A list that fills or a text that is being written is asked for again."""
    answers = iter([None, False, "", [], 0, "there"])
    assert wait_for(lambda: next(answers)) == "there"


def test_who_waits_in_vain_says_for_what() -> None:
    with pytest.raises(
        AssertionError,
        match=r"^did not happen within 0 seconds: .*lambda: NEVER, 0.* \(test_waits\.py:\d+\)$",
    ):
        wait_for(lambda: NEVER, 0.0)


def test_who_does_something_between_two_looks_says_for_what_too() -> None:
    def look() -> bool:
        return NEVER

    @wraps(look)
    def turned() -> bool:
        return look()

    with pytest.raises(AssertionError, match=r"def look\(\)"):
        wait_for(turned, 0.0)
