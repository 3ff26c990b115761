from __future__ import annotations

import json
import re

import pytest

from ft_service.data.chat_line import LineError, load_object, parse_line
from ft_service.data.sample_kinds import Conversation

USER = {"role": "user", "content": "Two plus two?"}
ANSWER = {"role": "assistant", "content": "Four."}


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def calling(arguments: str) -> dict[str, object]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def line(*messages: object, **more: object) -> str:
    return json.dumps({"messages": list(messages), **more})


def test_a_conversation_becomes_messages_and_weights() -> None:
    sample = parse_line(line({"role": "developer", "content": "Be brief."}, USER, ANSWER))

    assert sample == Conversation(
        ({"role": "system", "content": "Be brief."}, USER, ANSWER), (0, 0, 1)
    )


def test_tools_their_calls_and_answers_become_what_templates_take() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
    sample = parse_line(
        line(
            USER,
            calling('{"a": 2, "b": 2}'),
            result,
            ANSWER,
            tools=[TOOL],
            parallel_tool_calls=False,
        )
    )
    assert sample.tools == (TOOL,)
    assert sample.messages[1]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"a": 2, "b": 2},
    }
    assert sample.messages[1]["content"] == ""
    assert sample.messages[2] == result
    assert sample.weights == (0, 1, 0, 1)
    named = result | {"name": "add"}
    assert parse_line(line(USER, calling("{}"), named, ANSWER, tools=[TOOL])).messages[2] == named
    with pytest.raises(LineError, match=r"messages\.2\.name: must be a string"):
        parse_line(line(USER, calling("{}"), result | {"name": 1}, ANSWER, tools=[TOOL]))


def test_older_words_for_tools_mean_the_same() -> None:
    called = {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 2}'}}
    result = {"role": "function", "name": "add", "content": "4"}
    sample = parse_line(line(USER, called, result, ANSWER, functions=[TOOL["function"]]))
    assert sample.tools == (TOOL,)
    assert sample.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert sample.messages[2] == {"role": "tool", "name": "add", "content": "4"}


def test_tools_as_trl_writes_them_are_read() -> None:
    """TRL's documentation has arguments as objects, calls without an id, and results that name the
    function alone.
    """
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    calls = {"role": "assistant", "tool_calls": [call, call]}
    result = {"role": "tool", "name": "add", "content": "4"}
    sample = parse_line(line(USER, calls, result, result, ANSWER, tools=json.dumps([TOOL])))
    assert sample.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call, call]}
    assert sample.messages[2] == result
    assert sample.tools == (TOOL,)
    assert sample.weights == (0, 1, 0, 0, 1)


@pytest.mark.parametrize("tools", [[TOOL["function"]], [{"type": "function", **TOOL["function"]}]])
def test_definitions_of_tools_need_no_type_of_their_own(tools: list[dict[str, object]]) -> None:
    assert parse_line(line(USER, ANSWER, tools=tools)).tools == (TOOL,)
    assert parse_line(line(USER, ANSWER, tools=json.dumps(tools))).tools == (TOOL,)
    assert parse_line(line(USER, ANSWER, tools="")).tools == ()


def test_axolotls_mask_of_a_message_is_its_weight() -> None:
    left_out = ANSWER | {"train": False}
    learned = ANSWER | {"train": True}
    sample = parse_line(line(USER | {"train": False}, left_out, USER, learned))
    assert sample == Conversation((USER, ANSWER, USER, ANSWER), (0, 0, 0, 1))


def test_participants_may_have_names() -> None:
    """As in OpenAI's cookbook, whose examples have names of system messages."""
    named = (
        {"role": "system", "content": "Be kind.", "name": "example_user"},
        USER | {"name": "Ann-1.é"},
        ANSWER | {"name": "b"},
    )
    assert parse_line(line(*named)) == Conversation(named, (0, 0, 1))
    assert parse_line(line(named[0] | {"role": "developer"}, USER, ANSWER)).messages[0] == named[0]


