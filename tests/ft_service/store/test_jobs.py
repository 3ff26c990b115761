from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
from sqlalchemy import event, select

from ft_service.errors import ConflictError, LimitError, SpecError
from ft_service.ids import new_id
from ft_service.jobs.queue_snapshot import JobSize
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Halt, Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.documents import Desired
from ft_service.rundir.engine import SeatSize
from ft_service.rundir.events import Metrics
from ft_service.store import jobs as jobs_of_users
from ft_service.store.records import JobChange, NewEvent, NewJob
from ft_service.store.sql import open_store
from ft_service.store.tables import jobs
from tests.support.creating import create_job
from tests.support.records import OTHER, PROJECT, claim, new_checkpoint, new_job, place


def test_every_field_comes_back(store):
    job = new_job(
        state=State.CANCELLED,
        phase=Phase.STOPPING,
        desired=Desired.CANCEL,
        generation=2,
        signalled=3,
        priority=-4,
        slots=5,
        shapes=(JobSize(2, 8), JobSize(1, 5)),
        host="h",
        attempt=6,
        failures=7,
        losses=3,
        failed_at_step=8,
        not_before=9.5,
        ingested=10,
        reason=Reason.WORKER_KILLED,
        error={"code": "x", "message": "ü", "param": None},
        finished_at=11.5,
        trained_tokens=2**40,
        result_file="file-r",
        queued_at=4.0,
        pending="why",
        max_seconds=12,
        halt=Halt.TIME_LIMIT,
        key_id="key_a",
        work=1e18,
        planned_seconds=13.5,
        left_seconds=14.5,
        ends_at=15.5,
        taken_at=16.5,
        held_seconds=17.5,
        slot_seconds=18.5,
        seen_tokens=19,
        max_cost=10**12,
        price=2_500_000,
        name="refunds, cleaned",
        note="half the data",
        currency="EUR",
        grams_per_kwh=340.5,
        cost=2**40,
        joules=20.5,
        attempt_joules=21.5,
        co2_grams=22.5,
        nodes=2,
        sweep_id="sweep-1",
        sweep_values={"lora.r": 8},
        sweep_course={"rungs": {}},
        stopped="why",
        share_key="key",
        seat=SeatSize(held=2**33, batch=2**31, batch_tokens=2048, room=2**35, gain=1.5),
        engine_id="engine-1",
        fault_group="engine-0/1",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        version=12,
    )
    before = store.now()
    created = create_job(store, job)
    assert before <= created.created_at <= store.now()
    assert created == replace(job, created_at=created.created_at)
    assert store.jobs.get_job(PROJECT, job.id) == created
    assert not [f.name for f in fields(Job) if getattr(created, f.name) is None], (
        "a field this test does not exercise"
    )


def test_jobs_are_stored_together_or_not_at_all(store):
    told = NewEvent(level="warn", message="Plan: \x00")
    first, second = store.jobs.create_jobs(
        [NewJob(new_job(request={"metadata": {"team": "a"}}), [told]), NewJob(new_job(request={}))]
    )
    assert [job.id for job in store.jobs.list_jobs(PROJECT).data] == [second.id, first.id]
    assert [event.message for event in store.jobs.list_events(PROJECT, first.id).data] == [
        "Plan: \ufffd",
        f"Created fine-tuning job: {first.id}",
    ]
    assert [job.id for job in store.jobs.list_jobs(PROJECT, metadata={"team": "a"}).data] == [
        first.id
    ]
    with pytest.raises(ConflictError):
        store.jobs.create_jobs([NewJob(new_job()), NewJob(first)])
    assert len(store.jobs.list_jobs(PROJECT).data) == 2
    assert create_job(store, new_job()).created_at >= second.created_at, (
        "an undone transaction has no effect"
    )


def test_creation_is_the_first_event(store):
    job = create_job(store, new_job())
    (event,) = store.jobs.list_events(PROJECT, job.id).data
    assert event.message == f"Created fine-tuning job: {job.id}"
    assert (event.level, event.created_at, event.job_id) == ("info", job.created_at, job.id)
    with pytest.raises(ConflictError):
        create_job(store, job)
    assert len(store.jobs.list_events(PROJECT, job.id).data) == 1


def test_what_is_told_at_creation_follows_it(store):
    told = [NewEvent(level="warn", message="first"), NewEvent(level="info", message="second")]
    job = create_job(store, new_job(), told)
    found = store.jobs.list_events(PROJECT, job.id).data
    assert [(event.level, event.message) for event in found[:2]] == [
        ("info", "second"),
        ("warn", "first"),
    ]
    assert found[2].message == f"Created fine-tuning job: {job.id}"


