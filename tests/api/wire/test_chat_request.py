"""Every field of OpenAI's that is not done here is refused by name; what says nothing is let
through.
"""

from __future__ import annotations

from typing import Any

import pytest

from api.wire.chat_request import parse_chat_completion
from ft_service.errors import SpecError

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def test_the_defaults_are_openais() -> None:
    assert parse_chat_completion(ASKED).order(None) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [],
        "adapter": None,
        "n": 1,
        "max_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": [],
        "seed": None,
        "top_logprobs": None,
        "parallel_tool_calls": True,
    }


def test_both_names_of_the_limit_and_both_forms_of_stop() -> None:
    for body in (
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ):
        assert parse_chat_completion(ASKED | body).order(None)["max_tokens"] == 5
    assert parse_chat_completion(ASKED | {"stop": "a"}).order(None)["stop"] == ["a"]
    assert parse_chat_completion(ASKED | {"stop": ["a", "b"]}).order(None)["stop"] == ["a", "b"]


def test_messages_keep_the_names_of_participants() -> None:
    messages = [
        {"role": "system", "content": "Be kind.", "name": "host"},
        {"role": "user", "content": "Hi", "name": "Ann"},
    ]
    assert parse_chat_completion(ASKED | {"messages": messages}).order(None)["messages"] == messages
    with pytest.raises(
        SpecError, match=r"messages\.0\.name: of a participant must be 1 to 64 characters"
    ):
        parse_chat_completion(
            ASKED | {"messages": [{"role": "user", "content": "Hi", "name": "Ann Lee"}]}
        ).order(None)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "tool_calls": [call],
    }
    messages = [*ASKED["messages"], answer, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    order = parse_chat_completion(ASKED | {"messages": messages}).order("folder")
    assert order["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert order["adapter"] == "folder"


def test_what_asks_for_nothing_is_let_through() -> None:
    given = {
        "user": "me",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tool_choice": "auto",
        "store": False,
        "seed": None,
        "logprobs": None,
    }
    parse_chat_completion(ASKED | given)


def test_tools_are_not_told_of_with_tool_choice_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse_chat_completion(ASKED | {"tools": tools}).order(None)["tools"] == tools
    assert (
        parse_chat_completion(ASKED | {"tools": tools, "tool_choice": "none"}).order(None)["tools"]
        == []
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"n": 5}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a" * 1001]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"topk": 4}, "topk"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_a_fault_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_chat_completion(ASKED | body).order(None)
    assert (caught.value.param or "").split(".")[0] == param
    assert param in caught.value.message
