"""Answers are read as they were written: text, reasoning and calls."""

from __future__ import annotations

import pytest

from ft_service.data.answer_format import Answer, AnswerFormat, closing_of
from ft_service.data.tool_call_parser import CallFormat

CALLS = CallFormat("<tool_call>", "name", "arguments")
ADDITION = '{"name": "add", "arguments": {"a": 1}}'
CALLED = {"name": "add", "arguments": '{"a": 1}'}
CHANNELS = AnswerFormat(
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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<s> four</s>", Answer("four")),
        (f"Let me see.<tool_call>{ADDITION}</tool_call></s>", Answer("Let me see.", "", [CALLED])),
        (f"<s><tool_call>{ADDITION}\n{ADDITION}", Answer("", "", [CALLED] * 2)),
        ("<tool_call>add 1</tool_call>", Answer("add 1</tool_call>")),
        (
            f"<think>\nwhy\n</think>\n\n<tool_call>{ADDITION}</tool_call>",
            Answer("", "why", [CALLED]),
        ),
        ("<think>\n\n</think>\n\nfour", Answer("four")),
        ("two twos\n</think>\n\nfour", Answer("four", "two twos")),
        ("[THINK]two twos[/THINK]four</s>", Answer("four", "two twos")),
        ("<think>\nit goes on", Answer("", "it goes on")),
        ("a <think> b </think> c", Answer("a <think> b </think> c")),
    ],
)
def test_parts_of_an_answer(text: str, answer: Answer) -> None:
    assert AnswerFormat(("<s>", "</s>", "<tool_call>"), CALLS).read(text, tools=True) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>final<|message|>the red clock", Answer("the red clock")),
        (
            "<|channel|>analysis<|message|>7 and 5 are "
            "12<|end|><|start|>assistant<|channel|>final<|message|>12<|return|>",
            Answer("12", "7 and 5 are 12"),
        ),
        ("<|channel|>analysis<|message|>it goes on", Answer("", "it goes on")),
        (
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            Answer("", "", [CALLED]),
        ),
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            Answer("I add.", "why", [CALLED]),
        ),
        ("no channel", Answer("no channel")),
    ],
)
def test_parts_of_an_answer_in_channels(text: str, answer: Answer) -> None:
    assert CHANNELS.read(text, tools=True) == answer


def test_without_tools_nothing_is_a_call() -> None:
    assert AnswerFormat((), CallFormat("", "name", "arguments")).read(
        ADDITION, tools=False
    ) == Answer(ADDITION)
    called = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert CHANNELS.read(called, tools=False) == Answer("", '{"a": 1}')


def test_special_texts_within_others_and_no_known_calls() -> None:
    assert AnswerFormat(("<a", "<a>")).read(f"<a>x<a{ADDITION}", tools=True) == Answer(
        f"x{ADDITION}"
    )
    assert AnswerFormat().read("as it is", tools=True) == Answer("as it is")


def test_a_thought_that_the_prompt_opens_is_all_of_an_answer_that_does_not_close_it() -> None:
    closing = closing_of("<|im_start|>assistant\n<think>\n")
    assert AnswerFormat().read("it goes on", tools=False, closing=closing) == Answer(
        "", "it goes on"
    )
    for prompt in ("<|channel>thought\n<channel|>", "<think>\n</think>\n\n", "<think> is what?"):
        assert closing_of(prompt) == ""


def test_two_answers_are_compared_by_their_calls_too() -> None:
    spaced = Answer("See.", calls=[{"name": "add", "arguments": '{ "a":1 }'}])
    assert (
        spaced.whole
        == Answer("See.", "why", [CALLED]).whole
        == 'See.\n{"arguments": {"a": 1}, "name": "add"}'
    )
