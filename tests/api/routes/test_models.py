"""Tuned models: who may see and use them, and deleting them."""

from __future__ import annotations

import openai
import pytest
from openai.resources.fine_tuning.checkpoints import Permissions

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewKey
from tests.support.rest.service import Service, put, run_dir


@pytest.fixture
def tuned(service: Service, client: openai.OpenAI, training_file: str) -> str:
    """Name of the outcome of a job with checkpoints at the steps 5 and 10."""
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    done = {"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "attempt": 1, "finished_at": 1e9}
    run_dir(service, job_id).put("adapter/adapter_config.json", b"{}")
    return put(service, job_id, checkpoints=(5, 10), **done).spec.tuned_name


@pytest.fixture
def other(service: Service) -> openai.OpenAI:
    """A client of another project."""
    service.store.projects.ensure_project("other", "local")
    return service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="admin"))[1]
    )


def ids(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list() if model.id.startswith("ft:")]


def test_the_operators_models_are_listed_alone(
    service: Service, client: openai.OpenAI, tuned: str
) -> None:
    every = [model.id for model in client.models.list()]
    system = [
        model["id"] for model in service.http("GET", "/v1/models?owned_by=system").json()["data"]
    ]
    assert every == [*system, tuned]
    assert len(system) == 3, "two bases and an alias"


def test_a_deleted_model_is_gone_and_its_job_stays(
    service: Service, client: openai.OpenAI, tuned: str
) -> None:
    job = client.fine_tuning.jobs.list().data[0]
    adapter = f"/v1/fine_tuning/jobs/{job.id}/adapter"
    assert service.http("GET", adapter).status_code == 200

    deleted = client.models.delete(tuned)

    assert (deleted.id, deleted.object, deleted.deleted) == (tuned, "model", True)
    assert ids(client) == []
    for ask in (client.models.retrieve, client.models.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(tuned)
        assert caught.value.code == "model_not_found"
    assert service.http("GET", adapter).status_code == 404
    assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model == tuned
    assert client.models.delete(f"{tuned}:ckpt-step-5").id == f"{tuned}:ckpt-step-5"
    assert client.models.retrieve(f"{tuned}:ckpt-step-10").id == f"{tuned}:ckpt-step-10"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(f"{tuned}:ckpt-step-5")


def test_a_pruned_checkpoint_is_gone_for_everybody(
    service: Service, client: openai.OpenAI, other: openai.OpenAI, tuned: str, training_file: str
) -> None:
    """Wherever its name may be given, and in no list; the other checkpoint stays, and so does an
    adapter made before.
    """
    pruned = f"{tuned}:ckpt-step-5"
    there = f"{tuned}:ckpt-step-10"
    permissions_of(client).create(pruned, project_ids=["other"])
    permissions_of(client).create(there, project_ids=["other"])
    assert set(ids(other)) == {pruned, there}
    job = client.fine_tuning.jobs.list().data[0]
    points = {
        point.step_number: point.id for point in client.fine_tuning.jobs.checkpoints.list(job.id)
    }
    run = run_dir(service, job.id)
    run.path("checkpoints/step-5-a1/COMPLETE").unlink()

    assert ids(other) == [there]
    assert [point.step_number for point in client.fine_tuning.jobs.checkpoints.list(job.id)] == [10]
    for ask in (
        lambda: client.models.retrieve(pruned),
        lambda: other.models.retrieve(pruned),
        lambda: client.models.delete(pruned),
        lambda: client.chat.completions.create(model=pruned, messages=[]),
        lambda: permissions_of(client).create(pruned, project_ids=["other"]),
        lambda: client.get(f"/fine_tuning/checkpoints/{pruned}/adapter", cast_to=bytes),
        lambda: client.get(
            f"/fine_tuning/jobs/{job.id}/checkpoints/{points[5]}/adapter", cast_to=bytes
        ),
    ):
        with pytest.raises(openai.NotFoundError, match="this checkpoint was pruned") as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="this checkpoint was pruned") as refused:
        client.fine_tuning.jobs.create(model=pruned, training_file=training_file)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert client.models.retrieve(there).id == there

    run.put("adapters/step-5-a1/adapter_config.json", b"{}")
    assert client.models.retrieve(pruned).id == pruned
    assert client.fine_tuning.jobs.create(model=pruned, training_file=training_file).model == pruned


