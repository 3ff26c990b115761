"""A clock that is set back or forward by hours while jobs run: nothing waits until it has caught
up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_service.control.webhook_delivery import TRY_SECONDS, retry_after
from ft_service.ids import new_id
from ft_service.jobs.estimates import Paces
from ft_service.jobs.forecast import forecast
from ft_service.jobs.queue_snapshot import LONGEST_WAIT_SECONDS
from ft_service.jobs.states import Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.store.records import JobChange, WebhookEndpoint
from ft_service.store.tenants.request_buckets import MINUTE
from ft_service.store.webhooks import longest_wait
from tests.support.creating import create_job
from tests.support.databases import set_clock
from tests.support.records import PROJECT, claim, claim_next, new_job, place

HOURS = pytest.mark.parametrize("hours", [-2, 2])


def look(store, idle_seconds=0.5):
    return store.leases.claim(
        host="h1", owner="test", lease_seconds=60.0, idle_seconds=idle_seconds
    )


def looked_at(store, job_id: str) -> None:
    """Look at a job, whose turn it is, and find nothing to do."""
    found = look(store)
    assert found is not None
    assert found.job.id == job_id
    assert store.leases.apply(found, JobChange(job=found.job))


@HOURS
def test_a_running_job_is_looked_at(store, hours):
    running = new_job(state=State.RUNNING, phase=Phase.TRAINING, host="h1", attempt=1)
    create_job(store, running)
    looked_at(store, running.id)
    assert look(store, idle_seconds=60.0) is None

    set_clock(store, hours * 3600)

    looked_at(store, running.id)
    assert look(store, idle_seconds=60.0) is None  # and by the clock as it is now from then on


def test_a_job_from_before_the_clock_went_back_is_not_kept_waiting_by_those_since(store):
    jobs = [
        create_job(store, new_job(state=State.RUNNING, phase=Phase.TRAINING, host="h1", attempt=1))
        for _ in range(2)
    ]
    looked_at(store, jobs[0].id)
    set_clock(store, -7200)
    assert look(store).job.id == jobs[0].id


def test_a_job_that_is_left_alone_for_a_moment_is(store):
    create_job(store, new_job(state=State.VALIDATING))
    found = claim(store)
    assert store.leases.apply(found, JobChange(job=found.job, rest_seconds=5.0))
    assert look(store, idle_seconds=0.0) is None


def test_a_job_that_is_left_alone_for_too_long_does_not_come_before_all_others(store):
    """As one that was written before the clock was set back does."""
    create_job(store, new_job(state=State.VALIDATING))
    found = claim(store)
    assert store.leases.apply(found, JobChange(job=found.job, rest_seconds=3600.0))
    assert look(store, idle_seconds=0.0) is None


@HOURS
def test_a_lease_of_a_reconciler_that_is_gone_is_over(store, hours):
    create_job(store, new_job(state=State.RUNNING, phase=Phase.TRAINING, host="h1", attempt=1))
    claim(store)
    assert look(store) is None
    set_clock(store, hours * 3600)
    assert look(store) is not None


@HOURS
def test_a_back_off_is_over(store, hours):
    create_job(
        store, new_job(state=State.QUEUED, not_before=store.now() + LONGEST_WAIT_SECONDS - 60)
    )
    assert claim_next(store) is None
    set_clock(store, hours * 3600)
    assert claim_next(store) is not None


def test_a_forecast_counts_a_back_off_from_before_as_over(store):
    job = create_job(store, new_job(state=State.QUEUED, not_before=store.now() + 60))
    set_clock(store, -7200)
    (waiting,) = store.queue.snapshot(Paces()).waiting
    assert waiting.id == job.id
    store.queue.announce_host("h1", 8)
    assert "next attempt" not in forecast(store.queue.snapshot(Paces()))[job.id].reason


@HOURS
def test_slots_are_given_back_and_use_is_no_less_than_nothing(store, hours):
    job = create_job(store, new_job(state=State.QUEUED, slots=2))
    place(store, job, [0, 1])
    set_clock(store, hours * 3600)
    found = claim(store)
    ended = replace(found.job, state=State.SUCCEEDED, phase=None, finished_at=found.now)
    assert store.leases.apply(found, JobChange(job=ended, release_slots=True))
    assert store.leases.held_slots(job.id) == []
    assert store.jobs.get_job(PROJECT, job.id).held_seconds >= 0


@HOURS
def test_a_delivery_is_made(store, hours):
    store.webhooks.add_webhook(
        WebhookEndpoint(
            id=new_id("we_"),
            project_id=PROJECT,
            name="n",
            url="https://x",
            event_types=["fine_tuning.job.cancelled"],
        )
    )
    job = create_job(store, new_job(state=State.QUEUED))
    store.jobs.request(PROJECT, job.id, Verb.CANCEL)
    (first,) = store.webhooks.claim_deliveries(limit=10, lease_seconds=60.0)
    store.webhooks.settle_delivery(first, error="away", retry_seconds=5.0)
    assert store.webhooks.claim_deliveries(limit=10, lease_seconds=60.0) == []
    set_clock(store, hours * 3600)
    assert len(store.webhooks.claim_deliveries(limit=10, lease_seconds=60.0)) == 1


def test_no_delivery_waits_longer_than_the_store_believes():
    for tries in range(30):
        assert max(4 * TRY_SECONDS, retry_after(tries, 0.0) or 0.0) <= longest_wait(tries)


@HOURS
def test_metrics_are_sent_on(store, hours):
    request = {"model": "tiny", "integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}
    create_job(store, new_job(state=State.RUNNING, attempt=1, request=request))
    assert len(store.integrations.claim_integrations("gone", lease_seconds=120.0)) == 1
    assert store.integrations.claim_integrations("other", lease_seconds=120.0) == []
    set_clock(store, hours * 3600)
    assert len(store.integrations.claim_integrations("other", lease_seconds=120.0)) == 1


@HOURS
def test_a_bucket_of_requests_is_full_again_after_a_minute_at_most(store, hours):
    if not store.is_shared:
        pytest.skip("one server keeps its buckets by its own clock")
    assert store.request_buckets.draw_requests(PROJECT, 60, 30, 0).taken == 30
    set_clock(store, hours * 3600)
    assert store.request_buckets.draw_requests(PROJECT, 60, 1, 0).full_after <= MINUTE