def test_paging_through_250_jobs_sees_each_once_newest_first(store):
    ids = [create_job(store, new_job()).id for _ in range(250)]
    seen: list[str] = []
    after = None
    while True:
        page = store.jobs.list_jobs(PROJECT, after=after, limit=50)
        seen += [job.id for job in page.data]
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == ids[::-1]
    assert len(store.jobs.list_jobs(PROJECT).data) == 20


@pytest.mark.parametrize(
    "key", ["team", "a.b", "0", "$", '"', "'", "%", "{a,b}", "a b", "\\", "ü", "key", "\x00"]
)
def test_metadata_filter_takes_keys_and_values_literally(store, key):
    wanted = create_job(store, new_job(request={"metadata": {key: "x'\"%\x00", "n": "1"}}))
    create_job(store, new_job(request={"metadata": {key: "y", "n": "1"}}))
    create_job(store, new_job(request={"metadata": {"n": "x'\"%\x00"}}))
    create_job(store, new_job(request={"metadata": None}))
    create_job(store, new_job(request={}))

    assert store.jobs.list_jobs(PROJECT, metadata={key: "x'\"%\x00"}).data == [wanted]
    assert store.jobs.list_jobs(PROJECT, metadata={key: "x'\"%\x00", "n": "1"}).data == [wanted]
    assert store.jobs.list_jobs(PROJECT, metadata={key: "x'\"%\x00", "n": "2"}).data == []
    assert store.jobs.list_jobs(PROJECT, metadata={key: "x"}).data == []
    assert len(store.jobs.list_jobs(PROJECT, metadata={}).data) == 5


def test_jobs_are_found_by_a_part_of_their_suffix(store):
    made = {
        suffix: create_job(store, new_job(request={"suffix": suffix})).id
        for suffix in ("Nightly-1", "50%", "mine", None)
    }
    create_job(store, new_job(request={}))
    found = {
        part: [job.id for job in store.jobs.list_jobs(PROJECT, suffix=part).data]
        for part in ("nightly", "%", "_", "n")
    }
    assert found == {
        "nightly": [made["Nightly-1"]],
        "%": [made["50%"]],
        "_": [],
        "n": [made["mine"], made["Nightly-1"]],
    }


def test_filtered_pages_go_on_after_a_job(store):
    ids = [
        create_job(store, new_job(request={"metadata": {"run": str(n % 2)}})).id for n in range(6)
    ]
    first = store.jobs.list_jobs(PROJECT, metadata={"run": "1"}, limit=2)
    assert ([job.id for job in first.data], first.has_more) == ([ids[5], ids[3]], True)
    rest = store.jobs.list_jobs(PROJECT, metadata={"run": "1"}, limit=2, after=ids[3])
    assert ([job.id for job in rest.data], rest.has_more) == ([ids[1]], False)


def test_an_unknown_cursor_names_the_parameter(store):
    job = create_job(store, new_job())
    theirs = create_job(store, new_job(project_id=OTHER))
    their_event = store.jobs.list_events(OTHER, theirs.id).data[0].id
    lists = {
        theirs.id: lambda after: store.jobs.list_jobs(PROJECT, after=after),
        their_event: lambda after: store.jobs.list_events(PROJECT, job.id, after=after),
        "ftckpt_other": lambda after: store.jobs.list_checkpoints(PROJECT, job.id, after=after),
    }
    for foreign, read in lists.items():
        for after in (foreign, "nowhere"):
            with pytest.raises(SpecError) as caught:
                read(after)
            assert caught.value.param == "after"


def test_a_verb_is_written_with_its_event(store):
    job = create_job(store, new_job(state=State.QUEUED))

    paused = store.jobs.request(PROJECT, job.id, Verb.PAUSE)
    assert (paused.state, paused.desired, paused.generation) == (State.PAUSED, Desired.PAUSE, 2)
    assert paused.version == job.version + 1
    assert store.jobs.request(PROJECT, job.id, Verb.PAUSE) == paused, "repeating it changes nothing"

    assert store.jobs.request(PROJECT, job.id, Verb.RESUME).state is State.QUEUED
    cancelled = store.jobs.request(PROJECT, job.id, Verb.CANCEL)
    assert cancelled == store.jobs.get_job(PROJECT, job.id)
    assert (cancelled.state, cancelled.reason) == (State.CANCELLED, Reason.USER_CANCELLED)
    assert abs(cancelled.finished_at - store.now()) < 60
    with pytest.raises(SpecError, match="been cancelled and cannot be paused"):
        store.jobs.request(PROJECT, job.id, Verb.PAUSE)

    messages = [event.message for event in store.jobs.list_events(PROJECT, job.id).data]
    assert messages[:-1] == ["Cancel requested.", "Resume requested.", "Pause requested."]


