"""Values of other tools' files."""

from __future__ import annotations

import pytest

from ft_service.convert.verdicts import Source, as_number, as_plain


@pytest.mark.parametrize(
    ("value", "number"),
    [("1e-4", 1e-4), (3, 3.0), (True, None), ("a", None), ("inf", None), (10**400, None)],
)
def test_numbers_are_finite_and_may_be_text(value: object, number: float | None) -> None:
    assert as_number(value) == number


def test_a_section_is_a_file_of_its_own_that_knows_the_file_around_it() -> None:
    assert [as_plain(value) for value in ("True", "false", "auto")] == [True, False, "auto"]
    source = Source({"steps": 2.5, "max_steps": "4", "inner.steps": 7})
    source.gpus = 2
    inner = source.inside("inner.")
    assert (source.number("steps", "max_steps"), inner.number("steps"), inner.gpus) == (4, 7, 2)
    assert inner.around is source
