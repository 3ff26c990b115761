"""Bases that the server fetches: who may ask for them, and what everybody can plan meanwhile."""

from __future__ import annotations

import pytest

from ft_service.store.records import NewKey, Scope
from tests.support.pulled import looked_up
from tests.support.rest.service import Service


def asked(service: Service, **body: object) -> dict[str, object]:
    answer = service.http("POST", "/v1/pulls", json={"model": "org/new", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("project", "organization", "scope"),
    [("team", "local", "admin"), ("other", "other", "admin"), ("default", "local", "submit")],
)
def test_only_who_runs_the_service_fetches_bases(
    service: Service, project: str, organization: str, scope: Scope
) -> None:
    pull_id = asked(service)["id"]
    service.store.projects.ensure_project(project, organization)
    _, key = service.store.keys.create_key(NewKey(project_id=project, name="k", scope=scope))
    for method, path in (
        *(("GET", ""), ("POST", ""), ("GET", f"/{pull_id}"), ("DELETE", f"/{pull_id}")),
        *(("POST", f"/{pull_id}/stop"), ("POST", f"/{pull_id}/resume")),
    ):
        answer = service.http(
            method,
            f"/v1/pulls{path}",
            key=key,
            json={"model": "org/x"} if method == "POST" else None,
        )
        assert answer.status_code == 403, (method, path)
        assert answer.json()["error"]["code"] == "insufficient_permissions"
    assert [pull["model"] for pull in listed(service)] == ["org/new"]
    assert listed(service)[0]["state"] == "queued"


def listed(service: Service) -> list[dict[str, object]]:
    return service.http("GET", "/v1/pulls").json()["data"]


def test_a_pull_is_asked_for_stopped_resumed_and_removed(service: Service) -> None:
    made = asked(service, look=True)
    assert asked(service, look=True) == made
    assert (made["object"], made["model"], made["state"], made["bytes"], made["bytes_done"]) == (
        *("pull", "org/new", "queued", None, 0),
    )
    path = f"/v1/pulls/{made['id']}"
    for _ in range(2):
        assert service.http("POST", f"{path}/stop").json()["state"] == "stopped"
    for _ in range(2):
        assert service.http("POST", f"{path}/resume").json()["state"] == "queued"
    assert service.http("GET", path).json()["look"] is False
    wrong = service.http("POST", f"{path}/resume", json={"look": True})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "look")
    assert service.http("DELETE", path).json()["deleted"] is True
    assert service.http("GET", path).status_code == 404
    log = service.http("GET", "/v1/organization/audit_logs").json()["data"]
    types = [entry["type"] for entry in log if entry["type"].startswith("pull.")]
    assert types == ["pull.deleted", "pull.resumed", "pull.stopped", "pull.started"], (
        "what is repeated changes nothing"
    )


def test_a_base_that_was_only_looked_up_is_planned_by_everybody_and_trained_by_nobody(
    service: Service, training_file: str
) -> None:
    body = {"model": "org/new", "training_file": training_file}
    plan = "/v1/fine_tuning/plan"
    unknown = service.http("POST", plan, json=body)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "model_not_found")
    assert "ft pull org/new" in unknown.json()["error"]["message"]
    looked_up(service.settings.models[0], str(asked(service, look=True)["id"]))
    planned = service.http("POST", plan, json=body).json()
    assert planned["not_here"].startswith("The weights of org/new are not here yet")
    here = service.http("POST", plan, json=body | {"model": "tiny"}).json()
    assert here["not_here"] is None
    same = ("rank", "frozen_parameters", "adapter_parameters")
    assert [planned[name] for name in same] == [here[name] for name in same]
    refused = service.http("POST", "/v1/fine_tuning/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_found")
    assert "org/new" not in [model.id for model in service.client().models.list()]