def test_a_verb_that_another_change_has_overtaken_is_tried_again(store, monkeypatch):
    job = create_job(store, new_job(state=State.QUEUED))
    write = jobs_of_users.write_job
    tries = []

    def overtaken_once(connection, old, new):
        tries.append(new.state)
        return len(tries) > 1 and write(connection, old, new)

    monkeypatch.setattr(jobs_of_users, "write_job", overtaken_once)
    assert store.jobs.request(PROJECT, job.id, Verb.PAUSE).state is State.PAUSED
    assert tries == [State.PAUSED] * 2
    assert len(store.jobs.list_events(PROJECT, job.id).data) == 2, "its event is there once"
    monkeypatch.setattr(jobs_of_users, "write_job", lambda connection, old, new: False)
    with pytest.raises(ConflictError):
        store.jobs.request(PROJECT, job.id, Verb.RESUME)
    assert store.jobs.get_job(PROJECT, job.id).state is State.PAUSED


def test_a_verb_announces_a_job_whose_state_it_changes_alone(store, monkeypatch):
    announced = []
    monkeypatch.setattr(
        jobs_of_users, "announce", lambda connection, job: announced.append((job.id, job.state))
    )
    runs = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    waits = create_job(store, new_job(state=State.QUEUED))
    for job in (waits, runs):
        store.jobs.request(PROJECT, job.id, Verb.PAUSE)
    assert announced == [(waits.id, State.PAUSED)], "the other runs until its checkpoint"


def test_any_number_of_ids_is_asked_about_in_pieces(store, monkeypatch):
    monkeypatch.setattr(jobs_of_users, "_AT_ONCE", 2)
    ids = [create_job(store, new_job()).id for _ in range(5)]
    assert store.jobs.known_jobs([*ids, "ftjob-none"]) == set(ids)
    assert store.jobs.known_jobs([]) == set()


def test_verbs_at_the_same_moment_are_all_counted(store):
    job = create_job(store, new_job(state=State.QUEUED))
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for verb in (Verb.PAUSE, Verb.RESUME) * 3:
            store.jobs.request(PROJECT, job.id, verb)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(ask) for _ in range(8)]:
            future.result(timeout=60)
    stored = store.jobs.get_job(PROJECT, job.id)
    asked = len(store.jobs.list_events(PROJECT, job.id, limit=1000).data) - 1
    assert (stored.version, stored.generation) == (1 + asked, 1 + asked)
    assert asked >= 1


def test_events_newest_first_and_latest_metrics(store):
    job = create_job(store, new_job())
    assert store.jobs.latest_metrics(job.id) is None
    claimed = claim(store)
    rows = [
        NewEvent(
            level="info",
            message=f"Step {n}",
            created_at=float(n),
            metrics=Metrics(step=n, total_steps=9),
            source=(0, n),
        )
        for n in range(1, 6)
    ]
    assert store.leases.apply(
        claimed, JobChange(job=claimed.job, events=[*rows, NewEvent(level="warn", message="done")])
    )

    page = store.jobs.list_events(PROJECT, job.id, limit=3)
    assert [event.message for event in page.data] == ["done", "Step 5", "Step 4"]
    assert page.has_more
    assert page.data[0].created_at == claimed.now
    assert page.data[1].created_at == 5.0
    assert page.data[1].metrics == Metrics(step=5, total_steps=9)
    rest = store.jobs.list_events(PROJECT, job.id, limit=4, after=page.data[-1].id)
    assert [event.message for event in rest.data][:3] == ["Step 3", "Step 2", "Step 1"]
    assert not rest.has_more
    assert store.jobs.latest_metrics(job.id) == Metrics(step=5, total_steps=9)