def test_fields_that_are_null_in_an_answer_of_openai_count_as_absent() -> None:
    """`completion.choices[0].message.model_dump()` has all of them; so have lines that were written
    from rows of a table.
    """
    dumped = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    absent = {"tools": None, "functions": None, "parallel_tool_calls": None}
    given = line(USER | {"name": None}, ANSWER | dumped | {"weight": None}, **absent)
    assert parse_line(given) == parse_line(line(USER, ANSWER))
    called = parse_line(
        line(
            USER,
            calling("{}") | dumped | {"tool_calls": calling("{}")["tool_calls"]},
            tools=[TOOL],
            functions=None,
        )
    )
    assert called == parse_line(line(USER, calling("{}"), tools=[TOOL]))
    with pytest.raises(LineError, match=r"messages\.1\.refusal: cannot be trained on"):
        parse_line(line(USER, ANSWER | dumped | {"refusal": "No."}))
    with pytest.raises(LineError, match=r"messages\.1\.annotations: is not a known key"):
        parse_line(line(USER, ANSWER | {"annotations": [{"type": "url_citation"}]}))


def test_content_in_parts_of_text_is_one_text() -> None:
    parts = [{"type": "text", "text": "Two plus "}, {"type": "text", "text": "two?"}]
    assert parse_line(line({"role": "user", "content": parts}, ANSWER)).messages[0] == USER


def test_first_parts_of_type_thinking_are_the_reasoning() -> None:
    """Mistral's and Anthropic's."""
    text = {"type": "text", "text": "Four."}
    wanted = {"role": "assistant", "content": "Four.", "reasoning_content": "two twos"}
    for thought in (
        "two twos",
        [{"type": "text", "text": "two "}, {"type": "text", "text": "twos"}],
    ):
        for more in ({}, {"signature": "c2ln"}, {"closed": True}):
            part = {"type": "thinking", "thinking": thought, **more}
            assert (
                parse_line(line(USER, {"role": "assistant", "content": [part, text]})).messages[1]
                == wanted
            )
    part = {"type": "thinking", "thinking": "two twos"}
    refused = {
        "messages.1.content.1.type: is 'thinking'": {"role": "assistant", "content": [text, part]},
        "messages.1.content.0: is a thought": {
            "role": "assistant",
            "content": [part, text],
            "reasoning_content": "hm",
        },
        "messages.0.content.0.type: is 'thinking'": {"role": "user", "content": [part, text]},
    }
    for said, message in refused.items():
        messages = (USER, message) if message["role"] == "assistant" else (message, ANSWER)
        with pytest.raises(LineError, match=f"^{re.escape(said)}"):
            parse_line(line(*messages))


