"""Two tenants and every route of the description: a route that is added is tried by itself."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from api.routes import device_sign_ins
from ft_service.control.cleanup.erasing import erase
from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.jobs.states import State
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey, Scope, TenantLimits
from ft_service.store.tenants.people import SignOn
from tests.support.creating import create_job
from tests.support.records import move_project, new_job
from tests.support.rest.described import MAKES, MARKS, OPEN, ask, filled, operations, tenant
from tests.support.rest.refusals import check_error
from tests.support.rest.service import TRAINING, Service

pytestmark = pytest.mark.usefixtures("examined_by_one_process")


@pytest.fixture
def theirs(service: Service) -> dict[str, str]:
    """Everything that the first tenant has. Names hold a mark."""
    return tenant(service, "default", service.key)


@pytest.fixture(params=["rival", "local"])
def rival(request: pytest.FixtureRequest, service: Service) -> str:
    """An admin key of another project, of another organisation or of the same."""
    return rival_key(service, request.param)


def test_what_another_tenant_has_does_not_exist(
    service: Service, theirs: dict[str, str], rival: str, subtests: pytest.Subtests
) -> None:
    secrets = [
        *MARKS,
        *(value for name, value in theirs.items() if name not in ("project_id", "format")),
    ]
    before = everything(service, theirs)
    missing = {name: f"none-{name.replace('_', '-')}" for name in theirs} | {
        "model": "ft:tiny:x::none"
    }
    missing |= {
        "format": theirs["format"],
        "fine_tuned_model_checkpoint": "ft:tiny:x::none",
        "checkpoint": "ft:tiny:x::none:ckpt-step-5",
    }
    for method, path in operations(service):
        with subtests.test(method=method, path=path):
            answer = ask(service, method, filled(path, theirs), rival)
            assert "{" in path or answer.status_code in (200, 400, 403, 404), answer.text
            assert not [
                secret for secret in secrets if secret in neutral(answer.text, path, theirs)
            ], answer.text
            if "{" in path:
                nothing = ask(service, method, filled(path, missing), rival)
                assert answer.status_code in (400, 403, 404), answer.text
                assert answer.status_code == nothing.status_code
                same = neutral(answer.text, path, theirs) == neutral(nothing.text, path, missing)
                assert same, "a foreign object and one that is not there are told apart"
                is_operators = path.startswith("/v1/pulls")  # nobody else gets to know any
                expected = 403 if is_operators else 404
                assert method == "POST" or answer.status_code == expected
    assert everything(service, theirs) == before


def neutral(text: str, path: str, values: dict[str, str]) -> str:
    """An answer without the names that were asked for."""
    for name in re.findall(r"{(\w+)}", path):
        text = text.replace(values[name], "…")
    return text


def everything(service: Service, theirs: dict[str, str]) -> list[Any]:
    """What the first tenant sees of its own."""
    seen = []
    for method, path in operations(service):
        if method == "GET" and "audit" not in path and path not in MAKES:
            answer = service.http(method, filled(path, theirs))
            assert answer.status_code in (200, 400, 404), answer.text
            seen.append(
                (
                    path,
                    answer.status_code,
                    answer.text
                    if "json" in answer.headers["content-type"]
                    else len(answer.content),
                )
            )
    assert sum(status == 200 for _, status, _ in seen) > 15
    return [
        (path, status, re.sub(r'"last_used_at":\w+', "", str(text))) for path, status, text in seen
    ]


# "rival" is refused by its project too, as "local" is
@pytest.mark.parametrize("organization", [pytest.param("rival", marks=pytest.mark.slow), "local"])
def test_another_tenants_ids_are_nothing_in_queries_either(
    service: Service, theirs: dict[str, str], organization: str
) -> None:
    """Every query parameter of every route that takes text: a list's cursor, a filter."""
    changed = service.http("GET", "/v1/organization/audit_logs?limit=1").json()["data"][0]["id"]
    rival = rival_key(service, organization)
    theirs = theirs | {"audit_log_id": changed}
    names = (
        "job_id",
        "file_id",
        "model",
        "project_id",
        "api_key_id",
        "audit_log_id",
        "webhook_endpoint_id",
        "sweep_id",
    )
    described = service.http("GET", "/openapi.json").json()["paths"]
    tried = set()
    for path in (
        path
        for path, methods in described.items()
        if "get" in methods and "{" not in path and path not in OPEN
    ):
        for name in (
            found["name"]
            for found in described[path]["get"].get("parameters", ())
            if takes_text(found)
        ):
            tried.add(name)
            for kind in names:
                real = theirs[kind]
                none = f"none-{kind.replace('_', '-')}"
                answers = [
                    service.http("GET", path, key=rival, params={name: value})
                    for value in (real, none)
                ]
                shown = [
                    answer.text.replace(value, "…")
                    for answer, value in zip(answers, (real, none), strict=True)
                ]
                assert answers[0].status_code == answers[1].status_code, (
                    path,
                    name,
                    answers[0].text,
                )
                assert without_times(shown[0]) == without_times(shown[1]), (path, name)
                assert not [mark for mark in MARKS if mark in shown[0]]
    assert tried >= {"after", "job", "project_ids", "api_key_ids"}


