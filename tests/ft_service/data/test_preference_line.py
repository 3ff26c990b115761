"""Lines of preference files: OpenAI's words and TRL's, and what is at fault in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ft_service.data.chat_line import load_object
from ft_service.data.line_errors import LineError
from ft_service.data.preference_line import parse_pair
from ft_service.data.sample_kinds import Pair

ASK = {"role": "user", "content": "2 + 2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
LOST = {"role": "tool", "tool_call_id": "x", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def pair_of(text: str) -> Pair:
    return parse_pair(load_object(text))


def openai(messages: Any, preferred: Any, rejected: Any, **more: Any) -> str:
    return json.dumps(
        {
            "input": {"messages": messages, **more},
            "preferred_output": preferred,
            "non_preferred_output": rejected,
        }
    )


def trl(**fields: Any) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        openai([ASK], [GOOD], [BAD]),
        json.dumps(
            {
                "input": {"messages": [ASK]},
                "preferred_completion": [GOOD],
                "non_preferred_completion": [BAD],
            }
        ),
        trl(prompt="2 + 2?", chosen="4", rejected="5"),
        trl(prompt=[ASK], chosen=[GOOD], rejected=[BAD]),
        trl(chosen=[ASK, GOOD], rejected=[ASK, BAD]),
    ],
)
def test_every_way_to_write_a_pair_means_the_same(text: str) -> None:
    pair = pair_of(text)
    assert [message["content"] for message in pair.preferred.messages] == ["2 + 2?", "4"]
    assert [message["content"] for message in pair.rejected.messages] == ["2 + 2?", "5"]
    assert pair.preferred.weights == pair.rejected.weights == (0, 1)


def test_only_the_answers_are_learned() -> None:
    pair = pair_of(openai([ASK, BAD, {**ASK, "content": "sure?"}], [GOOD], [BAD], tools=[TOOL]))
    assert pair.preferred.weights == (0, 0, 0, 1)
    assert pair.preferred.tools == (TOOL,)
    long = pair_of(trl(chosen=[ASK, GOOD, ASK, GOOD], rejected=[ASK, GOOD, ASK, BAD]))
    assert long.rejected.weights == (0, 0, 0, 1), (
        "what both begin with is the prompt, the assistant's words in it too"
    )


def test_participants_may_have_names() -> None:
    ask = ASK | {"name": "Ann"}
    good = GOOD | {"name": "Bot"}
    assert pair_of(openai([ask], [good], [BAD])).preferred.messages == (ask, good)
    assert pair_of(trl(chosen=[ask, GOOD], rejected=[ask, BAD])).rejected.messages == (ask, BAD)


def test_an_answer_may_call_tools_and_go_on() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    pair = pair_of(
        openai(
            [ASK],
            [calling, {"role": "tool", "tool_call_id": "c", "content": "4"}, GOOD],
            [BAD],
            tools=[TOOL],
        )
    )
    assert pair.preferred.weights == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("[]", "", "must be a JSON object"),
        ("{}", "input", "is required"),
        (json.dumps({"messages": [ASK, GOOD]}), "messages", "of supervised training"),
        (trl(prompt="a", completion="b"), "completion", "of supervised training"),
        (
            trl(input="a", preferred_output=[GOOD], non_preferred_output=[BAD]),
            "input",
            "not a string",
        ),
        (openai([], [GOOD], [BAD]), "input.messages", "not an empty list"),
        (openai([ASK, GOOD], [GOOD], [BAD]), "input.messages", "not with the assistant's own"),
        (openai([ASK], [], [BAD]), "preferred_output", "not an empty list"),
        (openai([ASK], [GOOD], [ASK]), "non_preferred_output.0.role", "must be assistant"),
        (
            openai([ASK], [GOOD], [BAD | {"weight": 0}]),
            "non_preferred_output",
            "no assistant message to learn",
        ),
        (openai([ASK], [GOOD], [GOOD]), "", "are the same"),
        (openai([ASK], [GOOD], [BAD], tools={}), "input.tools", "must be a list"),
        (
            openai([ASK], [GOOD], [{"role": "assistant", "content": 5}]),
            "non_preferred_output.0.content",
            "not a number",
        ),
        (
            openai([ASK], [LOST, GOOD], [BAD]),
            "preferred_output.0.tool_call_id",
            "is the id of no call",
        ),
        (
            openai([ASK, LOST], [GOOD], [BAD]),
            "input.messages.1.tool_call_id",
            "is the id of no call",
        ),
        (
            trl(chosen=[ASK, GOOD], rejected=[ASK, LOST, BAD]),
            "rejected.1.tool_call_id",
            "is the id of no call",
        ),
        (trl(prompt="a", chosen="b"), "rejected", "is required"),
        (trl(chosen="a", rejected="b"), "prompt", "is required where"),
        (trl(chosen=[ASK, GOOD], rejected=[BAD]), "prompt", "do not begin with the same"),
        (trl(chosen=[ASK], rejected=[ASK, BAD]), "chosen", "holds no answer"),
        (trl(prompt="a", chosen="b", rejected="c", score=1), "score", "is not a known key"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(text: str, field: str, reason: str) -> None:
    with pytest.raises(LineError) as caught:
        pair_of(text)
    assert (caught.value.field, reason in caught.value.reason) == (field, True), caught.value
