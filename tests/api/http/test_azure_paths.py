"""What Azure's client sends. tests/api/test_walk.py calls each of its methods; here are chats, what
is refused, and that no address leads round the key.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from ft_service.jobs.states import State
from ft_service.store.records import NewKey, TenantLimits
from tests.support.attempts import wait_for
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service, put

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
DATED = "2024-10-21"
SLASHES = "meta-llama/Llama-3.2-1B"
JSON = {"content-type": "application/json"}
HELLO = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
        }
    ],
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        receiver.answer = lambda _: (200, JSON, iter([json.dumps(HELLO).encode()]))
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver) -> dict[str, Any]:
    return configure | {"inference_url": f"{receiver.url}/v1"}


def azures(service: Service, **changes: Any) -> openai.AzureOpenAI:
    """The client as Azure's users make it. Not to be closed."""
    usual: dict[str, Any] = {"api_version": DATED, "azure_endpoint": service.url}
    usual |= {"api_key": service.key, "max_retries": 0, "http_client": service.connections}
    return openai.AzureOpenAI(**usual | changes)


@pytest.fixture
def azure(service: Service) -> openai.AzureOpenAI:
    return azures(service)


def asked(service: Service, method: str, path: str, **headers: str) -> httpx2.Response:
    """An answer to a path as it stands: clients would tidy it."""
    address = urlsplit(service.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return httpx2.Response(answer.status, headers=answer.getheaders(), content=answer.read())
    finally:
        connection.close()


def test_a_chat_asks_for_the_model_that_the_deployment_is_named_after(
    service: Service, azure: openai.AzureOpenAI, receiver: Receiver, training_file: str
) -> None:
    job_id = azure.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    tuned = put(service, job_id, state=State.SUCCEEDED, attempt=1).spec.tuned_name
    v1 = azures(service, base_url=f"{service.url}/openai/v1", azure_endpoint=None)
    for client in (azure, v1):
        for name in (tuned, SLASHES):
            answer = client.chat.completions.create(model=name, messages=MESSAGES)
            assert answer.choices[0].message.content == "Hello"
            arrived = receiver.arrived.get(timeout=60)
            assert arrived.path == "/v1/chat/completions"
            assert json.loads(arrived.body) == {"model": name, "messages": MESSAGES}
            client.completions.create(model=name, prompt="Hi")
            arrived = receiver.arrived.get(timeout=60)
            assert arrived.path == "/v1/completions"
            assert json.loads(arrived.body) == {"model": name, "prompt": "Hi"}


def test_an_asynchronous_chat_is_streamed(service: Service, receiver: Receiver) -> None:
    delta = {"index": 0, "delta": {"content": "Hello"}}
    chunk = HELLO | {"object": "chat.completion.chunk", "choices": [delta]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    receiver.answer = lambda _: (200, {"content-type": "text/event-stream"}, iter([events]))

    async def chat() -> list[str | None]:
        async with openai.AsyncAzureOpenAI(
            azure_endpoint=service.url, api_version=DATED, api_key=service.key, max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True
            )
            return [part.choices[0].delta.content async for part in stream]

    assert asyncio.run(chat()) == ["Hello"]


def test_a_client_of_one_deployment_names_the_same_model_in_path_and_body(
    service: Service, receiver: Receiver
) -> None:
    client = azures(service, azure_deployment=SLASHES)
    client.chat.completions.create(model=SLASHES, messages=MESSAGES)
    assert json.loads(receiver.arrived.get(timeout=60).body)["model"] == SLASHES
    assert client.files.list().data == [], "files are no part of a deployment"
    with pytest.raises(
        openai.BadRequestError, match=r"'gpt-4o'.*'meta-llama/Llama-3.2-1B'"
    ) as other:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (other.value.param, other.value.code) == ("model", "invalid_value")
    path = "/openai/deployments/tiny/chat/completions"
    assert service.http("POST", path, json={"messages": MESSAGES}).status_code == 200
    assert json.loads(receiver.arrived.get(timeout=60).body) == {
        "messages": MESSAGES,
        "model": "tiny",
    }
    assert check_error(service.http("POST", path, json=[]), 400)["param"] == "model"
    answer = service.http("POST", path, json={"model": None, "messages": MESSAGES})
    assert check_error(answer, 400)["param"] == "model"


def test_a_version_is_a_date_or_none(service: Service, azure: openai.AzureOpenAI) -> None:
    azure.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    last = azure.files.create(file=("b.jsonl", b"{}"), purpose="fine-tune")
    assert [file.id for file in azure.files.list(limit=1).data] == [last.id]
    for version in ("2025-04-01-preview", "v1", "preview", "latest"):
        assert azures(service, api_version=version).files.list().data[0].id == last.id
    for path in ("/openai/files", "/openai/v1/files"):
        assert service.http("GET", path).status_code == 200
    for query in ("api-version=2024", "api-version=", f"api-version={DATED}&api-version=x"):
        error = check_error(service.http("GET", f"/openai/files?{query}"), 400)
        assert (error["param"], error["code"]) == ("api-version", "invalid_value")
    error = check_error(service.http("GET", f"/openai/files?limits=1&api-version={DATED}"), 400)
    assert (error["param"], error["code"]) == ("limits", "unknown_parameter")
    error = check_error(service.http("GET", f"/v1/files?api-version={DATED}"), 400)
    assert (error["param"], error["code"]) == ("api-version", "unknown_parameter")


@pytest.mark.parametrize("path", ["/openai/files", "/openai/v1/files"])
def test_the_key_is_checked_whichever_header_has_it(service: Service, path: str) -> None:
    key = service.key
    bearer = f"Bearer {key}"
    for headers in ({"api-key": key}, {"authorization": bearer}, {"Api-Key": key}):
        assert asked(service, "GET", path, **headers).status_code == 200
    both = {"api-key": "none", "authorization": bearer}
    assert asked(service, "GET", path, **both).status_code == 200
    for headers in (
        {},
        {"api-key": ""},
        {"api-key": "none"},
        {"api-key": bearer},
        {"api-key": key, "authorization": "Bearer none"},
        {"api-key": key, "authorization": ""},
    ):
        error = check_error(asked(service, "GET", path, **headers), 401)
        assert error["code"] == "invalid_api_key"
        assert key not in error["message"]
    read = service.store.keys.create_key(NewKey(project_id="default", name="k", scope="read"))[1]
    assert asked(service, "GET", path, **{"api-key": read}).status_code == 200
    answer = asked(service, "POST", path, **{"api-key": read})
    assert check_error(answer, 403)["code"] == "insufficient_permissions"


@pytest.mark.parametrize("path", ["/v1/files", "/metrics", "/v1/organization/projects"])
def test_other_paths_do_not_know_the_header(service: Service, path: str) -> None:
    assert asked(service, "GET", path, **{"api-key": service.key}).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/openai",
        "/openai/",
        "/openai/v1",
        "/openai/v1/",
        "/openai//v1/files",
        "/openai/v1//files",
        "/openai/v1/v1/files",
        "/openai/openai/files",
        "//openai/files",
        "/OpenAI/files",
        "/openai/filesystem",
        "/openai/chat",
        "/openai/metrics",
        "/openai/livez",
        "/openai/../metrics",
        "/openai/v1/../metrics",
        "/openai/v1/../../metrics",
        "/openai/%2e%2e/metrics",
        "/openai/..%2fmetrics",
        "/openai/../v1/files",
        "/openai/files/../keys",
        "/openai/files/../../metrics",
        "/openai/files/",
        "/openai/keys",
        "/openai/v1/keys",
        "/openai/v1/organization/projects",
        "/openai/organization/audit_logs",
        "/openai/api/v1/healthz",
        "/openai/deployments",
        "/openai/deployments/tiny",
        "/openai/deployments//chat/completions",
        "/openai/deployments/tiny/files",
        "/openai/v1/deployments/tiny/files",
        "/openai/deployments/v1/deployments/tiny",
    ],
)
def test_no_address_leads_elsewhere(service: Service, path: str) -> None:
    """Neither with the key, nor without it."""
    for headers in ({"api-key": service.key}, {}):
        error = check_error(asked(service, "GET", f"{path}?api-version={DATED}", **headers), 404)
        assert error["code"] == "unknown_url"
        shown = path.replace("%2e", ".").replace("%2f", "/")
        assert error["message"].startswith(f"There is no route GET {shown}")