def takes_text(parameter: dict[str, Any]) -> bool:
    if parameter["in"] != "query":
        return False
    schemas = [parameter["schema"], *parameter["schema"].get("anyOf", ())]
    return any(
        (one.get("items") or one).get("type") == "string"
        and "enum" not in (one.get("items") or one)
        for one in schemas
    )


def without_times(text: str) -> str:
    """Of a key that was used just now."""
    return re.sub(r'"last_used_at":\w+', "", text)


def rival_key(service: Service, organization: str) -> str:
    service.store.projects.ensure_project("rival", organization)
    return service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]


def test_another_tenants_ids_are_nothing_in_bodies_either(
    service: Service, theirs: dict[str, str], rival: str
) -> None:
    own = service.client(rival).files.create(file=("own.jsonl", TRAINING), purpose="fine-tune").id
    bodies = {
        "file_not_found": [
            {"model": "tiny", "training_file": theirs["file_id"]},
            {"model": "tiny", "training_file": own, "validation_file": theirs["file_id"]},
        ],
        "model_not_found": [
            {"model": theirs["model"], "training_file": own},
            {"model": theirs["checkpoint"], "training_file": own},
        ],
    }
    for code, some in bodies.items():
        for body in some:
            for path in ("plan", "jobs", "sweeps"):
                sweep = (
                    {"sweep": {"lora.r": [4, 8]}, "validation_file": own}
                    if path == "sweeps"
                    else {}
                )
                error = check_error(
                    service.http("POST", f"/v1/fine_tuning/{path}", key=rival, json=sweep | body),
                    400,
                )
                assert error["code"] == code, (path, error)
                assert not [
                    mark for mark in MARKS if mark in error["message"].replace(theirs["model"], "")
                ]
    asked = {"model": theirs["model"], "messages": [{"role": "user", "content": "Hi"}]}
    refused, unknown = (
        service.http("POST", "/v1/chat/completions", key=rival, json=asked | {"model": name})
        for name in (theirs["model"], "ft:tiny:x::none")
    )
    assert refused.status_code == unknown.status_code >= 400


def test_what_is_shared_is_the_model_alone(
    service: Service, client: openai.OpenAI, theirs: dict[str, str]
) -> None:
    rival = rival_key(service, "local")
    client.fine_tuning.checkpoints.permissions.create(theirs["model"], project_ids=["rival"])
    opened = set()
    for method, path in operations(service):
        if method != "DELETE" and "{" in path:
            answer = ask(service, method, filled(path, theirs), rival)
            if answer.status_code == 200:
                opened.add(path)
    assert opened == {"/v1/models/{model}"}
    assert theirs["model"] in service.http("GET", "/v1/models", key=rival).text


