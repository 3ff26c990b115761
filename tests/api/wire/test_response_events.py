"""The openai client's own accumulation of a stream, and the object that is sent whole, agree."""

from __future__ import annotations

from typing import Any

import pytest

from api.wire.response_events import ResponseEvents
from api.wire.response_request import parse_response_request

USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
CALLS = [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}},
    {"index": 0, "function": {"arguments": " 1}"}},
    {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Add "},
    {"reasoning_content": "them."},
    {"content": "It is"},
    {"content": " three."},
    *({"tool_calls": [call]} for call in CALLS),
]


def events_of(deltas: list[dict[str, Any]], finish: str = "stop") -> list[dict[str, Any]]:
    made = ResponseEvents(parse_response_request({"model": "m", "input": "Hi"}), {"k": "v"})
    told = made.begin()
    for delta in deltas:
        told += made.take({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    told += made.take({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    told += made.take({"choices": [], "usage": USAGE})
    return [*told, *made.end()]


def names(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


def test_items_begin_and_end_in_turn() -> None:
    told = events_of(DELTAS)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    thought = ["reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"]
    said = ["output_text.delta", "output_text.delta", "output_text.done"]
    in_part = lambda inner: ["content_part.added", *inner, "content_part.done"]  # noqa: E731
    in_item = lambda inner: ["output_item.added", *inner, "output_item.done"]  # noqa: E731
    arguments = "function_call_arguments"
    assert names(told) == [
        *("created", "in_progress"),
        *in_item(in_part(thought)),
        *in_item(in_part(said)),
        *in_item([f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done"]),
        *in_item([f"{arguments}.delta", f"{arguments}.done"]),
        "completed",
    ]
    places = [event["output_index"] for event in told if "output_index" in event]
    assert places == sorted(places)
    whole = told[-1]["response"]
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message"),
        *("function_call", "function_call"),
    ]
    assert whole["output"][0]["content"][0]["text"] == "Add them."
    assert whole["output"][1]["content"][0]["text"] == "It is three."
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in whole["output"][2:]]
    assert calls == [("c1", "f", '{"a": 1}'), ("c2", "g", "{}")]
    assert whole["usage"]["input_tokens"] == 5
    assert whole["usage"]["output_tokens"] == 4
    assert (whole["store"], whole["metadata"], whole["error"]) == (False, {"k": "v"}, None)
    added = next(event for event in told if event["type"] == "response.output_item.added")
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])


def test_an_answer_sent_whole_is_that_of_the_stream() -> None:
    message = {
        "role": "assistant",
        "reasoning_content": "Add them.",
        "content": "It is three.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    made = ResponseEvents(parse_response_request({"model": "m", "input": "Hi"}), {"k": "v"})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    whole = made.whole({"choices": [choice], "usage": USAGE})
    streamed = events_of(DELTAS)[-1]["response"]
    for item in (*whole["output"], *streamed["output"]):
        del item["id"]
    assert whole["output"] == streamed["output"]
    assert whole["usage"] == streamed["usage"]
    assert whole["status"] == "completed"


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_an_answer_that_was_cut_is_incomplete(finish: str, reason: str) -> None:
    told = events_of([{"content": "It"}], finish)
    assert names(told)[-1] == "incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": reason}
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    told = events_of([])
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert names(told).count("output_item.done") == 1


def test_an_answer_that_broke_off_has_failed() -> None:
    made = ResponseEvents(parse_response_request({"model": "m", "input": "Hi"}))
    made.begin()
    made.take({"choices": [{"index": 0, "delta": {"content": "It"}}]})
    told = made.fail("It went away.")
    assert names(told)[-2:] == ["output_item.done", "failed"]
    failed = told[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "It went away."}
    assert failed["output"][0]["status"] == "incomplete"


def test_log_probabilities_stand_beside_their_text() -> None:
    made = ResponseEvents(parse_response_request({"model": "m", "input": "Hi"}))
    made.begin()
    said = [{"token": "It", "logprob": -0.5, "bytes": [73, 116], "top_logprobs": []}]
    choice = {"index": 0, "delta": {"content": "It"}, "logprobs": {"content": said}}
    delta = made.take({"choices": [choice]})[-1]
    assert delta["logprobs"] == said
    assert made.end()[-1]["response"]["output"][0]["content"][0]["logprobs"] == said
