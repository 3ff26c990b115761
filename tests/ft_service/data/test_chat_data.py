"""Chats that were kept, as lines of data."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.data.chat_data import LeftOutError, lines_of

ASKED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
BETTER = {"role": "assistant", "content": "better"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def chat(finish: str = "stop", **options: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "d", "refusal": None, "annotations": []}
    second = {"role": "assistant", "content": "e"}
    choices = [
        {"index": 0, "message": message, "finish_reason": finish},
        {"index": 1, "message": second, "finish_reason": "stop"},
    ]
    return {"messages": ASKED, "choices": choices, "tools": None, "feedback": None, **options}


def said(**feedback: Any) -> dict[str, Any]:
    return {"feedback": {"label": None, "better": None, "choice": 0, **feedback}}


def answers(line: dict[str, Any]) -> list[tuple[str, int]]:
    return [
        (message["content"], message.get("weight", 1))
        for message in line["messages"]
        if message["role"] == "assistant"
    ]


def test_one_answer_is_learned_the_better_one_if_there_is_one() -> None:
    assert answers(lines_of(chat(), "sft")[0]) == [("b", 0), ("d", 1)]
    assert answers(lines_of(chat(**said(label=False, better=BETTER)), "sft")[0])[1] == (
        "better",
        1,
    )
    assert answers(lines_of(chat(**said(label=True, choice=1)), "sft")[0])[1] == ("e", 1)
    assert lines_of(chat(tools=TOOLS), "sft")[0]["tools"] == TOOLS
    with pytest.raises(LeftOutError, match="bad one"):
        lines_of(chat(**said(label=False)), "sft")


def test_labels_are_of_the_given_answer_and_a_better_one_is_good() -> None:
    lines = lines_of(chat(**said(label=False, better=BETTER)), "kto")
    assert [(answers(line)[-1][0], line["label"]) for line in lines] == [
        ("d", False),
        ("better", True),
    ]
    with pytest.raises(LeftOutError, match="label"):
        lines_of(chat(), "kto")


def test_a_pair_is_the_better_answer_and_the_one_given() -> None:
    (line,) = lines_of(chat(**said(better=BETTER), tools=TOOLS), "dpo")
    assert line == {
        "input": {"messages": ASKED, "tools": TOOLS},
        "preferred_output": [BETTER],
        "non_preferred_output": [{"role": "assistant", "content": "d"}],
    }
    with pytest.raises(LeftOutError, match="better"):
        lines_of(chat(**said(label=True)), "dpo")


def test_answers_that_nothing_should_learn_are_left_out() -> None:
    with pytest.raises(LeftOutError, match="short"):
        lines_of(chat("length"), "sft")
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    choices = [{"index": 0, "message": refusal, "finish_reason": "stop"}]
    with pytest.raises(LeftOutError, match="refusal"):
        lines_of(chat(choices=choices), "sft")
    unanswered = [*ASKED, {"role": "robot", "content": "?"}]
    with pytest.raises(LeftOutError, match=r"messages\.3\.role"):
        lines_of(chat(messages=unanswered), "sft")
