"""Records to store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from ft_service.ids import new_id
from ft_service.jobs.decisions import placed
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue import next_start
from ft_service.jobs.queue_snapshot import Host
from ft_service.jobs.states import Job, State
from ft_service.spec import StoredSpec
from ft_service.store.chats import StoredChat
from ft_service.store.records import Checkpoint, Claim, File, JobChange
from ft_service.store.sql import Store
from ft_service.store.tables import projects

PROJECT = "proj_default"
OTHER = "proj_other"


def new_job(**values: Any) -> Job:
    defaults: dict[str, Any] = {
        "id": new_id("ftjob-"),
        "project_id": PROJECT,
        "created_at": 0.0,
        "request": {"model": "tiny", "training_file": "file-a"},
        "stored_spec": StoredSpec({"seed": 1, "model": {"name": "some-base"}}),
        "state": State.VALIDATING,
    }
    return Job(**defaults | values)


def new_chat(**values: Any) -> StoredChat:
    """A chat that was kept: `store.chats.add_chat` stores it."""
    given: dict[str, Any] = {
        "id": new_id("chatcmpl-"),
        "project_id": PROJECT,
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "tools": None,
        "answer": {"choices": [{"index": 0}]},
        "pairs": None,
        "bytes": 100,
    }
    return StoredChat(**{**given, **values})


def new_response(**values: Any) -> StoredChat:
    """A response that was kept."""
    response_id = new_id("resp_")
    message = {"type": "message", "id": "msg_1", "role": "user", "content": []}
    answer = {"id": response_id, "status": "completed", "model": "m", "output": []}
    given = {"id": response_id, "messages": [message], "answer": answer, "kind": "response"}
    return new_chat(**{**given, **values})


def new_file(**values: Any) -> File:
    defaults: dict[str, Any] = {
        "id": new_id("file-"),
        "project_id": PROJECT,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "bytes": 3_000_000_000,
        "sha256": "0" * 64,
        "created_at": 0.0,
    }
    return File(**defaults | values)


def new_checkpoint(job: Job, step: int, attempt: int = 1, **values: Any) -> Checkpoint:
    defaults: dict[str, Any] = {
        "id": new_id("ftckpt_"),
        "project_id": job.project_id,
        "job_id": job.id,
        "name": f"step-{step}-a{attempt}",
        "step": step,
        "attempt": attempt,
        "created_at": 5.0,
        "metrics": None,
    }
    return Checkpoint(**defaults | values)


def claim(store: Store, *, host: str = "h1", lease_seconds: float = 60.0) -> Claim:
    claim = store.leases.claim(
        host=host, owner="test", lease_seconds=lease_seconds, idle_seconds=0.0
    )
    assert claim is not None, "no job to claim"
    return claim


def claim_next(
    store: Store, *, host: str = "h1", lease_seconds: float = 60.0, host_slots: int = 8
) -> Claim | None:
    """What a host's reconciler would claim to start."""
    start = next_start(store.queue.snapshot_for(host, Host(slots=host_slots), Paces()))
    if start is None:
        return None
    return store.leases.claim_queued(
        start.job.id, host=host, owner="test", lease_seconds=lease_seconds, host_slots=host_slots
    )


def place(store: Store, job: Job, slots: list[int], host: str = "h1") -> Job:
    """A queued job, running its first attempt on a host."""
    claimed = claim_next(store, host=host)
    assert claimed is not None
    assert claimed.job.id == job.id
    assert store.leases.apply(claimed, JobChange(job=placed(claimed.job, host), take_slots=slots))
    return store.jobs.get_job(job.project_id, job.id)


def move_project(store: Store, project_id: str, organization: str) -> None:
    """Give one project to another organization, which no command and no route does."""
    with store.writing() as connection:
        connection.execute(
            update(projects).where(projects.c.id == project_id).values(organization=organization)
        )
