"""Errors in a line, in words."""

from __future__ import annotations

import pytest

from ft_service.data.line_errors import Fault, LineError, refuse_keys, required, text_of


def test_a_fault_names_its_lines_and_its_place() -> None:
    assert str(Fault(3, "messages.0.role", "is required")) == "line 3: messages.0.role is required"
    assert Fault(3, "", "is blank", last_line=9).text("row") == "rows 3 to 9: is blank"
    assert str(Fault(0, "", "the file holds no examples")) == "the file holds no examples"


def test_keys_and_texts_are_checked() -> None:
    with pytest.raises(LineError, match=r"^a\.b: is refused"):
        refuse_keys({"c": 1, "b": 2}, {"d"}, {"b": "is refused"}, "a.")
    with pytest.raises(LineError, match=r"^a\.c: is not a known key; known are d, e"):
        refuse_keys({"c": 1}, {"e", "d"}, {}, "a.")
    with pytest.raises(LineError, match=r"^a\.b: is required"):
        required({}, "b", "a.")
    with pytest.raises(LineError, match="half of a surrogate pair at character 2"):
        text_of("a\ud800", "a")
