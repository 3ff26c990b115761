"""A job and a project stop when they have cost as much as they may."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.errors import SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.jobs.user_actions import Verb
from ft_service.money import Rate
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Desired, ExitReason
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import (
    PROJECT,
    add_job,
    get,
    messages,
    new_reconciler,
    new_store,
    step_until,
)

RATE = Rate(3_600_000, "EUR", 360.0)
"""A thousandth of the currency for a slot-second."""
STOPPED = exit_of(ExitReason.STOPPED, "stopped at a checkpoint")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path)


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


def add_limited(store: Store, max_cost: int | None, job_id: str = "ftjob-1") -> None:
    add_job(store, job_id)
    values = {"limit": max_cost, "price": RATE.price, "currency": RATE.currency, "id": job_id}
    change = "max_cost = :limit, price = :price, currency = :currency"
    with store.writing() as connection:
        connection.execute(text(f"UPDATE jobs SET {change} WHERE id = :id"), values)


def run_since(store: Store, seconds: float) -> None:
    with store.writing() as connection:
        for table in ("slots", "jobs"):
            connection.execute(
                text(f"UPDATE {table} SET taken_at = taken_at - :s WHERE taken_at IS NOT NULL"),
                {"s": seconds},
            )


def running(reconciler, store: Store, launcher: FakeLauncher, job_id: str = "ftjob-1") -> None:
    def there() -> bool:
        reconciler.step()
        job = get(store, job_id)
        if job.state is State.RUNNING and (job_id, job.attempt) in launcher.started:
            launcher.report(job_id, job.attempt)
        return job.phase == "training"

    wait_for(there)


def test_a_job_pauses_at_its_cost_and_goes_on_with_more(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher, rate_of=lambda host: RATE)
    add_limited(store, max_cost=200_000)
    running(reconciler, store, launcher)
    run_since(store, 90.0)
    for _ in range(3):
        reconciler.step()
    assert not launcher.signals, "180 of 200 thousandths"
    run_since(store, 15.0)
    wait_for(lambda: (reconciler.step(), launcher.signals or None)[1])
    assert launcher.signals[0][2].desired is Desired.PAUSE
    launcher.end("ftjob-1", 1, STOPPED, checkpoint_step=5)
    paused = step_until(reconciler, store, State.PAUSED)
    assert (paused.reason, paused.failures) == (Reason.COST_LIMIT, 0)
    assert 210_000 <= paused.cost < 260_000
    assert any("0.21 EUR" in said and "max_cost" in said for said in messages(store))
    for limit in (None, 200_000):
        with pytest.raises(SpecError) as caught:
            store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME, max_cost=limit)
        assert (caught.value.param, caught.value.code) == ("max_cost", "cost_limit")
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME, max_cost=900_000)
    running(reconciler, store, launcher)
    resumed = get(store)
    assert (resumed.attempt, resumed.max_cost, resumed.reason) == (2, 900_000, None)
    launcher.end("ftjob-1", 2, exit_of(ExitReason.SUCCEEDED, ""))
    assert step_until(reconciler, store).cost >= paused.cost


def test_a_projects_month_pauses_what_runs_and_what_waits(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher, rate_of=lambda host: RATE)
    reconciler._budgets._next_look._seconds = 0.0
    store.projects.update_project(PROJECT, limits={"max_cost_per_month": 0.1})
    add_limited(store, max_cost=None)
    running(reconciler, store, launcher)
    add_limited(store, max_cost=None, job_id="ftjob-2")
    run_since(store, 60.0)
    wait_for(lambda: (reconciler.step(), launcher.signals or None)[1])
    launcher.end("ftjob-1", 1, STOPPED)
    assert step_until(reconciler, store, State.PAUSED).reason is Reason.COST_LIMIT
    # Whose turn has come now.
    second = step_until(reconciler, store, State.PAUSED, job_id="ftjob-2")
    assert (second.reason, second.attempt) == (Reason.COST_LIMIT, 0)
    store.jobs.request(PROJECT, "ftjob-2", Verb.RESUME)
    assert step_until(reconciler, store, State.PAUSED, job_id="ftjob-2").attempt == 0
    store.projects.update_project(PROJECT, limits={"max_cost_per_month": 5.0})
    store.jobs.request(PROJECT, "ftjob-2", Verb.RESUME)
    running(reconciler, store, launcher, "ftjob-2")


def test_prices_are_those_of_the_attempts_start(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    rates = [RATE]
    reconciler = new_reconciler(tmp_path, store, launcher, rate_of=lambda host: rates[0])
    add_limited(store, max_cost=None)
    running(reconciler, store, launcher)
    run_since(store, 100.0)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    wait_for(lambda: (reconciler.step(), launcher.signals or None)[1])
    launcher.end("ftjob-1", 1, STOPPED)
    first = step_until(reconciler, store, State.PAUSED)
    assert 200_000 <= first.cost < 240_000
    rates[0] = Rate(36_000_000, "EUR")  # as after a restart with other prices
    dear = new_reconciler(tmp_path, store, launcher, rate_of=lambda host: rates[0])
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME)
    running(dear, store, launcher)
    run_since(store, 10.0)
    launcher.end("ftjob-1", 2, exit_of(ExitReason.SUCCEEDED, ""))
    done = step_until(dear, store)
    assert first.cost + 200_000 <= done.cost < first.cost + 400_000
    assert done.price == 36_000_000


def test_a_limited_job_does_not_start_where_nothing_has_a_price(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_limited(store, max_cost=100)
    wait_for(lambda: (reconciler.step(), get(store).pending)[1])
    waiting = get(store)
    assert (waiting.state, launcher.started) == (State.QUEUED, [])
    assert "FT_PRICES" in (waiting.pending or "")