def test_what_is_the_operators_cannot_be_deleted(client: openai.OpenAI) -> None:
    for name in ("tiny", "gpt-4o-mini-2024-07-18", "meta-llama/Llama-3.2-1B"):
        with pytest.raises(openai.PermissionDeniedError, match=name) as caught:
            client.models.delete(name)
        assert caught.value.param == "model"
    for name in ("none", "ft:tiny:local::none"):
        with pytest.raises(openai.NotFoundError):
            client.models.delete(name)


def test_a_project_may_let_another_use_a_model(
    client: openai.OpenAI, other: openai.OpenAI, tuned: str
) -> None:
    name = f"{tuned}:ckpt-step-5"
    permissions = client.fine_tuning.checkpoints.permissions
    with pytest.raises(openai.NotFoundError):
        other.models.retrieve(name)

    created = permissions.create(name, project_ids=["other", "default"]).data

    assert [(item.object, item.project_id) for item in created] == [
        ("checkpoint.permission", "other"),
        ("checkpoint.permission", "default"),
    ]
    assert permissions.create(name, project_ids=["other"]).data == created[:1]
    assert [item.id for item in permissions.list(name, limit=1)] == [created[1].id, created[0].id]
    assert [item.id for item in permissions.list(name, limit=1, order="ascending")] == [
        item.id for item in created
    ]
    assert [item.id for item in permissions.list(name, project_id="other")] == [created[0].id]
    assert list(permissions.list(tuned)) == []
    assert other.models.retrieve(name).owned_by == "local"
    assert (ids(other), ids(client)) == ([name], [tuned, name])
    for ask in (lambda: other.models.retrieve(tuned), lambda: other.models.delete(name)):
        with pytest.raises(openai.NotFoundError):
            ask()
    for ask in (
        lambda: permissions_of(other).list(name),
        lambda: permissions_of(other).create(name, project_ids=["other"]),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()

    deleted = permissions.delete(created[0].id, fine_tuned_model_checkpoint=name)

    assert (deleted.id, deleted.object, deleted.deleted) == (
        created[0].id,
        "checkpoint.permission",
        True,
    )
    with pytest.raises(openai.NotFoundError):
        other.models.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        permissions.delete(created[0].id, fine_tuned_model_checkpoint=name)


def test_a_model_that_its_owner_deletes_is_gone_for_all(
    client: openai.OpenAI, other: openai.OpenAI, tuned: str
) -> None:
    client.fine_tuning.checkpoints.permissions.create(tuned, project_ids=["other"])
    assert ids(other) == [tuned]
    client.models.delete(tuned)
    assert ids(other) == []


def test_permissions_are_for_admins(service: Service, client: openai.OpenAI, tuned: str) -> None:
    user = permissions_of(
        service.client(
            service.store.keys.create_key(NewKey(project_id="default", name="k", scope="user"))[1]
        )
    )
    for ask in (
        lambda: user.create(tuned, project_ids=["default"]),
        lambda: user.list(tuned),
        lambda: user.delete("cp_x", fine_tuned_model_checkpoint=tuned),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="admin") as caught:
            ask()
        assert caught.value.code == "insufficient_permissions"


def test_a_grant_is_whole_or_not_at_all(
    service: Service, client: openai.OpenAI, tuned: str
) -> None:
    permissions = permissions_of(client)
    with pytest.raises(openai.BadRequestError, match="'none'") as caught:
        permissions.create(tuned, project_ids=["default", "none"])
    assert caught.value.param == "project_ids.1"
    for bad in ([], [1], "default", None):
        path = f"/v1/fine_tuning/checkpoints/{tuned}/permissions"
        answer = service.http("POST", path, json={"project_ids": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("project_ids")
    assert list(permissions.list(tuned)) == []


def permissions_of(client: openai.OpenAI) -> Permissions:
    return client.fine_tuning.checkpoints.permissions
