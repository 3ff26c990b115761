"""What is given out of an answer while it is written is what is read of the whole, without a
character of a marker.
"""

from __future__ import annotations

import pytest

from ft_service.data.answer_format import Answer, AnswerFormat
from ft_service.data.answer_stream import AnswerStream
from ft_service.data.call_grammar import CallGrammar
from ft_service.data.tool_call_parser import CallFormat

ADDITION = '{"name": "add", "arguments": {"a": 1}}'
QWEN = AnswerFormat(("<s>", "</s>", "<|im_end|>"), CallFormat("<tool_call>", "name", "arguments"))
BARE = AnswerFormat(("</s>",), CallFormat("", "name", "arguments"))
MINIMAX = AnswerFormat(
    ("[e~[",),
    CallGrammar(
        '<invoke name="', '">\n<parameter name="', "", ('">', "</parameter>\n", "</invoke>")
    ),
)
OSS = AnswerFormat(
    (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
    )
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"

WRITTEN: list[tuple[AnswerFormat, str, str]] = [
    (QWEN, "", ""),
    (QWEN, " four \n", ""),
    (QWEN, "a < b and <b>4</b>\n\n- [4] <thin", ""),
    (QWEN, "one</s> two<|im_end|>", ""),
    (QWEN, f"Let me see.\n<tool_call>{ADDITION}</tool_call>", ""),
    (QWEN, "<tool_call>add 1</tool_call>", ""),
    (QWEN, "<think>\nwhy \n\n not\n</think>\n\nfour\n five ", ""),
    (
        QWEN,
        f"<think>\na <tool_call> b\n</think>\n\n<tool_call>{ADDITION}\n{ADDITION}</tool_call>",
        "",
    ),
    (QWEN, "<think>\n\n</think>\n\nfour", ""),
    (QWEN, "[THINK]two twos[/THINK]four</s>", ""),
    (QWEN, "\nit goes on", "</think>"),
    (QWEN, "two twos\n</think>\n\nfour", "</think>"),
    (QWEN, "<think>two twos</think>four", "</think>"),
    (BARE, f" {ADDITION}", ""),
    (BARE, '{"four": 4} is it', ""),
    (BARE, f"It is {ADDITION}", ""),
    (MINIMAX, 'I add. <invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>', ""),
    (OSS, "<|channel|>final<|message|>the red clock", ""),
    (OSS, f"<|channel|>analysis<|message|>7 and\n\n5 are 12 <|end|>{FINAL}12<|return|>", ""),
    (
        OSS,
        f"<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>{FINAL}3 4",
        "",
    ),
    (OSS, "<|channel|>analysis<|message|>it goes on", ""),
    (OSS, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', ""),
    (
        OSS,
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant "
        "to=add<|channel|>commentary<|message|>{}",
        "",
    ),
    (OSS, f"<|channel|>commentary<|message|>I add.<|end|>{FINAL}12", ""),
    (OSS, "no channel", ""),
]


def streamed(
    answers: AnswerFormat, text: str, closing: str, size: int
) -> tuple[list[str], list[str], Answer]:
    stream = AnswerStream(answers, tools=True, closing=closing)
    said = [stream.push(text[place : place + size]) for place in range(0, len(text), size)]
    words, thought, whole = stream.end()
    return [part[0] for part in said] + [words], [part[1] for part in said] + [thought], whole


@pytest.mark.parametrize(("answers", "text", "closing"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_parts_are_those_of_the_whole(
    answers: AnswerFormat, text: str, closing: str, size: int
) -> None:
    words, thought, whole = streamed(answers, text, closing, size)
    assert whole == answers.read(text, tools=True, closing=closing)
    assert ("".join(words), "".join(thought)) == (whole.text, whole.reasoning)


def test_what_is_certain_does_not_wait_for_the_end() -> None:
    words, thought, _ = streamed(QWEN, "<think>two</think>four <t", "", 1)
    assert "".join(thought[:-1]) == "two"
    assert "".join(words[:-1]) == "four"
    words, thought, _ = streamed(OSS, f"<|channel|>analysis<|message|>two<|end|>{FINAL}four", "", 1)
    assert ("".join(thought[:-1]), "".join(words[:-1])) == ("two", "four")


def test_without_tools_a_call_is_text() -> None:
    stream = AnswerStream(QWEN, tools=False)
    assert stream.push(f"<tool_call>{ADDITION}") == (f"<tool_call>{ADDITION}", "")


def test_a_thought_that_nothing_has_opened_is_no_marker_in_the_text() -> None:
    """What came before it was given out as text; only the whole shows that it was none."""
    words, _, whole = streamed(QWEN, "two twos</think>four", "", 1)
    assert whole == Answer("four", "two twos")
    assert "</think>" not in "".join(words)
