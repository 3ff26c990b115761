"""The openai client's Responses API, answered by the operator's inference server as chats are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.rest.receiver import Answer, Receiver, receiving
from tests.support.rest.service import Service, put

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver) -> dict[str, Any]:
    return configure | {"inference_url": f"{receiver.url}/v1", "stored_chats_days": 30}


@pytest.fixture
def tuned(service: Service, client: openai.OpenAI, training_file: str) -> str:
    job: Any = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body={"chat_template": "zephyr"}
    )
    return put(service, job.id, state=State.SUCCEEDED, attempt=1).spec.tuned_name


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def completion(text: str, *calls: dict[str, Any]) -> Answer:
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    logprobs = {"content": [{"token": text, "logprob": -1.0, "bytes": None, "top_logprobs": []}]}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
    answer = json.dumps({"object": "chat.completion", "choices": [choice], "usage": USAGE})
    return 200, {"content-type": "application/json"}, iter([answer.encode()])


def events(*parts: bytes) -> Answer:
    return 200, {"content-type": "text/event-stream"}, iter(parts)


def messages_of(receiver: Receiver) -> list[dict[str, Any]]:
    return json.loads(receiver.arrived.get(timeout=60).body)["messages"]


def test_an_answer_is_that_of_the_chat_which_the_server_was_asked_for(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    receiver.answer = lambda _: completion("Hello")
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
    receiver.answer = lambda _: events(*sent)
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
    messages_of(receiver)
    messages = messages_of(receiver)
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
    receiver.answer = lambda _: events(*broken)
    last: Any = list(client.responses.create(model=tuned, input="Hi", stream=True))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "out of memory")


def test_what_is_kept_is_found_gone_on_with_and_deleted(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    receiver.answer = lambda _: completion("Let me see.", call)
    first = client.responses.create(
        model=tuned, instructions="Be brief.", input="Hi", store=True, metadata={"a": "b"}
    )
    found = client.responses.retrieve(first.id)
    assert found.to_dict() == {**first.to_dict(), "expires_at": found.model_extra["expires_at"]}  # type: ignore[index]
    assert found.output_text == "Let me see."
    assert not client.chat.completions.list().data
    for act in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            act(first.id)

    receiver.answer = lambda _: completion("Three.")
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    second = client.responses.create(
        model=tuned, input=[result], previous_response_id=first.id, store=True
    )
    assert (second.previous_response_id, second.to_dict()["store"]) == (first.id, True)
    client.responses.delete(first.id)
    third = client.responses.create(model=tuned, input="Sure?", previous_response_id=second.id)
    assert third.to_dict()["store"] is False
    assert [message["role"] for message in messages_of(receiver)] == ["system", "user"]
    said = [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "Let me see."}]
    turn = {"role": "assistant", "content": said[1], "tool_calls": [call]}
    went = [{"role": "user", "content": said[0]}, turn]
    went.append({"role": "tool", "tool_call_id": "c1", "content": "3"})
    assert messages_of(receiver) == went, "the first one's instructions are its own"
    told = {"role": "assistant", "content": [{"type": "text", "text": "Three."}]}
    assert messages_of(receiver) == [*went, told, {"role": "user", "content": "Sure?"}]

    items = list(client.responses.input_items.list(second.id, limit=1))
    types = ["function_call_output", "function_call", "message", "message"]
    assert [item.type for item in items] == types, "the newest first"
    oldest: Any = client.responses.input_items.list(second.id, order="asc", limit=1).data[0]
    assert (oldest.id, oldest.role, oldest.content[0].text) == (items[-1].id, "user", "Hi")
    assert len({item.id for item in items}) == 4
    spoken: Any = (found.output[0], items[2])
    assert [len(item.content[0].logprobs) for item in spoken] == [1, 0], "only where it was asked"

    for gone in (first.id, third.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=tuned, input="Hi", previous_response_id=gone)
        assert refused.value.param == "previous_response_id"
        assert refused.value.code == "previous_response_not_found"
    assert client.responses.retrieve(second.id).output_text == "Three."


def test_a_stream_is_kept_before_it_says_that_it_is_completed(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    whole = [chunk({"content": "He"}), chunk({"content": "llo"}, "stop"), b"data: [DONE]\n\n"]

    def last_of_stream() -> Any:
        stream = client.responses.create(model=tuned, input="Hi", store=True, stream=True)
        return [event for event in stream if event.type != "response.output_text.delta"][-1]

    receiver.answer = lambda _: events(*whole)
    last = last_of_stream()
    assert last.type == "response.completed"
    found = client.responses.retrieve(last.response.id)
    assert found.output_text == "Hello"

    receiver.answer = lambda _: events(whole[0], whole[2])
    broken = last_of_stream()
    service.use(service.settings.model_copy(update={"stored_chats_bytes": 32_000}))
    receiver.answer = lambda _: events(chunk({"content": "x" * 2000}, "stop"), whole[2])
    large = last_of_stream()
    for last in (broken, large):
        assert last.type == "response.failed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)
    assert large.response.error.message.startswith("store: the response has")


def test_a_conversation_goes_on_within_its_project_and_lifetime_and_in_bounds(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    receiver.answer = lambda _: completion("Hello")
    half = "x" * 600_000
    first = client.responses.create(model=tuned, input=half, store=True)
    service.store.projects.ensure_project("rival", "local")
    key = service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]
    rival = service.client(key)
    for act in (
        rival.responses.retrieve,
        rival.responses.delete,
        rival.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            act(first.id)
    said = []
    for name in (first.id, "resp_1"):
        with pytest.raises(openai.BadRequestError) as refused:
            rival.responses.create(model="tiny", input="Hi", previous_response_id=name)
        said.append(refused.value.message.replace(name, ""))
    assert said[0] == said[1], "it tells nobody else what there is"

    for wrong, code in (
        ({"input": half}, "request_too_large"),
        ({"input": "Hi", "previous_response_id": 7}, "invalid_value"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(
                model=tuned, extra_body={"previous_response_id": first.id, **wrong}
            )
        assert (refused.value.param, refused.value.code) == ("previous_response_id", code)

    service.sql("UPDATE stored_chats SET expires_at = created_at")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    remove_expired(service.settings, service.store)
    service.sql("UPDATE stored_chats SET expires_at = expires_at + 1000")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_nothing_is_kept_unless_operator_and_caller_say_so(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    receiver.answer = lambda _: completion("Hello")
    for asked in (False, None, openai.omit):
        said = client.responses.create(model=tuned, input="Hi", store=asked)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(said.id)
    for wrong in ("a", {"k": "\ud800"}):
        sent = json.dumps({"model": tuned, "input": "Hi", "metadata": wrong})
        refused_metadata = service.http("POST", "/v1/responses", content=sent)
        assert (refused_metadata.status_code, refused_metadata.json()["error"]["param"]) == (
            400,
            "metadata",
        )

    def refused() -> tuple[str | None, str | None]:
        before = receiver.arrived.qsize()
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=tuned, input="x" * 1000, store=True)
        assert receiver.arrived.qsize() == before, "the model was not asked"
        return caught.value.param, caught.value.code

    service.use(service.settings.model_copy(update={"stored_chats_bytes": 16_000}))
    assert refused() == ("store", "too_large")
    service.use(service.settings.model_copy(update={"stored_chats_days": None}))
    assert refused() == ("store", "unsupported_parameter")
