from __future__ import annotations

from dataclasses import replace

import pytest

from ft_service.jobs.decisions import placed
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue_snapshot import Host, Sharing
from ft_service.jobs.states import ALONE, State
from ft_service.rundir.engine import SeatSize
from ft_service.store.records import JobChange, NewEngine
from ft_service.store.tenants.usage import UsageQuery
from tests.support.creating import create_job
from tests.support.engine_seats import claim, found, join, leave, pass_by, queued, sql
from tests.support.records import PROJECT, new_job

H1 = Host(slots=8)


def snapshot(store, **options):
    return store.queue.snapshot_for("h1", H1, Paces(), **{"new_engines": True, **options})


def test_an_engine_holds_slots_until_it_has_ended_and_its_jobs_none(store):
    first = found(store, queued(store))
    assert (first.engine_id, first.state) == ("engine-1", State.RUNNING)
    assert first.taken_at is not None
    second = queued(store)
    assert join(store, second)
    (engine,) = store.engines.live_engines(host="h1")
    assert (engine.id, engine.ranks, engine.base) == ("engine-1", 2, "some-base")
    assert [(seat.id, seat.since >= engine.created_at) for seat in engine.seats] == [
        (first.id, True),
        (second.id, True),
    ]
    assert store.engines.engine_slots("engine-1") == [0, 1]
    assert [store.leases.held_slots(job.id) for job in (first, second)] == [[], []]
    assert leave(store, first).engine_id is None
    assert store.leases.free_slots("h1", 4) == [2, 3], "though the job that took them has left"
    assert store.engines.end_engine("engine-1")
    assert not store.engines.end_engine("engine-1")
    assert store.leases.free_slots("h1", 4) == [0, 1, 2, 3]
    assert store.engines.live_engines() == []
    assert leave(store, second).state is State.PAUSED


def test_there_are_no_more_seats_than_there_may_be(store):
    found(store, queued(store))
    assert join(store, queued(store))
    third = queued(store)
    assert not join(store, third)
    after = store.jobs.get_job(PROJECT, third.id)
    assert (after.state, after.engine_id, after.taken_at) == (State.QUEUED, None, None)


@pytest.mark.parametrize("end", ["closing", "ended"])
def test_nobody_joins_an_engine_that_ends(store, end):
    found(store, queued(store))
    if end == "closing":
        assert store.engines.close_engine("engine-1", if_idle=False)
        assert not store.engines.close_engine("engine-1", if_idle=False)
    else:
        assert store.engines.end_engine("engine-1")
    assert not join(store, queued(store))


def test_a_seat_needs_room(store):
    """Also if two reconcilers have both seen room."""
    size = SeatSize(held=3, batch=2, batch_tokens=64, room=8, gain=None)
    found(store, queued(store, seat=size), most_seats=8, room=8)
    waiting = queued(store, seat=size)
    assert not join(store, queued(store, seat=replace(size, held=4)))
    assert not join(store, queued(store, seat=replace(size, batch=3)))
    (engine,) = snapshot(store).engines
    assert (engine.sizes, engine.room) == ([size], 8)
    assert next(job.seat for job in snapshot(store).waiting if job.id == waiting.id) == size
    assert join(store, waiting)
    assert store.engines.limits("engine-1") == NewEngine(8, 8)


def test_an_engine_with_a_job_is_not_idle(store):
    job = found(store, queued(store))
    assert not store.engines.close_engine("engine-1", if_idle=True)
    leave(store, job)
    assert store.engines.close_engine("engine-1", if_idle=True)


def test_an_engines_slots_count_once_for_its_projects_limit(store):
    sql(store, "UPDATE projects SET max_slots = 3")
    found(store, queued(store), most_seats=8)
    for _ in range(3):
        assert join(store, queued(store))
    other = queued(store)
    claimed = claim(store, other)
    assert not store.leases.apply(
        claimed, JobChange(job=placed(claimed.job, "h1"), take_slots=[2, 3])
    )


