from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import event, text

from ft_service.jobs.decisions import placed
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue import next_start
from ft_service.jobs.queue_snapshot import HALF_LIFE_SECONDS, Host, RunningJob, Share
from ft_service.jobs.states import State
from ft_service.store import queue
from ft_service.store.leases import HOST_SECONDS
from ft_service.store.queue import OF_EACH_PROJECT
from ft_service.store.records import JobChange
from ft_service.store.tables import jobs
from tests.support.creating import create_job
from tests.support.engine_seats import found, queued
from tests.support.records import OTHER, PROJECT, claim, claim_next, new_job, place

H1 = Host(slots=8)


def sql(store, statement: str, **values) -> None:
    with store.writing() as connection:
        connection.execute(text(statement), values)


def test_what_a_job_held_is_added_to_it_and_to_its_project_as_its_slots_are_freed(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED, slots=3)), [0, 1, 2])
    assert job.taken_at is not None
    sql(store, "UPDATE slots SET taken_at = taken_at - 100")
    [job] = store.queue.snapshot_for("h1", H1, Paces()).running
    assert (job.slots, job.project) == (3, PROJECT)
    before = store.queue.snapshot_for("h1", H1, Paces()).shares[PROJECT].used
    assert 299 < before < 400
    claimed = claim(store)
    assert store.leases.apply(
        claimed,
        JobChange(job=replace(claimed.job, state=State.PAUSED, phase=None), release_slots=True),
    )
    after = store.jobs.get_job(PROJECT, job.id)
    assert (after.taken_at, after.ends_at) == (None, None)
    assert 100 <= after.held_seconds < 130
    assert after.slot_seconds == 3 * after.held_seconds
    shares = store.queue.snapshot_for("h1", H1, Paces()).shares
    assert shares[PROJECT].used == pytest.approx(after.slot_seconds, rel=1e-2)
    assert shares[OTHER].used == 0.0
    sql(store, "UPDATE projects SET used_at = used_at - :ago", ago=HALF_LIFE_SECONDS)
    assert store.queue.snapshot_for("h1", H1, Paces()).shares[PROJECT].used == pytest.approx(
        after.slot_seconds / 2, rel=1e-2
    )


def test_a_project_never_runs_more_ranks_than_it_may_whoever_places_them(store):
    """Two reconcilers have chosen at once: the second one's change is undone."""
    first, second = (create_job(store, new_job(state=State.QUEUED, slots=2)) for _ in range(2))
    claims = [
        store.leases.claim_queued(job.id, host=host, owner="t", lease_seconds=60, host_slots=8)
        for job, host in ((first, "h1"), (second, "h2"))
    ]
    sql(store, "UPDATE projects SET max_slots = 3")
    assert store.leases.apply(
        claims[0], JobChange(job=placed(claims[0].job, "h1"), take_slots=[0, 1])
    )
    assert not store.leases.apply(
        claims[1], JobChange(job=placed(claims[1].job, "h2"), take_slots=[0, 1])
    )
    assert store.jobs.get_job(PROJECT, second.id).state is State.QUEUED
    assert store.leases.held_slots(second.id) == []
    assert claim_next(store, host="h2") is None, "the queue passes it over"


def test_the_project_that_has_used_less_is_next(store):
    create_job(store, new_job(state=State.QUEUED))
    other = create_job(store, new_job(state=State.QUEUED, project_id=OTHER))
    sql(
        store,
        "UPDATE projects SET used = 900, used_at = :now WHERE id = :id",
        now=store.now(),
        id=PROJECT,
    )
    claimed = claim_next(store)
    assert claimed is not None
    assert claimed.job.id == other.id


def test_a_turn_reads_the_first_jobs_of_each_project_and_the_forecast_all(store):
    for number in range(OF_EACH_PROJECT + 5):
        create_job(store, new_job(id=f"ftjob-{number}", state=State.QUEUED))
    create_job(
        store,
        new_job(
            id="ftjob-o", state=State.QUEUED, project_id=OTHER, stored_spec=new_job().stored_spec
        ),
    )
    snapshot = store.queue.snapshot_for("h1", H1, Paces())
    assert len(snapshot.waiting) == OF_EACH_PROJECT + 1
    assert next_start(snapshot) is not None
    store.queue.announce_host("h1", 4)
    store.queue.announce_host("gone", 4)
    sql(
        store, "UPDATE hosts SET seen_at = seen_at - :ago WHERE host = 'gone'", ago=HOST_SECONDS + 1
    )
    whole = store.queue.snapshot(Paces())
    assert len(whole.waiting) == OF_EACH_PROJECT + 6
    assert whole.hosts == {"h1": Host(slots=4)}


def test_jobs_that_their_project_may_not_start_any_more_hide_none_behind_them(store):
    for _ in range(OF_EACH_PROJECT):
        create_job(store, new_job(state=State.QUEUED, slots=4))
    small = create_job(store, new_job(state=State.QUEUED, slots=2))
    store.projects.update_project(PROJECT, limits={"max_slots": 2})
    claimed = claim_next(store)
    assert claimed is not None
    assert claimed.job.id == small.id


def test_finished_jobs_tell_how_long_others_take(store):
    spec = replace(new_job().stored_spec, document={"model": {"name": "tiny"}})
    done = new_job(
        state=State.SUCCEEDED,
        stored_spec=spec,
        work=10.0,
        finished_at=1.0,
        held_seconds=2.0,
        slot_seconds=4.0,
        slots=2,
    )
    create_job(store, done)
    create_job(store, replace(done, id="ftjob-old", work=None))
    paces = Paces(store.queue.measured_jobs())
    create_job(store, new_job(state=State.QUEUED, stored_spec=spec, work=30.0, slots=1))
    [waiting] = store.queue.snapshot_for("h1", H1, paces).waiting
    assert waiting.seconds == 12.0


