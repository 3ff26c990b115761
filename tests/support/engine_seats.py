"""Seats of jobs in engines of a store, taken and left as a reconciler does, and time that passes."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import text

from ft_service.jobs.decisions import placed
from ft_service.jobs.states import Job, State
from ft_service.store.records import Claim, JobChange, NewEngine
from ft_service.store.sql import Store
from tests.support.creating import create_job
from tests.support.records import PROJECT, new_job


def sql(store: Store, statement: str, **values: object) -> None:
    with store.writing() as connection:
        connection.execute(text(statement), values)


def queued(store: Store, **values: object) -> Job:
    return create_job(
        store, new_job(**{"state": State.QUEUED, "slots": 2, "share_key": "key", **values})
    )


def claim(store: Store, job: Job) -> Claim:
    claimed = store.leases.claim_queued(
        job.id, host="h1", owner="t", lease_seconds=60, host_slots=8
    )
    assert claimed is not None
    return claimed


def found(
    store: Store,
    job: Job,
    engine_id: str = "engine-1",
    most_seats: int = 2,
    slots: tuple[int, ...] = (0, 1),
    room: int | None = None,
) -> Job:
    """The job in the first seat of a new engine."""
    claimed = claim(store, job)
    new = NewEngine(most_seats, room)
    change = JobChange(
        job=placed(claimed.job, "h1", engine_id=engine_id), take_slots=slots, new_engine=new
    )
    assert store.leases.apply(claimed, change)
    return store.jobs.get_job(PROJECT, job.id)


def join(store: Store, job: Job, engine_id: str = "engine-1") -> bool:
    claimed = claim(store, job)
    return store.leases.apply(
        claimed, JobChange(job=placed(claimed.job, "h1", engine_id=engine_id), take_seat=True)
    )


def leave(store: Store, job: Job) -> Job:
    sql(store, "UPDATE jobs SET looked_at = 0 WHERE id = :id", id=job.id)
    while True:
        claimed = store.leases.claim(host="h1", owner="t", lease_seconds=60, idle_seconds=0.0)
        assert claimed is not None
        if claimed.job.id == job.id:
            break
    change = JobChange(job=replace(claimed.job, state=State.PAUSED, phase=None), release_slots=True)
    assert store.leases.apply(claimed, change)
    sql(store, "UPDATE jobs SET lease_expires_at = 0, lease_token = NULL")
    return store.jobs.get_job(PROJECT, job.id)


def pass_by(store: Store, seconds: float) -> None:
    """Have so many seconds pass for what runs."""
    sql(
        store,
        "UPDATE engines SET divided_at = divided_at - :s, created_at = created_at - :s",
        s=seconds,
    )
    sql(store, "UPDATE slots SET taken_at = taken_at - :s", s=seconds)
    sql(store, "UPDATE jobs SET taken_at = taken_at - :s WHERE taken_at IS NOT NULL", s=seconds)
