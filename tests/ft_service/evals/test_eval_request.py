from __future__ import annotations

import json

import pytest

from ft_service.errors import SpecError
from ft_service.evals.eval_request import (
    MOST_ITEMS,
    MOST_LINE,
    MOST_LINES,
    MOST_VALUES,
    read_lines,
)

SCHEMA = {"type": "object", "required": ["a"]}
LINE = b'{"item": {"a": 1.0}}\n'


def test_lines_are_items_with_their_numbers_as_written() -> None:
    lines = [LINE, b"\n", b'{"item": {"a": 2}, "sample": {"output_text": "x"}}']
    first, second = read_lines(lines, SCHEMA)
    assert json.dumps(first.item) == '{"a": 1.0}'
    assert second.sample is not None
    assert second.sample.output_text == "x"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no items"),
        ([b"\n"] * (MOST_LINES + 1), f"Line {MOST_LINES + 1}"),
        ([LINE] * (MOST_ITEMS + 1), f"Line {MOST_ITEMS + 1}"),
        ([LINE, b"{"], "Line 2: is not JSON"),
        ([b'{"item": {"a": NaN}}'], "Line 1: is not JSON"),
        ([b"[" * 5000], "values"),
        ([b'{"item": {"a": [' + b"1," * MOST_VALUES + b"1]}}"], "values"),
        ([b'{"item": {"a": "' + b"x" * MOST_LINE + b'"}}'], "bytes"),
        ([b'{"item": {"b": 1}}'], "Line 1: item.a: is missing"),
        ([b'{"a": 1}'], "Line 1"),
        ([b'{"item": {"a": 1}, "sample": {"text": "x"}}'], "sample"),
    ],
)
def test_what_is_wrong_is_told_by_line(lines: list[bytes], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        list(read_lines(lines, SCHEMA))
    assert said in caught.value.message
    assert caught.value.code == "invalid_item"
