from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from ft_service.jobs.states import State
from ft_service.store.records import JobChange, Usage
from ft_service.store.tenants.audit import Actor, acting
from ft_service.store.tenants.usage import UsageQuery, exact
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, claim, new_file, new_job, place


def used(store, **query) -> list[Usage]:
    day = int(store.now() // 86_400)
    return store.usage.usage(UsageQuery(first_day=day - 1, last_day=day + 1, **query))


@settings(database=None, deadline=None)
@given(st.lists(st.floats(0, 1e7), max_size=30), st.randoms())
def test_sums_of_use_are_the_same_in_any_order(seconds, random):
    some = [exact(one) for one in seconds]
    before = sum(some)
    random.shuffle(some)
    assert sum(some) == before
    assert all(abs(exact(one) - one) <= 1 / 1024 for one in seconds)


def test_use_agrees_with_the_jobs_exactly(store):
    """Attempts of two jobs of two keys, each held for some odd time."""
    slots = {"ftjob-a": 3, "ftjob-b": 1}
    for job_id, number in slots.items():
        key = f"key_{job_id[-1]}"
        create_job(store, new_job(id=job_id, state=State.QUEUED, slots=number, key_id=key))
    for attempt in range(3):
        for job_id, number in slots.items():
            place(store, store.jobs.get_job(PROJECT, job_id), list(range(number)))
            with store.writing() as connection:
                connection.execute(
                    text("UPDATE slots SET taken_at = taken_at - :s"), {"s": 0.1 + attempt / 3}
                )
            claimed = claim(store)
            job = replace(
                claimed.job, state=State.QUEUED, phase=None, seen_tokens=claimed.job.seen_tokens + 7
            )
            assert store.leases.apply(claimed, JobChange(job=job, release_slots=True))
            with store.writing() as connection:  # so that the other one is next
                later = {"id": job_id, "later": claimed.now + 500}
                connection.execute(
                    text("UPDATE jobs SET not_before = :later WHERE id = :id"), later
                )
        with store.writing() as connection:
            connection.execute(text("UPDATE jobs SET not_before = 0"))
    jobs = {job_id: store.jobs.get_job(PROJECT, job_id) for job_id in slots}
    by_key = used(store, group_by=("key_id",))
    for key, job in (("key_a", jobs["ftjob-a"]), ("key_b", jobs["ftjob-b"])):
        mine = [row for row in by_key if row.key_id == key]
        assert sum(row.slot_seconds for row in mine) == job.slot_seconds > 0
        assert sum(row.tokens for row in mine) == job.seen_tokens == 21
    assert sum(row.slot_seconds for row in used(store)) == sum(
        job.slot_seconds for job in jobs.values()
    )
    assert used(store, only_project=OTHER) == []


def test_a_job_counts_once_its_files_were_checked_and_bytes_count_for_who_uploads(store):
    with acting(Actor("key_u", "10.0.0.1")):
        store.files.add_file(new_file(bytes=12))
        file = store.files.add_file(new_file(project_id=OTHER, bytes=30))
        store.files.delete_file(OTHER, file.id)
    create_job(store, new_job())
    claimed = claim(store)
    assert store.leases.apply(claimed, JobChange(job=replace(claimed.job, state=State.QUEUED)))
    assert [(row.jobs, row.bytes) for row in used(store, only_project=PROJECT)] == [(1, 12)]
    assert [
        (row.key_id, row.bytes) for row in used(store, only_project=OTHER, group_by=("key_id",))
    ] == [("key_u", 30)]
    entry, _ = store.audit.list_audit(project_id=OTHER).data
    assert (entry.type, entry.target, entry.key_id, entry.address) == (
        "file.deleted",
        file.id,
        "key_u",
        "10.0.0.1",
    )
    assert {entry.project_id for entry in store.audit.list_audit(organization="acme").data} == {
        PROJECT
    }