def test_slot_seconds_are_divided_among_those_who_sit_there(store):
    """100 s alone, 100 s as two, 100 s alone again, 100 s empty: on two slots."""
    first = found(store, queued(store, key_id="key-a"))
    pass_by(store, 100)
    second = queued(store, key_id="key-b")
    assert join(store, second)
    pass_by(store, 100)
    first = leave(store, first)
    pass_by(store, 100)
    second = leave(store, second)
    pass_by(store, 100)
    store.engines.end_engine("engine-1")
    assert first.slot_seconds == pytest.approx(300, abs=10)
    assert second.slot_seconds == pytest.approx(300, abs=10)
    assert (first.held_seconds, second.held_seconds) == (
        pytest.approx(200, abs=5),
        pytest.approx(200, abs=5),
    )
    days = store.usage.usage(UsageQuery(first_day=0, last_day=10**6, group_by=["key_id"]))
    used = {one.key_id: one.slot_seconds for one in days}
    assert used == {
        key: pytest.approx(amount, abs=10)
        for key, amount in (("key-a", 300), ("key-b", 300), ("", 200))
    }
    assert snapshot(store).shares[PROJECT].used == pytest.approx(800, abs=20)


def test_the_queue_sees_an_engine_as_one_holder_of_slots_and_as_seats(store):
    first = found(store, queued(store, priority=1))
    assert join(store, queued(store, priority=3))
    waiting = queued(store)
    seen = snapshot(store)
    (running,) = seen.running
    assert (running.id, running.slots, running.priority, running.preemptible) == (
        "engine-1",
        2,
        3,
        True,
    )
    (engine,) = seen.engines
    assert (engine.seats, engine.most_seats, engine.closing) == (2, 2, False)
    assert engine.sharing == Sharing(PROJECT, "key")
    (job,) = seen.waiting
    assert (job.id, job.sharing, job.company) == (waiting.id, Sharing(PROJECT, "key"), 2)
    assert 0 <= seen.shares[PROJECT].used < 60
    assert snapshot(store, new_engines=False).engines == []
    assert store.queue.snapshot(Paces()).engines[0].id == "engine-1"
    leave(store, first)
    store.engines.close_engine("engine-1", if_idle=False)
    (running,) = snapshot(store).running
    assert running.stopping


def test_who_has_company(store):
    alone = queued(store)
    grouped = queued(store, fault_group="engine-9/1")
    queued(store, share_key=None)
    assert [job.company for job in snapshot(store).waiting] == [0, 0, 0]
    also_grouped = queued(store, fault_group="engine-9/1")
    last = queued(store, fault_group=ALONE)
    company = {job.id: (job.company, job.sharing) for job in snapshot(store).waiting}
    assert company[alone.id][0] == 0
    assert company[grouped.id][0] == company[also_grouped.id][0] == 1
    assert company[last.id] == (0, None)


def test_a_job_has_company_while_others_of_its_sweep_are_validated(store):
    job = queued(store, sweep_id="sweep-1")
    create_job(store, new_job(sweep_id="sweep-1"))
    (waiting,) = snapshot(store).waiting
    assert (waiting.id, waiting.company) == (job.id, True)


def test_beside_an_engine_beyond_a_lowered_limit_larger_jobs_hide_none_behind_them(store) -> None:
    found(store, queued(store))
    queued(store, slots=4)
    for most, waiting in ((1, 0), (2, 1)):
        store.projects.update_project(PROJECT, limits={"max_slots": most})
        assert len(snapshot(store).waiting) == waiting


def test_a_seat_s_energy_and_what_it_weighs_are_its_project_s(store):
    for engine_id, grams, slots in (("engine-1", 360.0, (0, 1)), ("engine-2", None, (2, 3))):
        job = found(store, queued(store, grams_per_kwh=grams), engine_id, slots=slots)
        store.engines.measured(engine_id, 1000.0)
        job = leave(store, job)
        assert (job.joules, job.co2_grams) == (1000.0, None if grams is None else 0.1)
        store.engines.end_engine(engine_id)
    (whole,) = store.usage.usage(UsageQuery(first_day=0, last_day=10**6, group_by=()))
    assert (whole.joules, whole.co2_grams) == (2000.0, 0.1)


def test_use_has_a_currency_where_it_had_a_price(store):
    for number, (price, currency) in enumerate(((2_500_000, "EUR"), (None, None))):
        job = found(
            store,
            queued(store, price=price, currency="EUR", key_id=f"key-{number}"),
            f"engine-{number}",
            slots=(2 * number, 2 * number + 1),
        )
        sql(store, "UPDATE engines SET divided_at = divided_at - 3600")
        leave(store, job)
        query = UsageQuery(first_day=0, last_day=10**6, group_by=["key_id"])
        used = {one.key_id: one for one in store.usage.usage(query)}[f"key-{number}"]
        assert used.currency == currency
        assert (used.cost > 0) is (price is not None)
