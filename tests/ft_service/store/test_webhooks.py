from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from sqlalchemy import func, select, update

from ft_service.ids import new_id
from ft_service.jobs.states import Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.store.records import JobChange, WebhookEndpoint
from ft_service.store.tables import webhook_deliveries
from ft_service.store.webhooks import EVENT_TYPES, longest_wait
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, claim, new_job, place


def add(store, *event_types: str, project: str = PROJECT) -> WebhookEndpoint:
    types = list(event_types or EVENT_TYPES)
    return store.webhooks.add_webhook(
        WebhookEndpoint(
            id=new_id("we_"),
            project_id=project,
            name="a",
            url="https://example.com",
            event_types=types,
        )
    )


def kept(store) -> int:
    with store.reading() as connection:
        return connection.scalar(select(func.count()).select_from(webhook_deliveries))


def cancel(store) -> str:
    return store.jobs.request(PROJECT, create_job(store, new_job()).id, Verb.CANCEL).id


def test_a_job_that_ends_leaves_a_delivery_to_each_endpoint_that_asks(store):
    asked = {add(store).id, add(store, EVENT_TYPES[1]).id}
    add(store, EVENT_TYPES[0])
    add(store, project=OTHER)
    create_job(store, new_job())
    taken = claim(store)
    assert store.leases.apply(
        taken, JobChange(job=replace(taken.job, state=State.FAILED, finished_at=7.0))
    )

    deliveries = store.webhooks.claim_deliveries(limit=9, lease_seconds=60)

    assert {delivery.endpoint.id for delivery in deliveries} == asked
    assert len({delivery.id for delivery in deliveries}) == 2
    assert len({delivery.body for delivery in deliveries}) == 1
    assert [delivery.tries for delivery in deliveries] == [1, 1]
    assert '"type": "fine_tuning.job.failed"' in deliveries[0].body
    assert '"created_at": 7' in deliveries[0].body


def test_a_cancelled_job_is_announced_once_though_its_processes_end_later(store):
    add(store)
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    store.jobs.request(PROJECT, job.id, Verb.CANCEL)
    stopping = claim(store)
    assert (stopping.job.state, stopping.job.phase) == (State.CANCELLED, Phase.STOPPING)
    assert store.leases.apply(
        stopping, JobChange(job=replace(stopping.job, phase=None), release_slots=True)
    )
    assert len(store.webhooks.claim_deliveries(limit=9, lease_seconds=60)) == 1


def test_one_delivery_is_claimed_by_one(store):
    add(store)
    for _ in range(12):
        cancel(store)
    with ThreadPoolExecutor(4) as pool:
        claimed = [
            d.id
            for batch in pool.map(
                lambda _: store.webhooks.claim_deliveries(limit=8, lease_seconds=60), range(8)
            )
            for d in batch
        ]
    assert len(claimed) == len(set(claimed)) == 12


def test_a_delivery_is_claimed_again_when_its_lease_or_its_wait_is_over(store):
    add(store)
    cancel(store)
    (first,) = store.webhooks.claim_deliveries(limit=1, lease_seconds=0)
    (second,) = store.webhooks.claim_deliveries(limit=1, lease_seconds=60)
    assert (first.id, first.tries, second.tries) == (second.id, 1, 2)

    store.webhooks.settle_delivery(first, error=None, retry_seconds=None)  # too late
    store.webhooks.settle_delivery(second, error="away", retry_seconds=60)
    assert store.webhooks.claim_deliveries(limit=1, lease_seconds=60) == []
    store.webhooks.settle_delivery(second, error="away", retry_seconds=0)
    (third,) = store.webhooks.claim_deliveries(limit=1, lease_seconds=0)
    store.webhooks.settle_delivery(third, error=None, retry_seconds=None)
    assert store.webhooks.claim_deliveries(limit=1, lease_seconds=0) == []
    store.webhooks.forget_deliveries(older_than_seconds=60, give_up_seconds=60)
    assert kept(store) == 1
    store.webhooks.forget_deliveries(older_than_seconds=0, give_up_seconds=60)
    assert kept(store) == 0


def test_secrets_are_not_printed(store):
    endpoint = add(store)
    rotated = store.webhooks.rotate_webhook_secret(PROJECT, endpoint.id, keep_seconds=60)
    assert rotated.old_secret == endpoint.secret
    assert "whsec_" not in repr(rotated)
    assert (
        store.webhooks.rotate_webhook_secret(PROJECT, endpoint.id, keep_seconds=0).old_secret
        is None
    )


def test_projects_take_turns_and_in_each_its_endpoints(store):
    for project, endpoints in ((OTHER, 2), (PROJECT, 1)):
        for _ in range(endpoints):
            add(store, project=project)
    for project, ended in ((OTHER, 5), (PROJECT, 2)):
        for _ in range(ended):
            store.jobs.request(
                project, create_job(store, new_job(project_id=project)).id, Verb.CANCEL
            )

    def claimed(limit: int, **shares) -> list[str]:
        return sorted(
            d.project_id
            for d in store.webhooks.claim_deliveries(limit=limit, lease_seconds=60, **shares)
        )

    both = sorted([OTHER, PROJECT])
    assert claimed(2) == both, "ten of one wait, and two of the other"
    assert claimed(9, of_project=2, under_way={OTHER: 1, PROJECT: 1}) == both
    assert claimed(1, of_project=2, under_way={OTHER: 2}) == []
    assert claimed(1, of_project=4, under_way={OTHER: 3}) == [OTHER]
    of_two = store.webhooks.claim_deliveries(limit=2, lease_seconds=60)
    assert len({delivery.endpoint.id for delivery in of_two}) == 2
    assert claimed(99) == [OTHER] * 5


def test_what_waits_for_too_long_is_given_up_though_it_was_never_tried(store):
    add(store)
    cancel(store)
    cancel(store)
    [under_way] = store.webhooks.claim_deliveries(limit=1, lease_seconds=60)
    store.webhooks.forget_deliveries(older_than_seconds=60, give_up_seconds=0)
    assert store.webhooks.claim_deliveries(limit=9, lease_seconds=0) == []
    store.webhooks.settle_delivery(under_way, error="away", retry_seconds=0)
    assert [
        delivery.id for delivery in store.webhooks.claim_deliveries(limit=9, lease_seconds=0)
    ] == [under_way.id]


def test_a_delivery_that_waits_for_longer_than_any_was_stored_before_the_clock_went_back(store):
    add(store)
    cancel(store)
    (first,) = store.webhooks.claim_deliveries(limit=1, lease_seconds=60)
    for ahead, is_due in ((longest_wait(1) - 5, False), (longest_wait(1) + 60, True)):
        with store.writing() as connection:
            later = update(webhook_deliveries).values(next_try_at=store.now() + ahead)
            connection.execute(later)
        due = store.webhooks.claim_deliveries(limit=1, lease_seconds=60)
        assert [one.id for one in due] == ([first.id] if is_due else [])
