"""The official SDK's client uses the service as an agent would, against the real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from mcp.client.client import Client

import api.mcp
from api.app import create_app
from api.mcp.tools import TOOLS, plan_id
from ft_service.errors import SpecError
from ft_service.jobs.states import State
from ft_service.settings import Settings
from ft_service.store.records import NewKey
from tests.support.mcp_clients import Use, used_tools
from tests.support.rest.service import TRAINING, Service, put, serving_app


@pytest.fixture(scope="module")
def server(new_database: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving_app(Settings(home=new_database.parent, mcp="on"), new_database) as served:
        yield served


def used(service: Service, use: Use, key: str | None = None) -> Any:
    """What comes of the client's use of the tools."""

    return used_tools(service.url, key or service.key, use)


def called(service: Service, tool: str, key: str | None = None, /, **arguments: Any) -> Any:
    """The result of one call."""
    return used(service, lambda client: client.call_tool(tool, arguments), key)


def test_tools_say_what_they_take_and_whether_they_change_anything(service: Service) -> None:
    tools = {tool.name: tool for tool in used(service, lambda client: client.list_tools()).tools}
    assert tools.keys() == TOOLS.keys()
    submit = tools["submit"]
    assert set(submit.input_schema["required"]) == {"request", "plan_id"}
    assert submit.input_schema["additionalProperties"] is False
    changing = {name for name, tool in tools.items() if not tool.annotations.read_only_hint}
    assert changing == {"upload_data", "submit", "export", "cancel"}
    assert all(tool.description.endswith(".") for tool in tools.values())


def test_an_agent_goes_from_data_to_a_job(service: Service) -> None:
    async def use(client: Client) -> tuple[list[Any], Any]:
        told = []

        async def call(tool: str, /, **arguments: Any) -> Any:
            result: Any = await client.call_tool(tool, arguments)
            assert not result.is_error, result.content
            told.append(result.content[0].text.partition("\n"))
            return result.structured_content

        bases = await call("models")
        assert "tiny" in [base["id"] for base in bases["data"]]
        file = await call("upload_data", name="train.jsonl", content=TRAINING.decode())
        assert (await call("check_data", file_id=file["id"]))["ok"] is True
        samples = await call("show_samples", file_id=file["id"], model="tiny", limit=1)
        assert len(samples["data"]) == 1
        body = {"model": "tiny", "training_file": file["id"], "suffix": "agent"}
        planned = await call("plan", request=body)
        job = await call("submit", request=body, plan_id=planned["plan_id"])
        again = await call("submit", request=body, plan_id=planned["plan_id"])
        assert again["id"] == job["id"], "one plan is one job"
        other = await call("plan", request=body)
        assert other["plan_id"] != planned["plan_id"], "so that a second job can be meant"
        waiting = await call("wait", job_id=job["id"], seconds=1)
        assert waiting["status"] == "validating_files"
        return told, job

    told, job = used(service, use)
    assert all(json.loads(found) is not None for _, _, found in told)
    sentences = [sentence for sentence, _, _ in told]
    assert "tiny" in sentences[0]
    assert f"{job['id']} is validating_files" in sentences[5]
    assert len(told) <= 12
    assert [one.id for one in service.store.jobs.list_jobs("default").data] == [job["id"]]


def test_nothing_is_spent_without_the_plan_of_this_very_body(
    service: Service, training_file: str
) -> None:
    body = {"model": "tiny", "training_file": training_file}
    planned = called(service, "plan", request=body).structured_content
    for changed, given in (
        ({**body, "suffix": "b"}, planned["plan_id"]),
        (body, "plan-0123456789abcdef01234567"),
        (body, ""),
    ):
        refused = called(service, "submit", request=changed, plan_id=given)
        assert refused.is_error
        assert refused.structured_content["error"]["param"] == "plan_id"
    assert service.store.jobs.list_jobs("default").data == []
    assert plan_id({"a": 1, "b": 2}, "0" * 8) == plan_id({"b": 2, "a": 1}, "0" * 8)


def test_a_refusal_has_the_apis_words(service: Service, training_file: str) -> None:
    refused = called(service, "plan", request={"model": "none", "training_file": training_file})
    assert refused.is_error
    assert refused.structured_content["error"]["param"] == "model"
    assert refused.content[0].text == refused.structured_content["error"]["message"]
    wrong = called(service, "wait", job_id="ftjob-1", seconds=3600)
    assert "seconds = 3600" in wrong.content[0].text
    unknown = called(service, "train")
    assert "There is no tool 'train'" in unknown.content[0].text
    missing = called(service, "status", job_id="ftjob-1")
    assert missing.is_error


def test_a_failed_job_is_explained_and_others_see_nothing_of_it(
    service: Service, client: Any, training_file: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    put(service, job_id, state=State.CANCELLED)
    ended = called(service, "wait", job_id=job_id, seconds=50)
    assert ended.structured_content["status"] == "cancelled", "it does not wait on"
    assert called(service, "explain_refusal", job_id=job_id).structured_content["error"] == {}
    service.store.projects.ensure_project("other", "rival")
    other = service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    for name in ("status", "metrics", "explain_refusal", "cancel", "evaluation"):
        assert called(service, name, other, job_id=job_id).is_error, name
    assert called(service, "jobs", other).structured_content["data"] == []


def test_a_key_that_reads_changes_nothing(service: Service, training_file: str) -> None:
    key = service.store.keys.create_key(NewKey(project_id="default", name="r", scope="read"))[1]
    assert not called(service, "models", key).is_error
    refused = called(service, "upload_data", key, name="a.jsonl", content="{}")
    assert refused.is_error
    assert "A key of scope read changes nothing" in refused.content[0].text


def test_pages_of_other_sites_and_requests_without_a_key_are_refused(service: Service) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    headers = {"accept": "application/json, text/event-stream"}
    own = {**headers, "origin": service.url}
    assert service.http("POST", "/mcp", json=body, headers=own).status_code == 200
    foreign = {**headers, "origin": "https://evil.example"}
    assert service.http("POST", "/mcp", json=body, headers=foreign).status_code == 403
    assert service.http("POST", "/mcp", json=body, headers=headers, key="ft-x").status_code == 401
    long = {**body, "params": {"x": "y" * 5_000_000}}
    assert service.http("POST", "/mcp", json=long, headers=headers).status_code == 413
    assert service.http("GET", "/mcp").status_code == 405


def test_without_its_package_the_start_says_what_to_install(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "api.mcp.server")
    monkeypatch.delattr(api.mcp, "server")
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(SpecError, match=r"pip install 'ft-service\[mcp\]'") as caught:
        create_app(service.settings.model_copy(update={"mcp": "on"}), service.store)
    assert caught.value.param == "FT_MCP"