def test_nothing_is_shared_with_another_organisation(
    service: Service, client: openai.OpenAI, theirs: dict[str, str]
) -> None:
    """Nor is it said which projects there are in one."""
    rival = rival_key(service, "rival")
    path = f"/v1/fine_tuning/checkpoints/{theirs['model']}/permissions"
    refused = [
        check_error(service.http("POST", path, json={"project_ids": ids}), 400)
        for ids in (
            ["rival"],
            ["none0"],
            [f"third-{theirs['project_id']}", "rival"],
            [f"third-{theirs['project_id']}", "none0"],
        )
    ]
    for foreign, unknown in (refused[:2], refused[2:]):
        assert {**foreign, "message": foreign["message"].replace("rival", "none0")} == unknown
    assert len(client.fine_tuning.checkpoints.permissions.list(theirs["model"]).data) == 1, (
        "all are granted or none is"
    )
    move_project(service.store, "rival", "local")
    client.fine_tuning.checkpoints.permissions.create(theirs["model"], project_ids=["rival"])
    assert theirs["model"] in service.http("GET", "/v1/models", key=rival).text
    move_project(service.store, "rival", "rival")
    assert theirs["model"] not in service.http("GET", "/v1/models", key=rival).text
    check_error(service.http("GET", f"/v1/models/{theirs['model']}", key=rival), 404)
    asked = {"model": theirs["model"], "messages": [{"role": "user", "content": "Hi"}]}
    check_error(service.http("POST", "/v1/chat/completions", key=rival, json=asked), 404)


def organization_of(service: Service) -> Any:
    """OpenAI's client for administrators."""
    client = openai.OpenAI(
        base_url=f"{service.url}/v1",
        admin_api_key=service.key,
        api_key=service.key,
        max_retries=0,
        http_client=service.connections,
    )
    return client.admin.organization


def test_an_organisation_is_managed_by_the_client_of_openai(
    service: Service, client: openai.OpenAI
) -> None:
    admin = organization_of(service)
    made = admin.projects.create(
        name="alpha", extra_body={"limits": {"max_slots": 2, "bases": ["tiny"]}}
    )
    assert made.name == "alpha"
    assert (made.model_extra or {})["limits"]["max_slots"] == 2
    changed = admin.projects.update(
        made.id, name="beta", extra_body={"limits": {"max_slots": None, "max_queued": 3}}
    )
    assert service.store.projects.get_project(made.id).limits == TenantLimits(
        max_queued=3, bases=("tiny",)
    )
    assert changed.name == "beta"
    path = f"/v1/organization/projects/{made.id}/api_keys"
    created = service.http(
        "POST", path, json={"name": "mine", "scope": "read", "expires_in_seconds": 60}
    ).json()
    own = service.client(created["value"])
    assert own.files.list().data == []
    rotated = service.http(
        "POST", f"{path}/{created['id']}/rotate", json={"keep_seconds": 30}
    ).json()
    for secret in (created["value"], rotated["value"]):
        assert service.client(secret).files.list().data == [], "both open for a while"
    assert [key.name for key in admin.projects.api_keys.list(made.id)] == ["mine", "mine"]
    admin.projects.api_keys.delete(rotated["id"], project_id=made.id)
    assert [p.id for p in admin.projects.list()] == ["default", made.id]
    assert admin.projects.archive(made.id).status == "archived"
    assert [p.id for p in admin.projects.list()] == ["default"]
    told = [entry.type for entry in admin.audit_logs.list()]
    expected = [
        "project.archived",
        "key.revoked",
        "key.rotated",
        "key.created",
        "project.updated",
        "project.created",
    ]
    assert told[:6] == expected
    [newest] = service.http("GET", "/v1/organization/audit_logs?limit=1").json()["data"]
    assert newest["actor"]["session"]["ip_address"] == "127.0.0.1"
    assert newest["actor"]["api_key"]["id"] is not None
    assert check_error(
        service.http("POST", "/v1/organization/projects/default/archive", json={}), 400
    )


def test_people_are_listed_and_ended_in_every_project_by_the_client_of_openai(
    service: Service,
) -> None:
    store = service.store
    store.projects.ensure_project("proj_b", "local")
    store.projects.ensure_project("proj_elsewhere", "others")
    grants: dict[str, Scope] = {"default": "read", "proj_b": "admin"}
    ada = SignOn(identity="https://login.example 7", name="ada@x", grants=grants, state="1")
    holder = store.sessions.session_holder(store.people.sign_in(ada, 600) or "")
    made, secret = store.keys.create_key(
        NewKey(project_id="default", name="laptop", scope="read"), made_by=holder
    )
    eve = SignOn(identity="8", name="eve", grants={"proj_elsewhere": "admin"}, state="2")
    store.people.sign_in(eve, 600)

    users = organization_of(service).users
    [person] = users.list()
    assert users.retrieve(person.id) == person
    assert (person.email, person.role, person.id.isascii()) == ("ada@x", "reader", True)
    assert person.projects is not None
    assert {one.id: one.role for one in person.projects.data} == {
        "default": "member",
        "proj_b": "owner",
    }
    ended = users.delete(person.id)
    assert ended.deleted
    assert len((ended.model_extra or {})["revoked"]) == 3
    assert made.id in (ended.model_extra or {})["revoked"]
    assert store.keys.authenticate(secret) is None
    assert list(users.list()) == []
    path = f"/v1/organization/users/{person.id}"
    assert check_error(service.http("DELETE", path), 404)


