"""Rows and records: what is written of a job when, and lists as pages."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from sqlalchemy import select

from ft_service.errors import SpecError
from ft_service.jobs.queue_snapshot import JobSize
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Halt, Job, Phase, State
from ft_service.rundir.documents import Desired
from ft_service.rundir.engine import SeatSize
from ft_service.spec import StoredSpec
from ft_service.store.records import NewEvent
from ft_service.store.rows import (
    JOB,
    Listing,
    changed_job_row,
    cursor,
    event_row,
    insert_events,
    new_job_row,
    page,
    to_job,
)
from ft_service.store.sql import Store
from ft_service.store.tables import jobs
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, new_job

SEAT = SeatSize(held=1, batch=2, batch_tokens=3, room=None, gain=1.5)


def full_job(**values: Any) -> Job:
    given: dict[str, Any] = {
        "state": State.RUNNING,
        "phase": Phase.TRAINING,
        "halt": Halt.SWEEP,
        "desired": Desired.PAUSE,
        "reason": Reason.COST_LIMIT,
        "shapes": (JobSize(2, 4), JobSize(1, 4)),
        "seat": SEAT,
    }
    return new_job(**given | values)


@pytest.mark.parametrize("changes", [{}, {"state": State.QUEUED, "phase": None, "seat": None}])
def test_a_job_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    job = full_job(halt=None, reason=None, shapes=(), **changes) if changes else full_job()
    row = new_job_row(job)
    assert "created_at" not in row
    assert row["base"] == "some-base"
    row = {column.name: row.get(column.name) for column in JOB} | {"created_at": job.created_at}
    assert to_job(row) == job
    assert all(not hasattr(row[name], "value") for name in ("state", "phase", "desired", "halt"))


def test_a_reason_that_a_later_version_has_added_hides_no_job() -> None:
    row = {column.name: new_job_row(full_job()).get(column.name) for column in JOB}
    assert to_job({**row, "created_at": 0.0, "reason": "of a later version"}).reason is None


def test_a_change_writes_what_may_change_and_raises_the_version() -> None:
    old = full_job(version=6)
    row = changed_job_row(old, replace(old, failures=2, cost=99, held_seconds=9.0, name="x"))
    assert (row["version"], row["failures"], row["seat"]) == (7, 2, vars(SEAT))
    assert row["shapes"] == [[2, 4], [1, 4]]
    assert (row["state"], row["halt"], row["reason"]) == ("running", "sweep", "cost_limit")
    never = {"id", "project_id", "created_at", "request", "spec", "stored_spec", "queued_at"}
    never |= {"cost", "held_seconds", "slot_seconds", "taken_at", "name", "note", "key_id"}
    never |= {"max_seconds", "sweep_id", "sweep_values"}
    assert never.isdisjoint(row)
    names = {"spec" if field.name == "stored_spec" else field.name for field in fields(Job)}
    assert set(row) == names - never
    chosen = replace(old, stored_spec=StoredSpec({"seed": 2}), shapes=())
    assert changed_job_row(old, chosen)["spec"] == {"seed": 2}
    assert changed_job_row(old, chosen)["shapes"] is None


@pytest.mark.parametrize(
    ("before", "after", "enters"),
    [
        (State.RUNNING, State.QUEUED, True),
        (State.QUEUED, State.QUEUED, False),
        (State.QUEUED, State.RUNNING, False),
    ],
)
def test_a_job_that_enters_the_queue_is_stamped(before: State, after: State, enters: bool) -> None:
    old = full_job(state=before)
    assert ("queued_at" in changed_job_row(old, replace(old, state=after))) is enters


def test_an_event_of_an_attempt_names_it_and_one_of_the_service_does_not() -> None:
    job = new_job(attempt=3)
    read = event_row(NewEvent(level="warn", message="m", source=(2, 7), created_at=5.0), job, 9.0)
    assert (read["attempt"], read["segment"], read["line"]) == (3, 2, 7)
    assert (read["created_at"], read["level"], read["message"]) == (5.0, "warn", "m")
    assert (read["project_id"], read["job_id"], read["metrics"]) == (PROJECT, job.id, None)
    own = event_row(NewEvent(level="info", message="m"), job, 9.0)
    assert (own["attempt"], own["segment"], own["line"]) == (None, None, None)
    assert own["created_at"] == 9.0
    assert (
        event_row(NewEvent(level="info", message="m", created_at=0.0), job, 9.0)["created_at"]
        == 0.0
    )


def test_events_of_the_service_are_stored_in_their_order(store: Store) -> None:
    job = create_job(store, new_job())
    before = len(store.jobs.list_events(PROJECT, job.id).data)
    with store.writing() as connection:
        insert_events(
            connection, job, [NewEvent(level="info", message=text) for text in ("a", "b")]
        )
    told = store.jobs.list_events(PROJECT, job.id).data
    assert sorted(event.message for event in told[: len(told) - before]) == ["a", "b"]
    assert all(event.created_at > 1e9 for event in told)


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_list_has_its_order_and_pages_that_say_whether_there_are_more(
    store: Store, newest_first: bool
) -> None:
    for name in ("a", "b", "c"):
        create_job(store, new_job(id=name))
    create_job(store, new_job(id="theirs", project_id=OTHER))
    mine = jobs.c.project_id == PROJECT
    listing = Listing(jobs.c.position, jobs.c.id, [mine], newest_first)

    def found(limit: int, after: str | None = None) -> tuple[list[str], bool]:
        with store.reading() as connection:
            query = listing.apply(connection, select(jobs.c.id).where(mine), after)
            one = page(connection, query, limit, lambda row: row["id"])
        return one.data, one.has_more

    names = ["c", "b", "a"] if newest_first else ["a", "b", "c"]
    assert found(2) == (names[:2], True)
    assert found(3) == (names, False)
    assert found(1, names[0]) == (names[1:2], True)
    assert found(9, names[1]) == (names[2:], False)
    for after in ("theirs", "gone"):
        with pytest.raises(SpecError) as refused:
            found(1, after)
        assert refused.value.param == "after"
    with store.reading() as connection:
        first = cursor(connection, jobs.c.position, jobs.c.id == "a", after="a")
        assert cursor(connection, jobs.c.position, jobs.c.id == "b", after="b") == first + 1