def test_what_azure_has_and_this_service_has_not_is_refused_by_name(
    service: Service, azure: openai.AzureOpenAI, training_file: str
) -> None:
    for path in (
        "/openai/batches",
        "/openai/threads",
        "/openai/assistants",
        "/openai/v1/vector_stores",
        "/openai/deployments/tiny/images/generations",
        "/openai/deployments/tiny/audio/speech",
        "/openai/fine_tuning/jobs/a/checkpoints/b/copy",
    ):
        answer = service.http("POST", f"{path}?api-version={DATED}", json={})
        error = check_error(answer, 404)
        assert (error["message"], error["code"]) == (
            f"There is no route POST {path}. /docs lists them.",
            "unknown_url",
        )
    with pytest.raises(
        openai.NotFoundError, match="no route POST /openai/deployments/tiny/embeddings"
    ):
        azure.embeddings.create(model="tiny", input="Hi")
    with pytest.raises(openai.BadRequestError, match="responses are not kept here"):
        azure.responses.create(model="tiny", input="Hi", store=True)
    error = check_error(service.http("POST", "/openai/files/import", json={}), 405)
    assert error["message"] == "POST /openai/files/import: this path takes DELETE, GET."
    with pytest.raises(openai.BadRequestError, match=r"machines\. Leave it out") as caught:
        azure.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, extra_body={"trainingType": "Standard"}
        )
    assert (caught.value.param, caught.value.code) == ("trainingType", "unknown_parameter")
    assert service.store.jobs.list_jobs("default").data == []


