"""Deleted jobs and projects are hidden at once, and their rows go in small transactions, on both
databases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.states import Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.spec import StoredSpec, TunedName
from ft_service.store import erasure
from ft_service.store.records import (
    JobChange,
    NewEvent,
    NewKey,
    NewSweep,
    UploadPart,
    WebhookEndpoint,
)
from ft_service.store.sql import Store
from ft_service.store.tables import (
    checkpoints,
    deleted_models,
    events,
    integrations,
    job_metadata,
    jobs,
    metadata,
    permissions,
    projects,
    slots,
    usage,
)
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.store.uploads import Upload
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, claim, new_chat, new_checkpoint, new_file, new_job

DAY = 86_400.0


def count(store: Store, table: Any, *where: Any) -> int:
    with store.reading() as connection:
        return connection.scalars(select(func.count()).select_from(table).where(*where)).one()


def ended_job(
    store: Store,
    number: int = 0,
    *,
    days: float = 0.0,
    state: State = State.SUCCEEDED,
    **values: Any,
) -> Job:
    """A job that ended some days ago, with two checkpoints, five events and a file of metrics."""
    job_id = f"ftjob-{number:03}"
    name = TunedName("some-base", "acme", "", f"{number:03}")
    document = {"seed": 1, "model": {"name": "some-base"}, "tuned_name": str(name)}
    job = create_job(store, new_job(id=job_id, stored_spec=StoredSpec(document), **values))
    held = claim(store)
    assert held.job.id == job_id
    metrics = new_file(id=f"file-{job_id}", project_id=job.project_id, purpose="fine-tune-results")
    change = JobChange(
        job=replace(
            job,
            state=state,
            finished_at=store.now() - days * DAY,
            result_file=metrics.id,
            attempt=1,
        ),
        events=[
            NewEvent(level="info", message=f"step {step}", source=(0, step)) for step in range(4)
        ],
        checkpoints=[new_checkpoint(job, step) for step in (5, 10)],
        files=[metrics],
    )
    assert store.leases.apply(held, change)
    return store.jobs.get_job(job.project_id, job_id)


def erase(store: Store) -> list[str]:
    """The ids of the jobs that are erased."""
    found = store.erasure.deleted_jobs(0, 100)
    for job in found:
        while store.erasure.erase_job(job):
            pass
    return [job.id for job in found]


def permitted(store: Store) -> set[str]:
    """Names of the models that some may use."""
    with store.reading() as connection:
        return set(connection.scalars(select(permissions.c.model)))


def test_a_deleted_job_is_not_there_and_then_its_rows_are_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "AT_ONCE", 3)
    wandb = {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}], "metadata": {"a": "b"}}
    gone = ended_job(store, 1, request=wandb)
    kept = ended_job(store, 2)
    name = gone.tuned_name
    others = kept.tuned_name
    for model in (name, name.at(5), others, others.at(5)):
        store.models.grant(PROJECT, str(model), [PROJECT])
    store.models.delete_model(PROJECT, str(name.at(10)))
    before = {
        table: count(store, table)
        for table in (jobs, events, checkpoints, job_metadata, integrations)
    }
    assert store.erasure.delete_job(PROJECT, gone.id) == [
        str(name),
        str(name.at(5)),
        str(name.at(10)),
    ]
    assert {table: count(store, table) for table in before} == before, "only a mark"
    for again in (
        lambda: store.jobs.get_job(PROJECT, gone.id),
        lambda: store.jobs.list_events(PROJECT, gone.id),
        lambda: store.jobs.request(PROJECT, gone.id, Verb.CANCEL),
        lambda: store.erasure.delete_job(PROJECT, gone.id),
        lambda: store.files.get_file(PROJECT, f"file-{gone.id}"),
    ):
        with pytest.raises(NotFoundError):
            again()
    assert [job.id for job in store.jobs.list_jobs(PROJECT).data] == [kept.id]
    assert (store.jobs.job_of_organization("acme", gone.id), store.jobs.jobs_by_id([gone.id])) == (
        None,
        [],
    )
    assert store.models.succeeded_jobs() == [(PROJECT, kept.id)]
    assert store.integrations.claim_integrations("me", lease_seconds=9) == []
    assert store.jobs.known_jobs([gone.id, "ftjob-none"]) == {gone.id}, (
        "no leftover until it is erased"
    )
    assert [(entry.type, entry.target) for entry in store.audit.list_audit(limit=1).data] == [
        ("job.deleted", gone.id)
    ]

    assert erase(store) == [gone.id]
    assert {table: count(store, table) for table in before} == {
        jobs: 1,
        events: 5,
        checkpoints: 2,
        job_metadata: 1,
        integrations: 0,
    }
    assert {str(others), str(others.at(5))} == permitted(store)
    assert (store.jobs.known_jobs([gone.id]), erase(store)) == (set(), [])
    assert store.models.all_deleted_models() == {str(name)}, (
        "which inference servers may have loaded"
    )
    store.erasure.forget_models(60.0)
    assert count(store, deleted_models) == 1
    store.erasure.forget_models(-1.0)
    assert count(store, deleted_models) == 0


def test_a_job_that_is_not_over_is_refused(store: Store) -> None:
    ended = ended_job_of_sweep(store, "sweep_1")
    for values in (
        {"state": State.QUEUED},
        {"state": State.PAUSED},
        {"state": State.CANCELLED, "phase": Phase.STOPPING},
    ):
        job = create_job(store, new_job(**values))
        with pytest.raises(SpecError) as refused:
            store.erasure.delete_job(PROJECT, job.id)
        assert (refused.value.code, refused.value.param) == ("invalid_state", "job_id")
        assert store.jobs.get_job(PROJECT, job.id).state is job.state
    with pytest.raises(SpecError, match="sweep_1"):
        store.erasure.delete_job(PROJECT, ended.id)
    with pytest.raises(NotFoundError):
        store.erasure.delete_job(OTHER, ended.id)
    assert store.erasure.hide_jobs_of(PROJECT) == 0
    assert store.sweeps.finish_sweep(store.sweeps.get_sweep(PROJECT, "sweep_1"), ended, "Best.")
    store.erasure.delete_job(PROJECT, ended.id)
    assert store.sweeps.get_sweep(PROJECT, "sweep_1").best_job is None
    assert store.sweeps.jobs_of_sweeps(["sweep_1"]) == {"sweep_1": []}


def ended_job_of_sweep(store: Store, sweep_id: str) -> Job:
    store.sweeps.create_sweep(
        NewSweep(id=sweep_id, project_id=PROJECT, request={}, settings={}), []
    )
    return ended_job(store, 7, sweep_id=sweep_id)


def test_a_job_that_has_started_an_engine_is_erased_once_that_is_gone(store: Store) -> None:
    job = ended_job(store)
    row = {
        "host": "h1",
        "slot": 0,
        "project_id": PROJECT,
        "job_id": job.id,
        "attempt": 1,
        "taken_at": 0.0,
    }
    with store.writing() as connection:
        connection.execute(insert(slots).values(**row, engine_id="engine-1"))
    store.erasure.delete_job(PROJECT, job.id)
    assert erase(store) == []
    with store.writing() as connection:
        connection.execute(slots.delete())
    assert erase(store) == [job.id]


def test_jobs_and_events_go_by_age_in_small_transactions(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "AT_ONCE", 2)
    for number, days in enumerate((40, 40, 40, 9, 1)):
        ended_job(store, number, days=days)
    create_job(store, new_job(id="ftjob-waits", state=State.PAUSED))
    removed = []
    while store.erasure.trim_events(7 * DAY):
        removed.append(25 + 1 - count(store, events) - sum(removed))
    assert (sum(removed), max(removed)) == (20, 2)
    assert not store.erasure.trim_events(7 * DAY), "none is looked at twice"
    left = [len(store.jobs.list_events(PROJECT, f"ftjob-{number:03}").data) for number in range(5)]
    assert left == [0, 0, 0, 0, 5]
    assert [store.erasure.hide_old_jobs(30 * DAY) for _ in range(3)] == [2, 1, 0]
    assert sorted(erase(store)) == ["ftjob-000", "ftjob-001", "ftjob-002"]
    assert [job.id for job in store.jobs.list_jobs(PROJECT).data] == [
        "ftjob-waits",
        "ftjob-004",
        "ftjob-003",
    ]


def full_project(store: Store) -> None:
    """Something of every kind."""
    ended_job(store)
    create_job(store, new_job(id="ftjob-paused", state=State.PAUSED))
    store.sweeps.create_sweep(
        NewSweep(id="sweep_1", project_id=PROJECT, request={}, settings={}), []
    )
    store.files.add_file(new_file(id="file-1"))
    store.uploads.add_upload(
        Upload(
            id="upload_1", project_id=PROJECT, filename="f", purpose="p", bytes=9, file_seconds=None
        ),
        seconds=9,
        at_most=9,
    )
    store.uploads.add_part(
        UploadPart(id="part_1", project_id=PROJECT, upload_id="upload_1", bytes=1, sha256="0"),
        slack=9,
        at_most=9,
    )
    key, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="k", scope="admin"))
    holder = store.keys.authenticate(secret)
    assert holder is not None
    store.sessions.new_link(holder)
    url = "https://example.com"
    store.webhooks.add_webhook(
        WebhookEndpoint(
            id="we_1",
            project_id=PROJECT,
            name="w",
            url=url,
            event_types=["fine_tuning.job.cancelled"],
        )
    )
    store.models.grant(PROJECT, "ft:a:acme::1", [PROJECT])
    store.tinker.create_session("session-1", PROJECT, None, None)
    store.tinker.put_sampler(
        TinkerSampler(id="s", project_id=PROJECT, session_id="session-1", base="b", model_path=None)
    )
    store.tinker.put_sample(TinkerSample(id="s#1", project_id=PROJECT, sampler_id="s", request={}))
    store.chats.add_chat(new_chat(pairs={"k": "v"}), seconds=60, room=1000)
    with store.writing() as connection:
        for key_id, day in ((key.id, 3), ("key_2", 3), ("key_2", 4)):
            row = {
                "project_id": PROJECT,
                "key_id": key_id,
                "day": day,
                "slot_seconds": 1.5,
                "tokens": 2,
                "bytes": 3,
                "jobs": 4,
            }
            connection.execute(insert(usage).values(row))


def erase_all(store: Store) -> None:
    """What housekeeping does, without files."""
    for project_id in store.erasure.projects_to_erase():
        for job_id in store.erasure.unfinished_jobs_of(project_id):
            store.jobs.request(project_id, job_id, Verb.CANCEL)
        while store.erasure.hide_jobs_of(project_id):
            pass
        while store.erasure.erase_project(project_id):
            store.files.mark_freed(store.files.freeable_files())
        left = rows_of(store, project_id)
        assert not store.erasure.erase_project(project_id)
        assert rows_of(store, project_id) == left, "it ends only when nothing can go now"
    erase(store)


def rows_of(store: Store, project_id: str) -> dict[str, int]:
    return {
        table.name: number
        for table in metadata.sorted_tables
        if "project_id" in table.c
        and (number := count(store, table, table.c.project_id == project_id))
    }


def test_of_a_deleted_project_nothing_stays_but_its_use_and_who_deleted_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "AT_ONCE", 1)
    full_project(store)
    other = store.files.add_file(new_file(project_id=OTHER))
    store.erasure.delete_project(PROJECT)
    for again in (
        lambda: store.erasure.delete_project(PROJECT),
        lambda: store.projects.get_project(PROJECT),
        lambda: store.projects.archive_project(PROJECT),
        lambda: store.keys.create_key(NewKey(project_id=PROJECT, name="k", scope="admin")),
        lambda: store.files.add_file(new_file(id="file-late")),
        lambda: create_job(store, new_job(id="ftjob-late")),
    ):
        with pytest.raises(NotFoundError):
            again()
    assert [one.id for one in store.projects.list_projects(archived=True).data] == [OTHER]
    assert [one.id for one in store.projects.list_projects(archived=True, deleted=True).data] == [
        PROJECT,
        OTHER,
    ]
    for _ in range(3):
        erase_all(store)
    assert store.erasure.projects_to_erase() == [PROJECT], "what was asked before may still come"
    with store.writing() as connection:
        late = update(projects).where(projects.c.id == PROJECT)
        connection.execute(late.values(deleted_at=projects.c.deleted_at - erasure.SETTLE_SECONDS))
    erase_all(store)
    assert store.erasure.projects_to_erase() == []
    assert rows_of(store, PROJECT) == {"usage": 3, "audit": 1, "deleted_models": 1}
    with store.reading() as connection:
        days = connection.execute(
            select(usage).where(usage.c.project_id == PROJECT).order_by(usage.c.day)
        ).all()
    assert [tuple(day)[1:] for day in days[:2]] == [
        ("", 3, 3.0, 4, 6, 8, 0, None, 0.0, 0.0),
        ("", 4, 1.5, 2, 3, 4, 0, None, 0.0, 0.0),
    ]
    assert [entry.type for entry in store.audit.list_audit(project_id=PROJECT).data] == [
        "project.deleted"
    ]
    assert store.files.get_file(OTHER, other.id) == other
    store.erasure.forget_models(-1.0)
    assert count(store, deleted_models) == 0


def test_the_managing_project_is_not_deleted(store: Store) -> None:
    store.projects.ensure_project("default", "acme")
    with pytest.raises(SpecError) as refused:
        store.erasure.delete_project("default")
    assert refused.value.param == "project_id"
    assert store.projects.get_project("default").deleted_at is None