def test_a_projects_admin_sees_its_own_people_and_ends_none(service: Service) -> None:
    """What ends is all that they have, in other projects too."""
    store = service.store
    store.projects.ensure_project("proj_b", "local")
    grants: dict[str, Scope] = {"default": "read", "proj_b": "admin"}
    of_eve: dict[str, Scope] = {"default": "read"}
    for name, opened in (("ada", grants), ("eve", of_eve)):
        store.people.sign_in(SignOn(identity=name, name=name, grants=opened, state=name), 600)
    own = store.keys.create_key(NewKey(project_id="proj_b", name="k", scope="admin"))[1]
    path = "/v1/organization/users"
    [ada] = service.http("GET", path, key=own).json()["data"]
    assert (ada["name"], ada["email"]) == ("ada", None)
    assert ada["projects"]["data"] == [{"id": "proj_b", "role": "owner"}]
    everyone = {one["name"]: one["id"] for one in service.http("GET", path).json()["data"]}
    assert check_error(service.http("DELETE", f"{path}/{ada['id']}", key=own), 403)
    assert check_error(service.http("GET", f"{path}/{everyone['eve']}", key=own), 404)


def test_a_deleted_project_is_not_there_and_housekeeping_removes_what_it_has(
    service: Service,
) -> None:
    """Of two tenants the other loses nothing."""
    service.store.projects.ensure_project("gone", "local")
    key = service.store.keys.create_key(NewKey(project_id="gone", name="k", scope="admin"))[1]
    gone = tenant(service, "gone", key)
    # Those of the sweep, whose turn it would be.
    service.sql("UPDATE jobs SET state = 'queued' WHERE finished_at IS NULL")
    theirs = tenant(service, "default", service.key)
    path = "/v1/organization/projects"
    assert check_error(service.http("DELETE", f"{path}/gone", key=key), 403), (
        "for its own admin, too"
    )
    deleted = service.http("DELETE", f"{path}/gone").json()
    assert deleted == {"id": "gone", "deleted": True, "object": "organization.project.deleted"}
    assert check_error(service.http("DELETE", f"{path}/gone"), 404)
    assert check_error(service.http("GET", f"{path}/gone"), 404)
    assert check_error(service.http("DELETE", f"{path}/default"), 400)["param"] == "project_id"
    listed = service.http("GET", f"{path}?include_archived=true").json()["data"]
    assert {one["id"] for one in listed} == {"default", "third-default", "third-gone"}
    before = everything(service, theirs)
    service.sql("UPDATE projects SET deleted_at = deleted_at - 60 WHERE id = 'gone'")
    for _ in range(4):
        remove_expired(service.settings, service.store)
        list(erase(service.settings, service.store, Places(service.settings.home)))
    assert service.store.erasure.projects_to_erase() == []
    folders = [service.settings.runs_dir, service.settings.files_dir]
    assert not [
        path for folder in folders for path in folder.rglob("*") if gone["job_id"] in str(path)
    ]
    assert not (service.settings.files_dir / gone["file_id"]).exists()
    assert everything(service, theirs) == before


def test_a_tenants_admin_manages_its_keys_and_not_its_limits(service: Service, rival: str) -> None:
    def post(path: str, **body: Any) -> Any:
        return service.http("POST", f"/v1/organization/{path}", key=rival, json=body)

    assert post("projects/rival/api_keys", name="mine").status_code == 200
    assert check_error(post("projects/rival", limits={"max_slots": 99}), 403)
    assert check_error(post("projects", name="more"), 403)
    assert check_error(post("projects/rival/archive"), 403)
    [own] = service.http("GET", "/v1/organization/projects", key=rival).json()["data"]
    assert own["id"] == "rival"


