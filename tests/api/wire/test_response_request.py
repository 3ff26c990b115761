"""The items of the Responses API become one conversation, and what is not done is refused by its
place.
"""

from __future__ import annotations

from typing import Any

import pytest

from api.wire.response_request import parse_response_request
from ft_service.errors import SpecError

ASKED: dict[str, Any] = {"model": "tiny", "input": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
TOLD = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Three.", "annotations": [], "logprobs": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
THOUGHT["content"] = [{"type": "reasoning_text", "text": "Add."}]


def chat(**fields: Any) -> dict[str, Any]:
    return parse_response_request(ASKED | fields).chat()


def test_a_text_is_what_the_user_says_and_instructions_the_systems() -> None:
    assert chat() == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "stream": False,
    }
    said = chat(instructions="Be brief.", max_output_tokens=7, stream=True, store=False)
    assert said["messages"][0] == {"role": "system", "content": "Be brief."}
    assert said["max_completion_tokens"] == 7
    assert said["stream_options"] == {"include_usage": True}


def test_what_the_assistant_said_in_a_row_is_one_message() -> None:
    user = {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}
    messages = chat(input=[user, THOUGHT, CALL, RESULT, TOLD, {**user, "type": "message"}])[
        "messages"
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    asked = {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}
    assert messages == [
        asked,
        {
            "role": "assistant",
            "reasoning_content": "Add.",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "Three."}]},
        asked,
    ]
    said = {"role": "assistant", "content": "One."}
    messages = chat(input=[said, said, CALL, {**CALL, "call_id": "c2"}, said])["messages"]
    assert [sorted(set(message) - {"role"}) for message in messages] == [
        ["content"],
        ["content", "tool_calls"],
        ["content"],
    ]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]


def test_tools_and_log_probabilities_are_those_of_a_chat() -> None:
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
    body = chat(
        tools=[tool],
        tool_choice="none",
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    function = {"name": "f", "parameters": parameters, "strict": True}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("none", False)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_images_are_parts_of_the_users_messages() -> None:
    image = {"type": "input_image", "image_url": PIXEL, "detail": "low"}
    words = {"type": "input_text", "text": "What is it?"}
    asked = ASKED | {
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [words, image]}],
    }
    parsed = parse_response_request(asked)
    assert parsed.chat()["messages"][1]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": PIXEL, "detail": "low"},
    }
    refused = SpecError("messages.1.content.1: is no image.", param="messages", code="bad_image")
    told = parsed.in_own_places(refused)
    assert (told.message, told.param) == ("input.0.content.1: is no image.", "input")
    assert told.code == "bad_image"
    other = SpecError("temperature: is too hot.", param="temperature")
    assert parsed.in_own_places(other) is other


def test_what_a_request_goes_on_with_comes_after_its_instructions() -> None:
    asked = parse_response_request(
        ASKED | {"instructions": "Be brief.", "previous_response_id": "resp_1"}
    )
    earlier = [{"role": "user", "content": "1 + 2?"}, THOUGHT, CALL, RESULT, TOLD]
    with pytest.raises(SpecError) as caught:
        asked.chat(earlier[3:])
    assert caught.value.param == "previous_response_id", "a result without its call"
    chat = asked.chat(earlier)
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [message["role"] for message in chat["messages"]] == roles
    refused = SpecError("messages.5.content: is bad.", param="messages")
    assert asked.in_own_places(refused, earlier).param == "input"


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": False},
        {"text": {"format": {"type": "text"}}},
        {"text": {"format": {"type": "text"}, "verbosity": None}},
        {"reasoning": {"effort": None, "summary": None}},
        {"truncation": "disabled", "background": False, "previous_response_id": None},
        {"metadata": {"a": "b"}, "user": "me", "service_tier": "auto"},
    ],
)
def test_what_changes_nothing_is_let_through(harmless: dict[str, Any]) -> None:
    assert chat(**harmless) == chat()


IMAGE_FILE = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
ENCRYPTED = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}


@pytest.mark.parametrize(
    ("fields", "param", "place"),
    [
        ({"store": "yes"}, "store", "store"),
        ({"previous_response_id": ""}, "previous_response_id", "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "text"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.name"),
        ({"input": []}, "input", "input"),
        ({"input": ["Hi"]}, "input", "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input.0.type"),
        ({"input": [TOLD, RESULT]}, "input", "input.1"),
        ({"input": [TOLD, IMAGE_FILE]}, "input", "input.1.content.0.type"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input", "input.0.role"),
        ({"input": [{"role": "user"}]}, "input", "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input.0.arguments"),
        ({"input": [ENCRYPTED]}, "input", "input.0.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"audio": {}}, "audio", "audio"),
    ],
)
def test_what_is_not_done_is_refused_by_its_place(
    fields: dict[str, Any], param: str, place: str
) -> None:
    with pytest.raises(SpecError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith((f"{place}:", f"{place} "))
