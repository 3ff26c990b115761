from __future__ import annotations

import json

import pytest

from ft_service.chatlines import LineError, Sample, parse_line

USER = {"role": "user", "content": "Two plus two?"}
ANSWER = {"role": "assistant", "content": "Four."}


def line(*messages: object, **more: object) -> str:
    return json.dumps({"messages": list(messages), **more})


def test_a_conversation_becomes_messages_and_weights() -> None:
    sample = parse_line(line({"role": "developer", "content": "Be brief."}, USER, ANSWER))

    assert sample == Sample(({"role": "system", "content": "Be brief."}, USER, ANSWER), (0, 0, 1))


def test_weights_choose_what_is_trained_on() -> None:
    sample = parse_line(line(USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}))

    assert sample.weights == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("{", "", "is not JSON"),
        ("[" * 100_000, "", "nested too deeply"),
        ("1" * 5000, "", "not usable JSON"),
        ("[]", "", "not an empty list"),
        ("{}", "messages", "is required"),
        (line(), "messages", "not an empty list"),
        ('{"messages": "hi"}', "messages", "not a string"),
        (line(USER, ANSWER, mood="good"), "mood", "no such key"),
        (line(USER, ANSWER, tools=[]), "tools", "tool calls"),
        ('{"prompt": "a", "completion": "b"}', "prompt", "not chat"),
        (line("hi"), "messages.0", "not a string"),
        (line({"content": "hi"}), "messages.0.role", "is required"),
        (line({"role": "robot", "content": "hi"}), "messages.0.role", "not 'robot'"),
        (line({"role": ["user"], "content": "hi"}), "messages.0.role", "must be one of"),
        (line({"role": "tool", "content": "hi"}), "messages.0.role", "tool calls"),
        (line({"role": "function", "content": "hi"}), "messages.0.role", "tool calls"),
        (line({"role": "user"}), "messages.0.content", "is required"),
        (line({"role": "user", "content": None}), "messages.0.content", "not null"),
        (line({"role": "user", "content": [{"type": "image_url"}]}), "messages.0.content", "one string"),
        (line(USER, {"role": "assistant", "content": "\ud83d"}), "messages.1.content", "surrogate"),
        (line(USER, ANSWER | {"tool_calls": []}), "messages.1.tool_calls", "tool calls"),
        (line(USER | {"name": "Ann"}, ANSWER), "messages.0.name", "leave it out"),
        (line(USER | {"mood": "good"}, ANSWER), "messages.0.mood", "no such key"),
        (line(USER | {"weight": 1}, ANSWER), "messages.0.weight", "only for assistant"),
        (line(USER, ANSWER | {"weight": 2}), "messages.1.weight", "not 2"),
        (line(USER, ANSWER | {"weight": True}), "messages.1.weight", "not True"),
        (line(USER), "messages", "no assistant message"),
        (line(USER, ANSWER | {"weight": 0}), "messages", "weight 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_place(text: str, field: str, reason: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(text)

    assert caught.value.field == field
    assert reason in caught.value.reason