def test_reasoning_is_what_an_assistant_thinks_before_it_answers() -> None:
    thinking = ANSWER | {"reasoning_content": "two twos"}
    assert parse_line(line(USER, thinking)).messages[1] == thinking
    for none in (None, "", " \n"):
        assert parse_line(line(USER, ANSWER | {"reasoning_content": none})).messages[1] == ANSWER
    with pytest.raises(
        LineError, match=r"messages\.1\.reasoning_content: must be a string, not a number"
    ):
        parse_line(line(USER, ANSWER | {"reasoning_content": 4}))
    with pytest.raises(
        LineError,
        match=r"messages\.0\.reasoning_content: is only for messages of the role assistant",
    ):
        parse_line(line(USER | {"reasoning_content": "hm"}, ANSWER))
    with pytest.raises(
        LineError,
        match=r"messages\.1\.reasoning_content: is given too where the content has a </think>",
    ):
        parse_line(line(USER, thinking | {"content": "<think>hm</think>Four."}))


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
        (line(USER, ANSWER, mood="good"), "mood", "is not a known key"),
        (line(USER, ANSWER, tools={}), "tools", "must be a list"),
        (line(USER, ANSWER, tools=[{"type": "web_search"}]), "tools.0.type", "'function'"),
        (
            line(USER, ANSWER, tools=[{"type": "function", "function": {}}]),
            "tools.0.function.name",
            "is required",
        ),
        (
            line(USER, ANSWER, tools=[TOOL | {"function": {"name": "f", "parameters": 1}}]),
            "tools.0.function.parameters",
            "object",
        ),
        (line(USER, ANSWER, tools=[TOOL], functions=[]), "functions", "keep one"),
        (line(USER, ANSWER, functions=[{"name": 1}]), "functions.0.name", "must be a string"),
        (line(USER, ANSWER, parallel_tool_calls="no"), "parallel_tool_calls", "true or false"),
        ('{"prompt": "a", "completion": "b"}', "prompt", "prompts with completions"),
        ('{"input": "", "output": "b", "instruction": "a"}', "instruction", "Alpaca"),
        ('{"conversations": []}', "conversations", "ShareGPT"),
        ('{"input": {}, "preferred_output": []}', "preferred_output", "preference pairs"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "chosen", "preference pairs"),
        (line("hi"), "messages.0", "not a string"),
        (line({"content": "hi"}), "messages.0.role", "is required"),
        (line({"role": "robot", "content": "hi"}), "messages.0.role", "not 'robot'"),
        (line({"role": ["user"], "content": "hi"}), "messages.0.role", "must be one of"),
        (line({"role": "tool", "content": "hi"}), "messages.0.tool_call_id", "is required"),
        (line(USER | {"train": True}, ANSWER), "messages.0.train", "only for assistant messages"),
        (line(USER, ANSWER | {"train": 1}), "messages.1.train", "must be true or false"),
        (line(USER, ANSWER | {"train": False, "weight": 1}), "messages.1.train", "keep one"),
        (line(USER, ANSWER | {"train_detail": []}), "messages.1.train_detail", "weight 0 or 1"),
        (line(USER, ANSWER, tools="none"), "tools", "must be a list"),
        (line(USER, ANSWER, tools="{}"), "tools", "must be a list"),
        (line({"role": "function", "content": "hi"}), "messages.0.name", "is required"),
        (
            line(USER, {"role": "tool", "content": "hi", "tool_call_id": "c"}),
            "messages.1.tool_call_id",
            "no call before it",
        ),
        (line({"role": "user"}), "messages.0.content", "is required"),
        (line({"role": "user", "content": None}), "messages.0.content", "not null"),
        (
            line({"role": "user", "content": [{"type": "image_url"}]}),
            "messages.0.content.0.image_url",
            "is required",
        ),
        (line(USER, {"role": "assistant", "content": "\ud83d"}), "messages.1.content", "surrogate"),
        (line(USER, ANSWER | {"tool_calls": []}), "messages.1.tool_calls", "at least one"),
        (
            line(USER | {"tool_calls": []}, ANSWER),
            "messages.0.tool_calls",
            "only for messages of the role assistant",
        ),
        (line(USER, calling("{")), "messages.1.tool_calls.0.function.arguments", "is not JSON"),
        (
            line(USER, calling(r'{"a": "\ud83d"}')),
            "messages.1.tool_calls.0.function.arguments",
            "half of a surrogate pair",
        ),
        (
            line(USER, calling("[]")),
            "messages.1.tool_calls.0.function.arguments",
            "must be an object",
        ),
        (line(USER, calling("{}") | {"function_call": {}}), "messages.1.function_call", "keep one"),
        (line(USER | {"name": "Ann Lee"}, ANSWER), "messages.0.name", "not 'Ann Lee'"),
        (
            line(USER | {"name": "<|im_end|>"}, ANSWER),
            "messages.0.name",
            "none of them white space, <, >",
        ),
        (line(USER, ANSWER | {"name": ""}), "messages.1.name", "1 to 64 characters"),
        (line(USER | {"name": "a" * 65}, ANSWER), "messages.0.name", "1 to 64 characters"),
        (line(USER | {"name": 7}, ANSWER), "messages.0.name", "must be a string"),
        (line(USER | {"mood": "good"}, ANSWER), "messages.0.mood", "is not a known key"),
        (line(USER | {"weight": 1}, ANSWER), "messages.0.weight", "only for assistant"),
        (line(USER, ANSWER | {"weight": 2}), "messages.1.weight", "not 2"),
        (line(USER, ANSWER | {"weight": True}), "messages.1.weight", "not true"),
        (line(USER), "messages", "no assistant message"),
        (line(USER, ANSWER | {"weight": 0}), "messages", "weight 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_place(
    text: str, field: str, reason: str
) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(text)

    assert caught.value.field == field
    assert reason in caught.value.reason


def test_a_key_given_twice_behind_many_others_is_found_without_comparing_each_with_all() -> None:
    """One by one, the keys of this line would be compared twenty thousand million times."""
    names = ", ".join(f'"{number}": 0' for number in range(200_000))
    with pytest.raises(LineError, match="has the key 'last' twice in an object"):
        load_object(f'{{{names}, "last": 0, "last": 1}}')