def limited(service: Service, **limits: Any) -> openai.OpenAI:
    project = service.store.projects.create_project(
        name="limited", organization="local", limits=TenantLimits(**limits)
    )
    return service.client(
        service.store.keys.create_key(NewKey(project_id=project.id, name="k", scope="submit"))[1]
    )


def test_requests_beyond_what_a_project_may_send_wait(service: Service) -> None:
    client = limited(service, max_requests_per_minute=2)
    first = client.files.with_raw_response.list()
    assert (
        first.headers["x-ratelimit-limit-requests"],
        first.headers["x-ratelimit-remaining-requests"],
    ) == ("2", "1")
    client.files.list()
    with pytest.raises(openai.RateLimitError) as caught:
        client.files.list()
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-requests" not in service.http("GET", "/v1/files").headers, (
        "who has no limit is not counted"
    )


def test_what_a_project_may_not_use_is_refused_by_name(service: Service) -> None:
    client = limited(
        service,
        max_queued=2,
        max_bytes=2 * len(TRAINING),
        bases=("tiny",),
        max_slots=2,
        max_priority=1,
    )
    jobs = client.fine_tuning.jobs
    file_id = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune").id
    with pytest.raises(openai.PermissionDeniedError, match="may train on tiny"):
        jobs.create(model="meta-llama/Llama-3.2-1B", training_file=file_id)
    with pytest.raises(openai.BadRequestError, match="may run 2 at once"):
        jobs.create(
            model="tiny", training_file=file_id, extra_body={"distributed": {"nproc_per_node": 3}}
        )
    made: Any = jobs.create(model="tiny", training_file=file_id, extra_body={"priority": 9})
    assert made.priority == 1
    jobs.create(model="tiny", training_file=file_id)
    with pytest.raises(
        openai.RateLimitError, match="2 jobs of this project wait, and 2 may"
    ) as caught:
        jobs.create(model="tiny", training_file=file_id)
    assert (caught.value.code, caught.value.response.headers["x-should-retry"]) == (
        "queue_limit",
        "false",
    )
    jobs.cancel(made.id)
    jobs.create(model="tiny", training_file=file_id)
    client.files.create(file=("b.jsonl", TRAINING), purpose="fine-tune")
    with pytest.raises(
        openai.RateLimitError, match=f"keeps {2 * len(TRAINING)} and may keep {2 * len(TRAINING)}"
    ):
        client.files.create(file=("c.jsonl", TRAINING), purpose="fine-tune")
    assert len(list((service.settings.files_dir).iterdir())) == 2, "what was refused is not kept"


def test_use_is_shown_by_day_project_and_key(service: Service, client: openai.OpenAI) -> None:
    client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    create_job(service.store, new_job(project_id="default", state=State.SUCCEEDED))
    answer = service.http(
        "GET", "/v1/organization/usage/fine_tuning?group_by=project_id&group_by=api_key_id&limit=7"
    ).json()
    assert len(answer["data"]) == 7
    [result] = answer["data"][-1]["results"]
    assert (result["uploaded_bytes"], result["project_id"]) == (len(TRAINING), "default")
    assert result["api_key_id"] == service.store.keys.list_keys("default")[0].id
    table = service.http("GET", "/v1/organization/usage/fine_tuning?format=csv").text.splitlines()
    assert table[0].startswith("day,project_id,api_key_id,trained_tokens")
    assert table[1].split(",")[5] == str(len(TRAINING))
    first = service.http("GET", "/v1/organization/usage/fine_tuning?limit=3").json()
    assert (first["has_more"], len(first["data"])) == (True, 3)
    second = service.http(
        "GET", f"/v1/organization/usage/fine_tuning?limit=3&page={first['next_page']}"
    ).json()
    assert second["data"][0]["start_time"] == first["data"][-1]["end_time"]


def test_without_a_key_few_sign_ins_are_begun(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sign_ins, "OF_ADDRESS", 2)
    path = f"{service.url}/v1/device_sign_ins"
    answers = [service.connections.post(path) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [404, 404, 429]
    assert "2 requests a minute without a key" in answers[-1].text
    assert float(answers[-1].headers["retry-after"]) >= 1
    assert "FT_OIDC_ISSUER is not set" in answers[0].text
    ended = service.http("DELETE", "/v1/device_sign_ins/key")
    assert (ended.status_code, "`ft keys revoke`" in ended.text) == (400, True)