def test_jobs_that_train_tell_it_by_their_steps(store):
    spec = replace(new_job().stored_spec, document={"model": {"name": "tiny"}})
    job = place(
        store,
        create_job(store, new_job(state=State.QUEUED, stored_spec=spec, work=10.0, slots=2)),
        [0, 1],
    )
    assert store.queue.measured_jobs() == [], "its end is a guess"
    training = (
        "UPDATE jobs SET phase = 'training', left_seconds = 5, ends_at = taken_at + 8 "
        f"WHERE id = '{job.id}'"
    )
    sql(store, training)
    [measured] = store.queue.measured_jobs()
    assert (measured.held_seconds, measured.slot_seconds) == (
        pytest.approx(8.0),
        pytest.approx(16.0),
    )


@pytest.mark.slow
def test_a_turn_with_ten_thousand_queued_jobs_reads_few_of_them(store):
    """What is counted are rows, since a time says little on a busy machine; it is printed."""
    row = {
        column.name: None
        for column in jobs.columns
        if column.name not in ("position", "lease_expires_at", "looked_at")
    }
    made = create_job(store, new_job(state=State.QUEUED))
    with store.writing() as connection:
        row = dict(connection.execute(jobs.select().where(jobs.c.id == made.id)).mappings().one())
        del row["position"]
        connection.execute(jobs.insert(), [{**row, "id": f"ftjob-{n}"} for n in range(10_000)])
    began = time.perf_counter()
    snapshot = store.queue.snapshot_for("h1", H1, Paces())
    start = next_start(snapshot)
    print(f"{1000 * (time.perf_counter() - began):.1f} ms")
    assert start is not None
    assert len(snapshot.waiting) == OF_EACH_PROJECT


def statements_of(store, work) -> int:
    """How many statements the database is asked, without those that begin and end transactions."""
    asked = []

    def note(connection, cursor, statement, *_) -> None:
        asked.append(statement)

    event.listen(store._engine, "before_cursor_execute", note)
    work()
    event.remove(store._engine, "before_cursor_execute", note)
    return sum(not statement.startswith("BEGIN") for statement in asked)


def test_a_turn_makes_as_many_statements_with_sixty_waiting_projects_as_with_three(store):
    numbers = []
    for projects in (3, 60):
        for number in range(projects):
            store.projects.ensure_project(f"proj_{number}", "acme")
            for _ in range(2):
                create_job(store, new_job(state=State.QUEUED, project_id=f"proj_{number}"))
        numbers.append(statements_of(store, lambda: store.queue.snapshot_for("h1", H1, Paces())))
    assert numbers[0] == numbers[1]
    waiting = store.queue.snapshot_for("h1", H1, Paces()).waiting
    assert len(waiting) == 2 * 60 + 2 * 3
    assert len({job.id for job in waiting}) == len(waiting)


def test_a_host_is_silent_once_it_was_not_heard_of_for_so_long_or_from_before_the_clock_went_back(
    store,
):
    for host, ago in (
        ("now", 0.0),
        ("lately", HOST_SECONDS / 2),
        ("a little ahead", -HOST_SECONDS / 2),
        ("long ago", 2 * HOST_SECONDS),
        ("far ahead", -2 * HOST_SECONDS),
    ):
        store.queue.announce_host(host, 8)
        sql(
            store,
            "UPDATE hosts SET seen_at = seen_at - :ago WHERE host = :host",
            ago=ago,
            host=host,
        )
    assert store.queue.silent_hosts() == ["far ahead", "long ago"]
    assert list(store.queue.snapshot(Paces()).hosts) == ["a little ahead", "lately", "now"]


def test_company_is_looked_for_only_where_engines_may_begin_and_a_job_may_share_one(
    store, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        queue, "_with_company", lambda connection, waiting: asked.append(len(waiting)) or waiting
    )
    create_job(store, new_job(state=State.QUEUED))
    store.queue.snapshot_for("h1", H1, Paces(), new_engines=True)
    assert asked == [], "no job may share an engine"


def test_a_project_at_its_limit_is_within_it_and_one_above_is_not():
    """A limit may have been lowered since: its jobs that need no slots wait too."""
    running = [
        RunningJob(id=project, project=project, host="h1", slots=slots, taken_at=0.0, ends_at=None)
        for project, slots in (("at", 2), ("above", 3), ("without", 9))
    ]
    shares = {
        "at": Share(used=0.0, max_slots=2),
        "above": Share(used=0.0, max_slots=2),
        "without": Share(used=0.0),
    }
    assert queue._within_limits({*shares, "gone"}, running, shares) == ["at", "without"]


def test_an_engine_that_was_asked_to_end_stops_and_is_not_asked_again(store):
    found(store, queued(store))
    (running,) = store.queue.snapshot_for("h1", H1, Paces()).running
    assert (running.preemptible, running.stopping) == (True, False)
    store.engines.close_engine("engine-1", if_idle=False)
    (running,) = store.queue.snapshot_for("h1", H1, Paces()).running
    assert (running.preemptible, running.stopping) == (False, True)


def test_jobs_have_company_that_share_project_base_and_fault_group(store):
    several = [queued(store) for _ in range(3)]
    others = [queued(store, share_key="other"), queued(store, fault_group="engine-9/1")]
    waiting = store.queue.snapshot_for("h1", H1, Paces(), new_engines=True).waiting
    company = {job.id: job.company for job in waiting}
    assert [company[job.id] for job in several] == [2, 2, 2]
    assert [company[job.id] for job in others] == [0, 0]