def test_a_request_counts_as_one_to_the_same_route(
    service: Service,
    azure: openai.AzureOpenAI,
    training_file: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def counted() -> float:
        labels = {"http_request_method": "GET", "http_response_status_code": "200"}
        found = service.app.state.services.meters.registry.get_sample_value(
            "http_server_request_duration_seconds_count",
            labels | {"http_route": "/v1/fine_tuning/jobs/{job_id}/events"},
        )
        return found or 0.0

    job_id = azure.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    before = counted()
    caplog.set_level(logging.DEBUG, logger="ft_service.api")
    caplog.clear()
    assert azure.fine_tuning.jobs.list_events(job_id).data
    (record,) = wait_for(lambda: [r for r in caplog.records if r.name == "ft_service.api"])
    fields: dict[str, Any] = record.__dict__["ft"]
    assert fields["route"] == "/v1/fine_tuning/jobs/{job_id}/events"
    assert (fields["job_id"], fields["project_id"]) == (job_id, "default")
    assert f"GET /v1/fine_tuning/jobs/{job_id}/events: 200" in record.getMessage()
    assert record.levelno == logging.DEBUG
    assert service.key not in json.dumps(fields) + record.getMessage()
    assert counted() == before + 1


def test_requests_to_both_paths_share_a_projects_limit(service: Service) -> None:
    project = service.store.projects.create_project(
        name="limited", organization="local", limits=TenantLimits(max_requests_per_minute=2)
    )
    key = service.store.keys.create_key(NewKey(project_id=project.id, name="k", scope="submit"))[1]
    left = "x-ratelimit-remaining-requests"
    assert service.http("GET", "/v1/models", key=key).headers[left] == "1"
    assert service.http("GET", "/openai/models", key=key).headers[left] == "0"
    answer = service.http("GET", "/openai/v1/models", key=key)
    assert check_error(answer, 429)["code"] == "rate_limit_exceeded"
