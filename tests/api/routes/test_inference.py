"""Chat completions go on to the operator's inference server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.attempts import HANG_SECONDS
from tests.support.rest.receiver import Received, Receiver, receiving
from tests.support.rest.service import Service, put, run_dir

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver) -> dict[str, Any]:
    return configure | {"inference_url": f"{receiver.url}/v1/", "inference_api_key": "inside-key"}


@pytest.fixture
def tuned(service: Service, client: openai.OpenAI, training_file: str) -> str:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    return put(service, job_id, state=State.SUCCEEDED, attempt=1).spec.tuned_name


def completion(content: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
    }
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def test_an_answer_comes_back_and_the_callers_key_does_not_leave(
    service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("Hello")).encode()]),
    )

    answer = client.chat.completions.create(model=tuned, messages=MESSAGES, temperature=0.5)

    assert answer.choices[0].message.content == "Hello"
    arrived = receiver.arrived.get(timeout=60)
    assert arrived.path == "/v1/chat/completions"
    assert json.loads(arrived.body) == {"model": tuned, "messages": MESSAGES, "temperature": 0.5}
    assert arrived.headers["authorization"] == "Bearer inside-key"
    assert service.key not in str(arrived)


def test_half_a_surrogate_pair_goes_on_as_the_escape_that_it_came_as(
    service: Service, receiver: Receiver, tuned: str
) -> None:
    told = json.dumps(completion("ok")).encode()
    receiver.answer = lambda _: (200, {"content-type": "application/json"}, iter([told]))
    body = json.dumps({"model": tuned, "messages": [{"role": "user", "content": "\ud800"}]})
    answered = service.http("POST", "/v1/chat/completions", content=body)
    assert answered.status_code == 200
    arrived = json.loads(receiver.arrived.get(timeout=60).body)
    assert arrived["messages"][0]["content"] == "\ud800"


def test_images_go_on_unchanged_if_they_lead_the_server_nowhere_private(
    client: openai.OpenAI, receiver: Receiver, tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("A gauge.")).encode()]),
    )
    addresses = {"public.example": "93.184.216.34", "inside.example": "10.0.0.7"}
    resolve = socket.getaddrinfo

    def look_up(host: Any, port: Any, *given: Any, **more: Any) -> Any:
        return resolve(addresses.get(str(host), host), port, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    def shown(*urls: str) -> list[Any]:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
        return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]

    large = "data:image/png;base64," + "iVBO" * 400_000  # more than a body has without images
    messages = shown(large, "https://public.example/a.png")
    answer = client.chat.completions.create(model=tuned, messages=messages)
    assert answer.choices[0].message.content == "A gauge."
    sent = json.loads(receiver.arrived.get(timeout=60).body)
    assert sent == {"model": tuned, "messages": messages}

    refused = ["https://inside.example/a.png", "https://10.0.0.7/a", "http://public.example/a"]
    for url in (*refused, "file:///etc/passwd"):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=tuned, messages=shown(large[:30], url))
        assert (error.value.code, error.value.param) == ("private_address", "messages")
        assert "messages.0.content.2.image_url" in error.value.message
    assert receiver.arrived.empty()


def test_who_serves_models_answers_for_a_checkpoint_that_was_pruned_here(
    service: Service, client: openai.OpenAI, receiver: Receiver, training_file: str
) -> None:
    """It may have loaded it before."""
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    job = put(service, job_id, checkpoints=(5,), state=State.SUCCEEDED, attempt=1)
    run_dir(service, job_id).path("checkpoints/step-5-a1/COMPLETE").unlink()
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("Hello")).encode()]),
    )
    name = f"{job.spec.tuned_name}:ckpt-step-5"
    assert (
        client.chat.completions.create(model=name, messages=MESSAGES).choices[0].message.content
        == "Hello"
    )


def test_the_chat_template_of_a_job_goes_on_with_its_conversations(
    service: Service, client: openai.OpenAI, receiver: Receiver, training_file: str
) -> None:
    """A server that is not told takes the base's, which the model was not trained with."""
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("Hello")).encode()]),
    )
    body: Any = {"chat_template": "zephyr", "chat_template_kwargs": {"enable_thinking": False}}
    job: Any = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body=body
    )
    assert job.chat_template_kwargs == {"enable_thinking": False}
    spec = put(service, job.id, state=State.SUCCEEDED, attempt=1).spec
    assert spec.chat_template.startswith(
        "{%- set enable_thinking = enable_thinking if enable_thinking is defined else false %}"
    )
    for given in ({}, {"chat_template": "{{ mine }}"}):
        client.chat.completions.create(model=spec.tuned_name, messages=MESSAGES, extra_body=given)
        sent = json.loads(receiver.arrived.get(timeout=60).body)
        expected = given.get("chat_template", spec.chat_template)
        assert sent == {"model": spec.tuned_name, "messages": MESSAGES, "chat_template": expected}
    assert "<|assistant|>" in spec.chat_template


