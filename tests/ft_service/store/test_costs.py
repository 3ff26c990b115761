"""What jobs cost, in the database: over pauses, prices that change, engines and sweeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_service.jobs.decisions import placed
from ft_service.jobs.states import Job, State
from ft_service.money import cost_of
from ft_service.store.records import JobChange
from ft_service.store.tenants.usage import UsageQuery
from tests.support.engine_seats import claim, found, join, leave, pass_by, queued, sql
from tests.support.records import OTHER, PROJECT

EUR = {"currency": "EUR", "grams_per_kwh": 360.0}
PRICE = 2_500_000


def run(store, job: Job, price: int | None, seconds: float, slots: tuple[int, ...] = (4, 5)) -> Job:
    """The job after an attempt on ranks of its own."""
    sql(store, "UPDATE jobs SET state = 'queued', looked_at = 0 WHERE id = :id", id=job.id)
    claimed = claim(store, job)
    started = replace(placed(claimed.job, "h1"), price=price, currency="EUR")
    assert store.leases.apply(claimed, JobChange(job=started, take_slots=slots))
    pass_by(store, seconds)
    return leave(store, job)


def usage(store, *group_by: str) -> list:
    return store.usage.usage(UsageQuery(first_day=0, last_day=10**6, group_by=group_by))


def test_each_attempt_costs_by_its_own_price(store):
    job = queued(store, share_key=None, key_id="key-a")
    job = run(store, job, PRICE, 3600.0)
    first = job.slot_seconds
    assert job.cost == cost_of(first, PRICE)
    assert 7200 <= first < 7300
    job = run(store, job, 2 * PRICE, 1800.0)  # the operator has doubled the price
    second = job.slot_seconds - first
    assert job.cost == cost_of(first, PRICE) + cost_of(second, 2 * PRICE)
    job = run(store, job, None, 600.0)
    assert job.cost == cost_of(first, PRICE) + cost_of(second, 2 * PRICE), "without a price"
    [used] = usage(store, "key_id")
    assert (used.cost, used.currency, used.key_id) == (job.cost, "EUR", "key-a")
    assert used.slot_seconds == job.slot_seconds
    assert store.usage.currency() == "EUR"


def test_those_who_share_an_engine_pay_for_it_together(store):
    """100 s alone, 100 s as two, 100 s empty: on two slots."""
    first = found(store, queued(store, price=PRICE, **EUR))
    pass_by(store, 100)
    second = queued(store, price=9 * PRICE, **EUR)
    assert join(store, second)
    second = store.jobs.get_job(PROJECT, second.id)
    assert second.price == PRICE, "the engine's own price, which it began with"
    pass_by(store, 100)
    live = {seat.id: seat.slot_seconds for seat in store.engines.live_engines()[0].seats}
    assert store.engines.used("engine-1", second.id) == pytest.approx(live[second.id], abs=5)
    open_cost = store.usage.spent(PROJECT).cost
    assert open_cost == pytest.approx(cost_of(400, PRICE), abs=cost_of(20, PRICE))
    first, second = leave(store, first), leave(store, second)
    pass_by(store, 100)
    store.engines.end_engine("engine-1")
    for job, seconds in ((first, 300), (second, 100)):
        assert job.slot_seconds == pytest.approx(seconds, abs=10)
        assert job.cost == cost_of(job.slot_seconds, PRICE)
    [whole] = usage(store)
    # What nobody used is the project's, under no key.
    nobody = cost_of(whole.slot_seconds - first.slot_seconds - second.slot_seconds, PRICE)
    assert whole.cost == first.cost + second.cost + nobody
    assert nobody == pytest.approx(cost_of(200, PRICE), abs=cost_of(20, PRICE))


def test_energy_is_divided_among_those_who_sit_there(store):
    first = found(store, queued(store, price=PRICE, **EUR))
    store.engines.measured("engine-1", 1000.0)
    second = queued(store)
    assert join(store, second)
    store.engines.measured("engine-1", 1000.0)
    store.engines.measured("engine-1", 400.0)  # a counter that fell says nothing
    store.engines.measured("engine-1", 2000.0)
    first = leave(store, first)
    store.engines.measured("engine-1", 2600.0)
    second = leave(store, second)
    store.engines.measured("engine-1", 3000.0)
    store.engines.end_engine("engine-1")
    assert (first.joules, second.joules) == (1500.0, 1100.0)
    assert first.co2_grams == pytest.approx(0.15)
    [whole] = usage(store)
    assert whole.joules == 3000.0
    assert whole.co2_grams == pytest.approx(0.3)


def test_a_project_has_spent_what_ran_this_month_and_what_runs(store):
    assert store.usage.spent(PROJECT).cost == 0
    store.projects.update_project(PROJECT, limits={"max_cost_per_month": 12.5})
    done = run(store, queued(store, share_key=None), PRICE, 3600.0)
    assert store.usage.spent(PROJECT).cost == done.cost
    claimed = claim(store, queued(store, share_key=None))
    running = replace(placed(claimed.job, "h1"), price=PRICE, currency="EUR")
    assert store.leases.apply(claimed, JobChange(job=running, take_slots=(0, 1)))
    pass_by(store, 3600.0)
    spent = store.usage.spent(PROJECT)
    assert (spent.limit, spent.currency) == (12.5, "EUR")
    assert spent.cost == pytest.approx(2 * done.cost, abs=cost_of(60, PRICE))
    sql(store, "UPDATE usage SET day = day - 32")  # last month's
    assert store.usage.spent(PROJECT).cost == pytest.approx(done.cost, abs=cost_of(60, PRICE))
    assert store.usage.spent(OTHER).cost == 0


def test_a_sweep_costs_what_its_jobs_cost(store):
    jobs = [queued(store, share_key=None, sweep_id="sweep-1") for _ in range(3)]
    done = [run(store, job, PRICE + 7, 60.25 * (at + 1)) for at, job in enumerate(jobs)]
    whole = cost_of(sum(job.slot_seconds for job in done), PRICE + 7)
    assert abs(sum(job.cost for job in done) - whole) <= 1
    assert all(job.state is State.PAUSED for job in done)
