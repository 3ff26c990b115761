from __future__ import annotations

import pytest

from ft_service.plan.plan_text import time_text
from ft_service.wording import bytes_text, counted, did_you_mean, duration_text, kind, shown_value


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 days"),
        (1, "1 day"),
        (1.0, "1 day"),
        (0.5, "0.5 days"),
        (1200, "1,200 days"),
        (2.0, "2 days"),
    ],
)
def test_one_of_something_is_not_several(number: float, text: str) -> None:
    assert counted(number, "day") == text


def test_a_verb_agrees_with_its_number() -> None:
    assert counted(1, "line", "is", "are") == "1 line is"
    assert counted(2, "line", "is", "are") == "2 lines are"


def test_kinds_of_values_are_those_of_json() -> None:
    assert [kind(value) for value in (None, True, 1.5, "a", [], [1], {}, {"a": 1})] == [
        *(
            "null",
            "true",
            "a number",
            "a string",
            "an empty list",
            "a list",
            "an empty object",
            "an object",
        )
    ]


def test_the_most_similar_choice_is_proposed_in_its_own_case() -> None:
    assert did_you_mean("rtx4090", ["RTX-4090", "H100"]) == " Did you mean RTX-4090?"
    assert did_you_mean("b200x", []) == did_you_mean("cpu", ["H100"]) == ""


def test_values_are_shown_as_in_yaml_and_shortened() -> None:
    assert shown_value({"a": None, "b": [True, 1.5, "x"]}) == "{'a': null, 'b': [true, 1.5, 'x']}"
    assert len(shown_value("a" * 100)) == len(shown_value(["a"] * 100)) == 80
    nested: list[object] = []
    for _ in range(500):
        nested = [nested]
    assert shown_value(nested).startswith("[[[["), "as deep as a body may be"


def test_a_job_of_one_step_over_one_sample() -> None:
    time = {"steps": 1, "examples": 1, "seconds_at_most": 5.0, "seconds_likely": 5.0}
    assert time_text(time) == "1 step over 1 sample takes about 5 s."


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * 2**30, "5.00 GiB")]
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (0.4, "less than a second"),
            (29, "29 s"),
            (31, "31 s"),
            (59.4, "59 s"),
            (59.6, "1 min"),
            (89, "1 min"),
        ),
        *((7500, "2 h 5 min"), (3599, "1 h 0 min")),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