@pytest.fixture
def adapters(tmp_path: Path, configure: dict[str, Any]) -> Path:
    """FT_ADAPTERS. Before `service`, which reads `configure`."""
    configure["adapters"] = tmp_path / "served"
    return tmp_path / "served"


def test_the_tokens_at_which_answers_end_go_on_if_the_base_does_not_name_them(
    adapters: Path, service: Service, client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    """An answer would go on behind its end, up to the server's limit."""
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("Hello")).encode()]),
    )
    (adapters / tuned).mkdir(parents=True)
    (adapters / tuned / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    for given, expected in (({}, [7, 9]), ({"stop_token_ids": [3]}, [3])):
        client.chat.completions.create(model=tuned, messages=MESSAGES, extra_body=given)
        assert json.loads(receiver.arrived.get(timeout=60).body)["stop_token_ids"] == expected


def test_a_text_to_be_continued_goes_on_too(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    choice = {"index": 0, "text": "Hi there", "finish_reason": "stop", "logprobs": None}
    body = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(body).encode()]),
    )
    assert (
        client.completions.create(model=tuned, prompt=[5, 6], echo=True, logprobs=1).choices[0].text
        == "Hi there"
    )
    arrived = receiver.arrived.get(timeout=60)
    assert arrived.path == "/v1/completions"
    assert json.loads(arrived.body) == {
        "model": tuned,
        "prompt": [5, 6],
        "echo": True,
        "logprobs": 1,
    }


def test_a_stream_comes_back_while_it_is_made(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    go_on = threading.Event()

    def chunk(content: str) -> bytes:
        delta = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return f"data: {json.dumps({**delta, 'choices': [{'index': 0, 'delta': {'content': content}}]})}\n\n".encode()

    def chunks() -> Iterator[bytes]:
        yield chunk("Hel")
        assert go_on.wait(HANG_SECONDS)
        yield chunk("lo")
        yield b"data: [DONE]\n\n"

    receiver.answer = lambda _: (200, {"content-type": "text/event-stream"}, chunks())
    stream = client.chat.completions.create(model=tuned, messages=MESSAGES, stream=True)

    assert stream.response.headers["x-accel-buffering"] == "no", (
        "nor does a proxy such as nginx keep it back"
    )
    assert next(stream).choices[0].delta.content == "Hel"
    go_on.set()
    assert [part.choices[0].delta.content for part in stream] == ["lo"]


def test_a_server_that_goes_away_in_an_answer_is_an_error_of_the_api(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    def cut(kind: str, part: bytes) -> None:
        receiver.answer = lambda _: (
            200,
            {"content-type": kind, "content-length": "9999"},
            iter([part]),
        )

    cut("application/json", b'{"id": ')
    with pytest.raises(openai.InternalServerError, match="does not answer") as caught:
        client.chat.completions.create(model=tuned, messages=MESSAGES)
    assert caught.value.status_code == 503
    event = {"id": "c", "choices": [{"index": 0, "delta": {"content": "Hel"}}]}
    cut("text/event-stream; charset=utf-8", f"data: {json.dumps(event)}\n\n".encode())
    stream = client.chat.completions.create(model=tuned, messages=MESSAGES, stream=True)
    assert next(stream).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="went away before its answer was whole"):
        next(stream)


def test_the_processor_is_asked_for_of_the_preview_alone(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match="an inference server answers here") as caught:
        client.chat.completions.create(
            model=tuned, messages=messages, extra_body={"processor": True}
        )
    assert caught.value.param == "processor"


def test_a_refusal_comes_back_as_it_is(
    client: openai.OpenAI, receiver: Receiver, tuned: str
) -> None:
    def refuse(_: Received) -> Any:
        body = {"error": {"message": "busy", "type": "rate", "param": None, "code": "slow_down"}}
        return (
            429,
            {"content-type": "application/json", "retry-after": "7"},
            iter([json.dumps(body).encode()]),
        )

    receiver.answer = refuse
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=tuned, messages=MESSAGES)
    assert caught.value.code == "slow_down"
    assert caught.value.response.headers["retry-after"] == "7"


