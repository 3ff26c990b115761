from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ft_service.jobs.states import Phase, State
from ft_service.rundir.events import Metrics
from ft_service.store.records import JobChange, NewEvent
from ft_service.store.sql import Store
from tests.support.creating import create_job
from tests.support.records import claim, new_job

ASKED = [{"type": "wandb", "wandb": {"project": name}} for name in ("p", "q")]


def add_running(store: Store, *steps: int) -> str:
    job = create_job(store, new_job(request={"training_file": "f", "integrations": ASKED}))
    claimed = claim(store)
    events = [
        NewEvent(level="info", message="s", metrics=Metrics(step=n, total_steps=9), source=(n, 0))
        for n in steps
    ]
    events.append(NewEvent(level="info", message="without numbers"))
    change = JobChange(
        job=replace(claimed.job, state=State.RUNNING, phase=Phase.TRAINING, attempt=1, host="h1"),
        events=events,
    )
    assert store.leases.apply(claimed, change)
    return job.id


def test_nothing_is_to_be_sent_before_a_job_begins(store: Store) -> None:
    create_job(store, new_job())
    create_job(store, new_job(request={"training_file": "f", "integrations": ASKED}))
    assert store.integrations.claim_integrations("me", lease_seconds=60.0) == [], (
        "its job has not begun"
    )


def test_one_sender_gets_them_and_another_after_it(store: Store) -> None:
    job_id = add_running(store)
    with ThreadPoolExecutor(4) as pool:
        owners = ["a", "b", "c", "d"]
        found = list(
            pool.map(
                lambda owner: store.integrations.claim_integrations(owner, lease_seconds=60.0),
                owners,
            )
        )
    (winner,) = [index for index, rows in enumerate(found) if rows]
    rows = sorted(found[winner], key=lambda row: row.number)
    assert [(row.job_id, row.number, row.settings) for row in rows] == [
        (job_id, 0, ASKED[0]),
        (job_id, 1, ASKED[1]),
    ]
    assert store.integrations.claim_integrations(owners[winner], lease_seconds=60.0) == [], (
        "not to be renewed yet"
    )
    assert len(store.integrations.claim_integrations(owners[winner], lease_seconds=600.0)) == 2, (
        "less than half is left"
    )
    store.integrations.release_integrations("somebody")
    assert store.integrations.claim_integrations("other", lease_seconds=60.0) == []
    store.integrations.release_integrations(owners[winner])
    assert len(store.integrations.claim_integrations("other", lease_seconds=60.0)) == 2
