"""Text comes out as soon as it is certain, and never has to be taken back."""

from __future__ import annotations

import pytest

from workers.serving.answer_text import AnswerText


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def streamed(text: str, stops: list[str]) -> tuple[list[str], AnswerText]:
    answer = AnswerText(Bytes(), stops)
    out = []
    for byte in text.encode():
        out.append(answer.push(byte))
        if answer.stopped:
            break
    return [*out, answer.end()], answer


def test_characters_come_whole() -> None:
    out, _ = streamed("aé€😀b", [])
    assert [text for text in out if text] == ["a", "é", "€", "😀", "b"]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("one EN", ["END"], "one EN"),
        ("aab", ["ab"], "a"),
        ("xyz", ["yz", "y"], "x"),
        ("no", [], "no"),
    ],
)
def test_nothing_of_a_stop_is_given(text: str, stops: list[str], expected: str) -> None:
    out, _ = streamed(text, stops)
    assert "".join(out) == expected


def test_what_may_become_a_stop_waits() -> None:
    out, _ = streamed("a##b", ["##!"])
    assert out == ["a", "", "", "##b", ""]
