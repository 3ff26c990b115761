from __future__ import annotations

import pytest

from ft_service.plan.plan_text import time_text
from ft_service.wording import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 days"), (1, "1 day"), (1.0, "1 day"), (0.5, "0.5 days"), (1200, "1,200 days"), (2.0, "2 days")],
)
def test_one_of_something_is_not_several(number: float, text: str) -> None:
    assert counted(number, "day") == text


def test_a_verb_agrees_with_its_number() -> None:
    assert counted(1, "line", "is", "are") == "1 line is"
    assert counted(2, "line", "is", "are") == "2 lines are"


def test_a_job_of_one_step_over_one_sample() -> None:
    time = {"steps": 1, "examples": 1, "seconds_at_most": 5.0, "seconds_likely": 5.0}
    assert time_text(time) == "1 step over 1 sample takes about 5 s."
