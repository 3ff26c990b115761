"""Every route of the OpenAPI document, and a tenant that has something for each of its parameters:
a route that is added is tried by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ft_service.evals.item_results import ItemOutcome
from ft_service.ids import new_id
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.evals import Eval, EvalRun
from ft_service.store.records import NewKey
from ft_service.store.tenants.people import SignOn
from tests.support.records import new_chat, new_response
from tests.support.rest.service import TRAINING, Service, put, run_dir

MAKES = {
    "/v1/fine_tuning/jobs/{job_id}/checkpoints/{checkpoint_id}/adapter",
    "/v1/fine_tuning/checkpoints/{checkpoint}/adapter",
}
"""Routes whose GET makes something."""

OPEN = {"/livez", "/readyz", "/metrics"}
"""Routes that need no key, or another one."""
MARKS = ("secret-name", "secret.example")
"""In the names of what a tenant has."""


def operations(service: Service, *, keyed: bool = False) -> Iterator[tuple[str, str]]:
    """Method and path of each. `keyed`: of those that need a key."""
    for path, methods in service.http("GET", "/openapi.json").json()["paths"].items():
        for method, described in methods.items() if path not in OPEN else ():
            if described.get("security") or not keyed:
                yield method.upper(), path


def filled(path: str, values: dict[str, str]) -> str:
    """The path with these values. Fails for a parameter that `tenant` lacks: give it one."""
    return re.sub(r"{(\w+)}", lambda match: values[match[1]], path)


def tenant(
    service: Service, project_id: str, key: str, url: str = "http://secret.example"
) -> dict[str, str]:
    """Values of path parameters: everything that a project has.

    `key`: an admin's of it; `url`: its webhooks' receiver.
    """
    client = service.client(key)
    file_id = client.files.create(file=("train.jsonl", TRAINING), purpose="fine-tune").id
    job_id = client.fine_tuning.jobs.create(
        model="tiny", training_file=file_id, suffix="secret-name"
    ).id
    job = put(
        service,
        job_id,
        checkpoints=(5,),
        state=State.SUCCEEDED,
        reason=Reason.SUCCEEDED,
        attempt=1,
        finished_at=1e9,
    )
    run_dir(service, job_id).put("adapter/adapter_config.json", b"{}")
    run_dir(service, job_id).put("attempts/1/logs/supervisor.log", b"secret-name\n")
    client.files.create(file=("secret-name.jsonl", TRAINING), purpose="fine-tune")
    upload = client.uploads.create(
        bytes=9, filename="secret-name.jsonl", mime_type="text/plain", purpose="fine-tune"
    )
    third = f"third-{project_id}"
    service.store.projects.ensure_project(
        third, service.store.projects.get_project(project_id).organization
    )
    granted = client.fine_tuning.checkpoints.permissions.create(
        job.spec.tuned_name, project_ids=[third]
    ).data[0]
    service.use(service.settings.model_copy(update={"webhook_allow_private": True}))
    endpoint = client.webhooks.create(
        name="secret-name", url=url, event_types=["fine_tuning.job.failed"]
    )
    api_key, _ = service.store.keys.create_key(
        NewKey(project_id=project_id, name="secret-name", scope="submit")
    )
    tried = {"suffix": "secret-name", "sweep": {"lora.r": [4, 8]}}
    body = {"model": "tiny", "training_file": file_id, "validation_file": file_id, **tried}
    sweep = service.http("POST", "/v1/fine_tuning/sweeps", key=key, json=body).json()
    chat = new_chat(project_id=project_id, model="secret-name", pairs={"k": "secret-name"})
    service.store.chats.add_chat(chat, seconds=3600, room=1000)
    response = new_response(project_id=project_id, model="secret-name")
    service.store.chats.add_chat(response, seconds=3600, room=1000)
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job_id).data
    return {
        "user_id": a_person(service, project_id),
        "job_id": job_id,
        "sweep_id": sweep["id"],
        "chat_id": chat.id,
        "response_id": response.id,
        "file_id": file_id,
        "upload_id": upload.id,
        "model": job.spec.tuned_name,
        "fine_tuned_model_checkpoint": job.spec.tuned_name,
        "checkpoint": f"{job.spec.tuned_name}:ckpt-step-5",
        "checkpoint_id": checkpoint.id,
        "permission_id": granted.id,
        "webhook_endpoint_id": endpoint.id,
        "project_id": project_id,
        "api_key_id": api_key.id,
        "key_id": api_key.id,
        "format": "vllm",
        "pull_id": "pull-none",
        "rollout_id": "rollout_none",
        **an_eval(service, project_id),
    }


def a_person(service: Service, project_id: str) -> str:
    """Id of someone who has signed in to a project."""
    identity = f"https://login.example {project_id}"
    known = SignOn(
        identity=identity, name="secret-name", grants={project_id: "read"}, state=new_id("state_")
    )
    service.store.people.sign_in(known, 3600)
    [person] = service.store.people.list_people(project_id=project_id)
    return person.id


def an_eval(service: Service, project_id: str) -> dict[str, str]:
    """Ids of an eval with a run, and of what came of an item."""
    evals = service.store.evals
    schema: dict[str, Any] = {"type": "object"}
    config = {"type": "custom", "item_schema": schema, "include_sample_schema": True}
    own = evals.create_eval(
        Eval(
            id=new_id("eval_"),
            project_id=project_id,
            data_source_config=config,
            testing_criteria=[{"name": "secret-name"}],
            name="secret-name",
        )
    )
    source = {"type": "file_content", "content": [{"item": {"text": "secret-name"}}]}
    run = evals.create_run(
        EvalRun(
            id=new_id("evalrun_"),
            project_id=project_id,
            eval_id=own.id,
            key_id="",
            data_source={"type": "jsonl", "source": source},
            name="secret-name",
        )
    )
    claimed = evals.claim_run("test", [])
    assert claimed == replace(run, status="in_progress")
    assert evals.add_items(run, "test", [ItemOutcome(0, {"text": "secret-name"}, {})])
    assert evals.end_run(run.id, "test", "completed")
    [item] = evals.list_items(run.id, status=None, after=None, limit=2, order="asc").data
    return {"eval_id": own.id, "run_id": run.id, "output_item_id": item.id}


def needed(path: str) -> dict[str, str]:
    """The query without which a path answers nothing: what there is to learn of a file depends on
    the base.
    """
    of_a_base = path.startswith("/v1/files/") and path.endswith(("/samples", "/statistics"))
    return {"model": "tiny"} if of_a_base else {}


def ask(service: Service, method: str, path: str, key: str) -> Any:
    sent: dict[str, Any] = {"json": {}} if method == "POST" else {"params": needed(path)}
    return service.http(method, path, key=key, **sent)
