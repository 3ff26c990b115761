"""The openai client's Responses API, answered by the operator's inference server as chats are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ft_service.jobs.states import State
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.service import Service, put

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver) -> dict[str, Any]:
    return configure | {"inference_url": f"{receiver.url}/v1"}


@pytest.fixture
def tuned(service: Service, client: openai.OpenAI, training_file: str) -> str:
    job: Any = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body={"chat_template": "zephyr"}
    )
    return put(service, job.id, state=State.SUCCEEDED, attempt=1).spec.tuned_name


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_an_answer_is_that_of_the_chat_which_the_server_was_asked_for(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = json.dumps({"object": "chat.completion", "choices": [choice], "usage": USAGE})
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([answer.encode()]),
    )
    said = client.responses.create(
        model=tuned, instructions="Be brief.", input="Hi", store=False, metadata={"a": "b"}
    )
    assert (said.output_text, said.status, said.model) == ("Hello", "completed", tuned)
    assert said.usage is not None
    assert (said.usage.input_tokens, said.usage.output_tokens) == (3, 2)
    assert said.metadata == {"a": "b"}
    arrived = receiver.arrived.get(timeout=60)
    assert arrived.path == "/v1/chat/completions"
    sent = json.loads(arrived.body)
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert "<|assistant|>" in sent["chat_template"], "the template that it was trained with"


def test_a_stream_is_what_the_clients_helper_takes(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    call = {"index": 0, "id": "c1", "type": "function"}
    sent = [
        chunk({"role": "assistant", "content": "Hé"})[:-9],
        chunk({"role": "assistant", "content": "Hé"})[-9:] + chunk({"content": "llo"}),
        chunk({"tool_calls": [{**call, "function": {"name": "f", "arguments": "{"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "tool_calls"),
        b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
        b"data: [DONE]\n\n",
    ]
    receiver.answer = lambda _: (200, {"content-type": "text/event-stream"}, iter(sent))
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
    with client.responses.stream(model=tuned, input="Hi", tools=[tool]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas == ["Hé", "llo"]
    assert final.output_text == "Héllo"
    called: Any = final.output[1]
    assert (called.name, called.arguments, called.call_id) == ("f", "{}", "c1")
    again = client.responses.create(
        model=tuned,
        input=[
            {"role": "user", "content": "Hi"},
            *(item.to_dict() for item in final.output),  # type: ignore[list-item]
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        stream=True,
    )
    assert [event.type for event in again][-1] == "response.completed"
    receiver.arrived.get(timeout=60)
    messages = json.loads(receiver.arrived.get(timeout=60).body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == "c1"


def test_a_refusal_of_the_server_and_one_within_a_stream_are_told(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    refusal = b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}'
    receiver.answer = lambda _: (400, {"content-type": "application/json"}, iter([refusal]))
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.responses.create(model=tuned, input="Hi")
    broken = [chunk({"content": "He"}), b'data: {"error": {"message": "out of memory"}}\n\n']
    receiver.answer = lambda _: (200, {"content-type": "text/event-stream"}, iter(broken))
    events = list(client.responses.create(model=tuned, input="Hi", stream=True))
    last: Any = events[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "out of memory")


def test_what_is_not_kept_cannot_be_asked_for(client: openai.OpenAI, tuned: str) -> None:
    with pytest.raises(openai.NotFoundError, match="answers are not kept here"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=tuned, input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=tuned, input="Hi", metadata="a")  # type: ignore[arg-type]
    assert caught.value.param == "metadata"