def test_only_models_that_the_caller_may_use_are_asked_for(
    service: Service, receiver: Receiver, tuned: str
) -> None:
    service.store.projects.ensure_project("other", "rival")
    other = service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    )
    paths = (
        f"./{tuned}",
        f"//{tuned}",
        f"/adapters/{tuned}",
        f"x/../{tuned}/.",
        "ft-sampler-1",
        "./ft-sampler-1",
    )
    for name in (tuned, "ft:tiny:local::none", *paths):
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.create(model=name, messages=MESSAGES)
    assert receiver.arrived.empty()


def test_other_names_of_the_server_are_passed_on(client: openai.OpenAI, receiver: Receiver) -> None:
    receiver.answer = lambda _: (
        200,
        {"content-type": "application/json"},
        iter([json.dumps(completion("Hello")).encode()]),
    )
    for name in ("meta-llama/Llama-3.1-8B", "/data/models/tiny"):
        assert (
            client.chat.completions.create(model=name, messages=MESSAGES).choices[0].message.content
            == "Hello"
        )


class TestWaiting:
    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener

    @pytest.fixture
    def configure(self, configure: dict[str, Any], listener: socket.socket) -> dict[str, Any]:
        return configure | {"inference_url": f"http://127.0.0.1:{listener.getsockname()[1]}/v1"}

    def test_a_server_no_longer_computes_what_nobody_waits_for(
        self, service: Service, listener: socket.socket, tuned: str
    ) -> None:
        body = json.dumps({"model": tuned, "messages": MESSAGES})
        headers = (
            f"host: x\r\nauthorization: Bearer {service.key}\r\ncontent-length: {len(body)}\r\n"
        )
        url = httpx2.URL(service.url)
        listener.settimeout(HANG_SECONDS)
        with socket.create_connection((url.host, url.port)) as asking:
            asking.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n{body}".encode())
            # Who asks goes once the server has been asked, and not before.
            connection, _ = listener.accept()
        with connection:
            connection.settimeout(HANG_SECONDS)
            while connection.recv(65536):
                pass  # until the service has closed it


class TestAway:
    @pytest.fixture
    def configure(self, configure: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with socket.socket() as bound:  # it listens to nobody, and nobody else can meanwhile
            bound.bind(("127.0.0.1", 0))
            yield configure | {"inference_url": f"http://127.0.0.1:{bound.getsockname()[1]}/v1"}

    def test_a_server_that_is_away_is_a_503(self, client: openai.OpenAI, tuned: str) -> None:
        with pytest.raises(openai.InternalServerError, match="FT_INFERENCE_URL") as caught:
            client.chat.completions.create(model=tuned, messages=MESSAGES)
        assert caught.value.status_code == 503