def test_who_adds_an_event_to_a_job_holds_its_row(emptied_postgres_url):
    """Else one that is stored in the same moment could become visible first, and a follower would
    never see this one.
    """
    store = open_store(emptied_postgres_url)
    store.projects.ensure_project(PROJECT, "acme")
    job = create_job(store, new_job())
    held = []

    def probe(connection, cursor, statement, *_):
        if statement.startswith("INSERT INTO events"):
            with store._engine.connect() as another:
                row = (
                    select(jobs.c.id)
                    .where(jobs.c.id == job.id)
                    .with_for_update(key_share=True, skip_locked=True)
                )
                held.append(another.execute(row).one_or_none() is None)

    event.listen(store._engine, "before_cursor_execute", probe)
    store.jobs.add_events(job, [NewEvent(level="info", message="told")])
    assert held == [True]
    store.close()


def test_the_latest_validation_is_found_behind_steps_without_one(store):
    job = create_job(store, new_job())
    claimed = claim(store)
    rows = [Metrics(step=n, total_steps=9, valid_loss=1.5 if n == 2 else None) for n in range(1, 6)]
    events = [
        NewEvent(level="info", message="a step", metrics=row, source=(0, row.step)) for row in rows
    ]
    assert store.jobs.latest_validation(job.id) is None
    assert store.leases.apply(claimed, JobChange(job=claimed.job, events=events))
    assert store.jobs.latest_validation(job.id) == rows[1]


def test_checkpoints_highest_step_first_each_from_its_newest_attempt(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    claimed = claim(store)
    made = {
        (s, a): new_checkpoint(job, s, a, metrics=Metrics(step=s, total_steps=9))
        for s, a in [(2, 1), (4, 1), (4, 2), (6, 2)]
    }
    assert store.leases.apply(claimed, JobChange(job=claimed.job, checkpoints=list(made.values())))

    assert store.jobs.list_checkpoints(PROJECT, job.id).data == [made[6, 2], made[4, 2], made[2, 1]]
    page = store.jobs.list_checkpoints(PROJECT, job.id, limit=1)
    assert (page.data, page.has_more) == ([made[6, 2]], True)
    rest = store.jobs.list_checkpoints(PROJECT, job.id, after=made[6, 2].id)
    assert (rest.data, rest.has_more) == ([made[4, 2], made[2, 1]], False)


def test_what_a_worker_says_cannot_make_a_job_unwritable(store):
    job = create_job(store, new_job())
    claimed = claim(store)
    broken = Metrics(step=1, total_steps=2, train_loss=float("nan"), grad_norm=float("inf"))
    error = {"code": "x", "message": "nul \x00 and \ud800", "param": None}
    event = NewEvent(level="error", message="a\x00b", metrics=broken, source=(0, 0))
    assert store.leases.apply(
        claimed, JobChange(job=replace(claimed.job, error=error), events=[event])
    )

    assert store.jobs.latest_metrics(job.id) == Metrics(step=1, total_steps=2)
    assert store.jobs.list_events(PROJECT, job.id).data[0].message == "a\ufffdb"
    assert store.jobs.get_job(PROJECT, job.id).error == {
        "code": "x",
        "message": "nul \ufffd and ?",
        "param": None,
    }


def test_a_job_needs_a_project(store):
    with pytest.raises(ConflictError):
        create_job(store, new_job(project_id="proj_nowhere", id=new_id("ftjob-")))


def test_jobs_without_metadata(store):
    requests = [{}, {"metadata": None}, {"metadata": {}}, {"metadata": {"metadata": "null"}}]
    created = [
        create_job(store, new_job(request={"training_file": "f", **request})).id
        for request in requests
    ]

    assert [job.id for job in store.jobs.list_jobs(PROJECT, metadata="none").data] == [
        created[1],
        created[0],
    ]


def test_what_is_resumed_counts_towards_the_limit_of_what_waits(store):
    store.projects.update_project(PROJECT, limits={"max_queued": 2})
    paused = []
    for _ in range(3):
        job = create_job(store, new_job(state=State.QUEUED))
        paused.append(store.jobs.request(PROJECT, job.id, Verb.PAUSE))
    assert {job.state for job in paused} == {State.PAUSED}
    for job in paused[:2]:
        assert store.jobs.request(PROJECT, job.id, Verb.RESUME).state is State.QUEUED
    with pytest.raises(LimitError, match="2 jobs of this project wait, and 2 may"):
        store.jobs.request(PROJECT, paused[2].id, Verb.RESUME)
    assert store.jobs.get_job(PROJECT, paused[2].id).state is State.PAUSED
    store.jobs.request(PROJECT, paused[0].id, Verb.CANCEL)
    assert store.jobs.request(PROJECT, paused[2].id, Verb.RESUME).state is State.QUEUED
