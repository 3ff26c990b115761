"""Chats that are kept, by the real openai client: `store: true` and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.client import client as client_module
from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.rest.receiver import Answer, Receiver, receiving
from tests.support.rest.service import Service, put

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        receiver.answer = lambda _: completion("Hello")
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver) -> dict[str, Any]:
    url = f"{receiver.url}/v1"
    return configure | {"inference_url": url, "stored_chats_days": 30}


@pytest.fixture
def tuned(service: Service, client: openai.OpenAI, training_file: str) -> str:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    return put(service, job_id, state=State.SUCCEEDED, attempt=1).spec.tuned_name


@pytest.fixture
def rival(service: Service) -> openai.OpenAI:
    service.store.projects.ensure_project("rival", "local")
    key = service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]
    return service.client(key)


def completion(*contents: str) -> Answer:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "finish_reason": "stop",
        }
        for index, content in enumerate(contents)
    ]
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
    return 200, JSON, iter([json.dumps({**answer, "choices": choices}).encode()])


def streamed(
    *deltas: tuple[dict[str, Any], str | None], end: bytes = b"data: [DONE]\n\n"
) -> Answer:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        for delta, finish in deltas
    ]
    return 200, EVENTS, iter([*(f"data: {json.dumps(one)}\n\n".encode() for one in chunks), end])


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    given: dict[str, Any] = {"messages": MESSAGES, "store": True, **options}
    return client.chat.completions.create(model=model, **given)


def test_a_chat_is_kept_found_changed_and_deleted_as_the_client_has_it(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    kept = client.chat.completions
    said = ask(client, tuned, metadata={"k": "v"}, tools=TOOLS)
    assert said.choices[0].message.content == "Hello"
    sent = json.loads(receiver.arrived.get(timeout=60).body)
    assert sent == {"model": tuned, "messages": MESSAGES, "tools": TOOLS}
    other = ask(client, tuned)
    assert other.id != said.id, "the server's ids may be the same"

    found = kept.retrieve(said.id)
    assert (found.id, found.model, found.metadata) == (said.id, tuned, {"k": "v"})
    assert found.choices == said.choices
    assert found.usage == said.usage
    assert found.model_extra is not None
    assert found.model_extra["tools"] == TOOLS
    assert 29 * 86_400 < found.model_extra["expires_at"] - found.created <= 30 * 86_400
    assert [chat.id for chat in kept.list()] == [said.id, other.id]
    assert [chat.id for chat in kept.list(limit=1, order="desc")] == [other.id, said.id], "pages"
    assert [chat.id for chat in kept.list(metadata={"k": "v"}, model=tuned)] == [said.id]
    assert not kept.list(metadata={"k": "w"}).data
    messages = list(kept.messages.list(said.id, limit=1))
    assert [(message.role, message.content) for message in messages] == [
        (message["role"], message["content"]) for message in MESSAGES
    ]
    assert kept.update(said.id, metadata={"n": "1"}).metadata == {"n": "1"}
    assert [chat.id for chat in kept.list(metadata={"n": "1"})] == [said.id]
    assert kept.delete(said.id).deleted
    with pytest.raises(openai.NotFoundError):
        kept.retrieve(said.id)
    assert [chat.id for chat in kept.list()] == [other.id]


def test_a_stream_is_kept_once_it_is_whole(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    call = {"index": 0, "id": "c1", "type": "function"}
    deltas = (
        ({"role": "assistant", "content": "Hé"}, None),
        ({"content": "llo", "tool_calls": [{**call, "function": {"name": "f"}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}, "tool_calls"),
    )
    receiver.answer = lambda _: streamed(*deltas)
    chunks = list(ask(client, tuned, stream=True))
    (chat,) = client.chat.completions.list().data
    assert {chunk.id for chunk in chunks} == {chat.id}
    assert len(chunks) == 4
    message = chat.choices[0].message
    assert message.content == "Héllo"
    assert message.tool_calls is not None
    called: Any = message.tool_calls[0]
    assert (called.id, called.function.name, called.function.arguments) == ("c1", "f", '{"a": 1}')
    assert chat.choices[0].finish_reason == "tool_calls"

    receiver.answer = lambda _: streamed(*deltas[:2])
    list(ask(client, tuned, stream=True))
    assert len(client.chat.completions.list().data) == 1, "half an answer is not kept"


def test_nothing_is_kept_unless_operator_and_caller_say_so(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    for asked in ({"store": False}, {"store": None}, {"store": openai.omit}):
        ask(client, tuned, metadata={"k": "v"}, **asked)
    client.responses.create(model=tuned, input="Hi", store=False)
    receiver.answer = lambda _: (500, JSON, iter([b"{}"]))
    with pytest.raises(openai.InternalServerError):
        ask(client, tuned)
    assert not client.chat.completions.list().data

    service.use(service.settings.model_copy(update={"stored_chats_days": None}))
    before = receiver.arrived.qsize()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tuned)
    assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
    assert "FT_STORED_CHATS_DAYS" in refused.value.message
    assert receiver.arrived.qsize() == before, "the model was not asked"


def test_a_chat_that_is_too_large_is_refused_before_it_is_answered(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    service.use(service.settings.model_copy(update={"stored_chats_bytes": 16_000}))
    large = [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tuned, messages=large)
    assert (refused.value.param, refused.value.code) == ("store", "too_large")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tuned, metadata={"k": "v" * 513})
    assert refused.value.param == "metadata.k"
    assert receiver.arrived.empty()


def test_what_is_said_of_an_answer_is_kept_with_it(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    receiver.answer = lambda _: completion("One", "Two")
    chat = ask(client, tuned)

    def say(**said: Any) -> Any:
        return service.http("POST", f"/v1/chat/completions/{chat.id}/feedback", json=said)

    said = say(label=False, better="Better.", choice=1).json()
    better = {"role": "assistant", "content": "Better."}
    assert said["feedback"] == {"label": False, "better": better, "choice": 1}
    assert say(better=None).json()["feedback"] == {"label": False, "better": None, "choice": 1}
    assert [one.id for one in client.chat.completions.list(extra_query={"label": False})] == [
        chat.id
    ]
    assert not client.chat.completions.list(extra_query={"label": True}).data
    for wrong, param in (
        ({}, "label"),
        ({"label": "up"}, "label"),
        ({"choice": 2, "label": True}, "choice"),
        ({"better": {"role": "user", "content": "?"}}, "better"),
        ({"better": {"role": "assistant"}}, "better"),
    ):
        refused = say(**wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), wrong


def test_a_project_sees_its_own_chats_alone(
    service: Service, client: openai.OpenAI, rival: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    chat = ask(client, tuned, metadata={"k": "v"})
    assert not rival.chat.completions.list().data
    assert not rival.chat.completions.list(metadata={"k": "v"}).data
    with pytest.raises(openai.BadRequestError):
        rival.chat.completions.list(after=chat.id)
    kept = rival.chat.completions
    for act in (
        lambda: kept.retrieve(chat.id),
        lambda: kept.messages.list(chat.id),
        lambda: kept.update(chat.id, metadata={}),
        lambda: kept.delete(chat.id),
        lambda: rival.post(
            f"/chat/completions/{chat.id}/feedback", body={"label": True}, cast_to=object
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
    found = client.chat.completions.retrieve(chat.id)
    assert found.metadata == {"k": "v"}
    assert found.model_extra is not None
    assert found.model_extra["feedback"] is None


def test_lifetime_ends_a_chat_and_housekeeping_removes_it(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    chat = ask(client, tuned)
    service.sql("UPDATE stored_chats SET expires_at = created_at")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(chat.id)
    remove_expired(service.settings, service.store)
    service.sql("UPDATE stored_chats SET expires_at = expires_at + 1000")
    assert not client.chat.completions.list().data


def test_chats_become_data_that_the_check_accepts(
    service: Service,
    client: openai.OpenAI,
    rival: openai.OpenAI,
    receiver: Receiver,
    tuned: str,
    ft: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 2)
    says = [{"label": True}, {"label": False, "better": "Better."}, {"label": False}, None]
    ids: list[str] = []
    for number, said in enumerate(says):
        receiver.answer = lambda _, number=number: completion(f"Answer {number}")
        ids.append(ask(client, tuned, metadata={"app": "a" if number < 3 else "b"}).id)
        if said is not None:
            path = f"/v1/chat/completions/{ids[-1]}/feedback"
            assert service.http("POST", path, json=said).is_success

    def made(shape: str, *options: str) -> tuple[list[Any], list[str]]:
        out = tmp_path / f"{shape}{len(list(tmp_path.iterdir()))}.jsonl"
        ft("data", "from-chats", "--as", shape, "-o", str(out), *options)
        ft("data", "check", str(out))
        origins = out.with_name(f"{out.stem}.origin.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        origin = [json.loads(line) for line in origins]
        assert [own["line"] for own in origin] == list(range(1, len(lines) + 1))
        return lines, [own["id"] for own in origin]

    lines, origin = made("sft")
    last = [line["messages"][-1]["content"] for line in lines]
    assert last == ["Answer 0", "Better.", "Answer 3"]
    assert origin == [ids[0], ids[1], ids[3]]
    lines, origin = made("kto")
    assert [line["label"] for line in lines] == [True, False, True, False]
    assert origin == [ids[0], ids[1], ids[1], ids[2]]
    lines, origin = made("dpo")
    assert origin == [ids[1]]
    assert made("sft", "--label", "good")[1] == [ids[0]]
    assert made("sft", "--metadata", "app=b", "--model", tuned, "--since", "1d")[1] == [ids[3]]

    before = sorted(tmp_path.iterdir())
    none = str(tmp_path / "none.jsonl")
    said = ft("data", "from-chats", "-o", none, "--since", "2990-01-01", code=64)
    assert "0 chats" in said
    for wrong in (("--since", "yesterday"), ("--metadata", "app")):
        assert wrong[0] in ft("data", "from-chats", "-o", none, *wrong, code=64)
    monkeypatch.setenv("FT_API_KEY", rival.api_key)
    ft("data", "from-chats", "-o", none, code=64)
    assert sorted(tmp_path.iterdir()) == before
