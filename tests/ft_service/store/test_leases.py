from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from sqlalchemy import Connection, create_engine, event, func, select, text, update

from ft_service.jobs.decisions import Become, decide, placed, too_large, validated
from ft_service.jobs.estimates import Paces
from ft_service.jobs.states import Ended, Job, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.documents import Desired, Exit, ExitReason
from ft_service.store import jobs as jobs_of_users
from ft_service.store import leases, queue
from ft_service.store.records import Claim, JobChange, NewEvent
from ft_service.store.tables import checkpoints, events, files, jobs, slots
from tests.support.creating import create_job
from tests.support.records import (
    PROJECT,
    claim,
    claim_next,
    new_checkpoint,
    new_file,
    new_job,
    place,
)


def try_claim(store, *, host="h1", lease_seconds=60.0, idle_seconds=0.0) -> Claim | None:
    return store.leases.claim(
        host=host, owner="test", lease_seconds=lease_seconds, idle_seconds=idle_seconds
    )


def count(url: str, table) -> int:
    engine = create_engine(url)
    with engine.connect() as connection:
        number = connection.scalars(select(func.count()).select_from(table)).one()
    engine.dispose()
    return number


@pytest.mark.parametrize(
    ("state", "take"), [(State.VALIDATING, try_claim), (State.QUEUED, claim_next)]
)
def test_eight_threads_claim_64_jobs_each_once(store, state, take):
    ids = {create_job(store, new_job(state=state)).id for _ in range(64)}
    claimed: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        while len(claimed) < len(ids):  # None alone can mean that another thread was quicker
            if won := take(store):
                claimed.append(won.job.id)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work) for _ in range(8)]:
            future.result(timeout=120)
    assert len(claimed) == 64
    assert set(claimed) == ids
    assert take(store) is None


@pytest.mark.parametrize(
    ("values", "claimable"),
    [
        ({"state": State.VALIDATING}, True),
        ({"state": State.RUNNING, "phase": Phase.TRAINING, "host": "h1", "attempt": 1}, True),
        ({"state": State.RUNNING, "phase": Phase.TRAINING, "host": "h2", "attempt": 1}, False),
        ({"state": State.CANCELLED, "phase": Phase.STOPPING, "host": "h1", "attempt": 1}, True),
        ({"state": State.CANCELLED, "phase": Phase.STOPPING, "host": "h2", "attempt": 1}, False),
        ({"state": State.CANCELLED}, False),
        ({"state": State.QUEUED}, False),
        ({"state": State.PAUSED}, False),
        ({"state": State.SUCCEEDED}, False),
        ({"state": State.FAILED}, False),
    ],
)
def test_which_jobs_need_attention(store, values, claimable):
    job = create_job(store, new_job(**values))
    claimed = try_claim(store)
    assert (claimed is not None) == claimable
    if claimed:
        assert claimed.job == job
        assert abs(claimed.now - store.now()) < 60


def test_a_lease_keeps_others_away_until_it_expires(store):
    job = create_job(store, new_job())
    assert try_claim(store) is not None
    assert try_claim(store) is None

    other = create_job(store, new_job())
    late = try_claim(store, lease_seconds=0)
    assert late is not None
    assert late.job.id == other.id
    current = try_claim(store)
    assert current is not None
    assert current.job.id == other.id

    event = NewEvent(level="info", message="too late")
    assert not store.leases.apply(
        late, JobChange(job=replace(late.job, state=State.QUEUED), events=[event])
    )
    assert store.jobs.get_job(PROJECT, other.id) == other, "a stale token writes nothing"
    assert len(store.jobs.list_events(PROJECT, other.id).data) == 1
    assert try_claim(store) is None, "a stale token does not end the newer lease"
    assert store.leases.apply(current, JobChange(job=replace(current.job, state=State.QUEUED)))
    assert store.jobs.get_job(PROJECT, other.id).state is State.QUEUED
    assert store.jobs.get_job(PROJECT, job.id) == job


def test_an_expired_lease_that_nobody_took_still_writes(store):
    create_job(store, new_job())
    claimed = claim(store, lease_seconds=-5)
    assert store.leases.apply(claimed, JobChange(job=replace(claimed.job, state=State.QUEUED)))


def test_a_claim_writes_once(store):
    create_job(store, new_job())
    claimed = claim(store)
    assert store.leases.apply(claimed, JobChange(job=claimed.job))
    assert not store.leases.apply(claimed, JobChange(job=claimed.job))


def test_the_job_looked_at_longest_ago_comes_first(store):
    ids = [create_job(store, new_job()).id for _ in range(3)]
    seen = []
    for _ in range(6):
        claimed = claim(store)
        seen.append(claimed.job.id)
        assert store.leases.apply(claimed, JobChange(job=claimed.job))
    assert sorted(seen[:3]) == sorted(ids)
    assert seen[3:] == seen[:3]


def test_the_search_on_postgresql_begins_at_the_oldest_note(store):
    """So it passes by what a long transaction keeps of rows that were written since."""
    old, asked = (create_job(store, new_job()).id for _ in range(2))
    for _ in range(2):
        claimed = claim(store)
        assert store.leases.apply(claimed, JobChange(job=claimed.job))
    store.leases._since_until = float("-inf")
    assert try_claim(store, idle_seconds=60.0) is None
    with store.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.id == old).values(looked_at=1.0))
    found = try_claim(store, idle_seconds=60.0)
    assert (found is None) == store.is_shared, "no note is that old"
    store.leases.look_again(asked)
    found = try_claim(store, idle_seconds=60.0)
    assert found is not None
    assert found.job.id == asked
    store.leases._since_until = float("-inf")
    found = try_claim(store, idle_seconds=60.0)
    assert (found is not None) == store.is_shared, "SQLite's was found before"


def test_what_never_changes_of_a_job_is_not_written_again_by_postgresql(store):
    """Of a job as large as they are; else each of its reports writes all of that again."""
    create_job(store, new_job(request={"training_file": secrets.token_hex(1500)}))
    if not store.is_shared:
        return
    beside = text("SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE relname = 'jobs'")
    with store.reading() as connection:
        assert connection.scalars(beside).one() > 0


def test_new_jobs_and_running_ones_do_not_keep_each_other_waiting(store):
    """However many are new: each of those has never been looked at."""
    new, running = (
        create_job(store, new_job(**values))
        for values in (
            {},
            {"state": State.RUNNING, "phase": Phase.TRAINING, "host": "h1", "attempt": 1},
        )
    )
    with store.writing() as connection:
        connection.execute(
            jobs.update().where(jobs.c.id == running.id).values(looked_at=store.now() - 200)
        )
    for first, new_first in ((running, False), (new, True), (new, False)):
        claimed = store.leases.claim(
            host="h1", owner="t", lease_seconds=60, idle_seconds=100.0, new_first=new_first
        )
        assert claimed is not None
        assert claimed.job.id == first.id
        assert store.leases.apply(claimed, JobChange(job=claimed.job))
        store.leases.look_again(new.id)


def test_a_released_job_frees_its_own_slots_and_no_others(store):
    first = place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1])
    second = place(store, create_job(store, new_job(state=State.QUEUED, slots=1)), [2])
    claimed = claim(store)
    while claimed.job.id != first.id:
        claimed = claim(store)
    assert store.leases.apply(
        claimed,
        JobChange(job=replace(claimed.job, state=State.PAUSED, phase=None), release_slots=True),
    )
    assert (store.leases.held_slots(first.id), store.leases.held_slots(second.id)) == ([], [2])
    assert store.leases.free_slots("h1", 4) == [0, 1, 3]


def test_a_job_is_left_alone_for_idle_seconds_unless_something_happens(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    claimed = try_claim(store, idle_seconds=1000)
    assert claimed is not None, "it has just begun to run"
    assert store.leases.apply(claimed, JobChange(job=replace(claimed.job, ingested=3)))
    assert try_claim(store, idle_seconds=1000) is None

    store.jobs.request(PROJECT, job.id, Verb.PAUSE)
    claimed = try_claim(store, idle_seconds=1000)
    assert claimed is not None
    assert claimed.job.desired is Desired.PAUSE


def test_a_verb_during_a_claim_undoes_the_reconcilers_write(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0, 1])
    claimed = claim(store)
    store.jobs.request(PROJECT, job.id, Verb.CANCEL)

    done = decide(
        claimed.job, Ended(Exit(code=0, reason=ExitReason.SUCCEEDED, message="")), claimed.now
    )
    assert isinstance(done, Become)
    event = NewEvent(level="info", message="late", source=(0, 0))
    assert not store.leases.apply(
        claimed, JobChange(job=done.job, events=[event], release_slots=True)
    )

    assert store.jobs.get_job(PROJECT, job.id).state is State.CANCELLED
    assert store.leases.free_slots("h1", 4) == [2, 3]
    assert "late" not in [event.message for event in store.jobs.list_events(PROJECT, job.id).data]
    again = claim(store)
    assert again.job.state is State.CANCELLED, "the lease has ended with the lost write"


def test_a_taken_slot_undoes_the_whole_change(store, store_url):
    place(store, create_job(store, new_job(state=State.QUEUED)), [0, 1])
    second = create_job(store, new_job(state=State.QUEUED))
    claimed = claim_next(store)
    assert claimed is not None
    before = {table: count(store_url, table) for table in (events, checkpoints, files, slots)}
    change = JobChange(
        job=placed(claimed.job, "h1"),
        events=[NewEvent(level="info", message="Placed.")],
        checkpoints=[new_checkpoint(second, 1)],
        files=[new_file()],
        take_slots=[2, 1],
    )
    assert not store.leases.apply(claimed, change)

    assert store.jobs.get_job(PROJECT, second.id) == second
    assert {table: count(store_url, table) for table in before} == before
    assert store.leases.free_slots("h1", 4) == [2, 3]
    claimed = claim_next(store)
    assert claimed is not None, "the lease has ended with the lost write"
    assert store.leases.apply(
        claimed, replace(change, job=placed(claimed.job, "h1"), take_slots=[2, 3])
    )
    assert store.leases.free_slots("h1", 5) == [4]


def test_slots_belong_to_a_host_and_are_released(store):
    first = place(store, create_job(store, new_job(state=State.QUEUED)), [2, 0])
    second = place(store, create_job(store, new_job(state=State.QUEUED)), [0, 1], host="h2")
    assert store.leases.held_slots(first.id) == [0, 2]
    assert store.leases.held_slots(second.id) == [0, 1]
    assert store.leases.free_slots("h1", 4) == [1, 3]
    assert store.leases.free_slots("h2", 4) == [2, 3]
    assert store.leases.free_slots("h3", 2) == [0, 1]
    assert store.leases.free_slots("h1", 1) == []

    claimed = claim(store, host="h1")
    assert store.leases.apply(
        claimed,
        JobChange(job=replace(claimed.job, state=State.QUEUED, phase=None), release_slots=True),
    )
    assert store.leases.free_slots("h1", 4) == [0, 1, 2, 3]
    assert store.leases.held_slots(first.id) == []
    assert store.leases.held_slots(second.id) == [0, 1]


def test_a_change_is_written_whole(store):
    create_job(store, new_job())
    claimed = claim(store)
    file = new_file(purpose="fine-tune-results")
    before = store.now()
    change = JobChange(
        job=validated(claimed.job, None, claimed.now),
        events=[NewEvent(level="info", message="Files are valid.")],
        checkpoints=[new_checkpoint(claimed.job, 3)],
        files=[file],
    )
    assert store.leases.apply(claimed, change)

    job = store.jobs.get_job(PROJECT, claimed.job.id)
    assert job == replace(
        claimed.job, state=State.QUEUED, version=claimed.job.version + 1, queued_at=job.queued_at
    )
    assert job.queued_at is not None
    assert job.queued_at >= claimed.now
    assert store.jobs.list_events(PROJECT, job.id).data[0].message == "Files are valid."
    assert store.jobs.list_checkpoints(PROJECT, job.id).data[0].step == 3
    stored = store.files.get_file(PROJECT, file.id)
    assert before <= stored.created_at <= store.now()
    assert stored == replace(file, created_at=stored.created_at)


def test_events_and_checkpoints_read_twice_are_stored_once(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    first = [
        NewEvent(level="info", message=f"{s}/{n}", source=(s, n))
        for s in range(2)
        for n in range(3)
    ]
    more = [*first, NewEvent(level="info", message="2/0", source=(2, 0))]
    for rows in (first, more):
        claimed = claim(store)
        assert store.leases.apply(
            claimed, JobChange(job=claimed.job, events=rows, checkpoints=[new_checkpoint(job, 5)])
        )
    messages = [event.message for event in store.jobs.list_events(PROJECT, job.id).data]
    assert messages[:-1] == ["2/0", "1/2", "1/1", "1/0", "0/2", "0/1", "0/0"]
    assert len(store.jobs.list_checkpoints(PROJECT, job.id).data) == 1

    claimed = claim(store)
    own = NewEvent(level="info", message="own")
    # read under attempt 1, though the change begins attempt 2
    assert store.leases.apply(
        claimed, JobChange(job=replace(claimed.job, attempt=2), events=[first[0], own, own])
    )
    claimed = claim(store)
    assert store.leases.apply(claimed, JobChange(job=claimed.job, events=first[:1]))
    messages = [event.message for event in store.jobs.list_events(PROJECT, job.id).data]
    assert messages[:3] == ["0/0", "own", "own"], (
        "another attempt's segments and the service's own events are new"
    )


def test_priority_then_creation_decides_what_is_next(store):
    names = ["low", "first", "second", "high"]
    for name, priority in zip(names, [-1, 0, 0, 5], strict=True):
        create_job(store, new_job(id=f"ftjob-{name}", state=State.QUEUED, priority=priority))
    order = [claimed.job.id.removeprefix("ftjob-") for _ in names if (claimed := claim_next(store))]
    assert order == ["high", "first", "second", "low"]
    assert claim_next(store) is None


def test_two_jobs_of_a_project_are_placed_in_the_same_moment(store):
    for _ in range(2):
        create_job(store, new_job(state=State.QUEUED))
    claims = [claim_next(store), claim_next(store)]
    both = threading.Barrier(2)

    def meet(*args) -> None:
        if args[2].startswith("INSERT INTO slots"):
            with suppress(threading.BrokenBarrierError):  # SQLite lets one write at a time
                both.wait(1.0)

    event.listen(store._engine, "after_cursor_execute", meet)

    def start(claimed: Claim, slot: int) -> bool:
        return store.leases.apply(
            claimed, JobChange(job=placed(claimed.job, "h1"), take_slots=[slot])
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, claims, (0, 1))) == [True, True]


def test_a_large_job_at_the_head_is_waited_for(store):
    place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    create_job(store, new_job(id="ftjob-large", state=State.QUEUED, slots=4, priority=1))
    create_job(store, new_job(id="ftjob-small", state=State.QUEUED, slots=1))
    assert claim_next(store, host_slots=4) is None
    claimed = claim_next(store, host_slots=5)
    assert claimed is not None
    assert claimed.job.id == "ftjob-large"


def test_back_off_and_foreign_hosts_are_passed_over(store):
    create_job(
        store,
        new_job(id="ftjob-later", state=State.QUEUED, priority=9, not_before=store.now() + 500),
    )
    create_job(
        store, new_job(id="ftjob-there", state=State.QUEUED, priority=8, host="h2", attempt=1)
    )
    create_job(
        store,
        new_job(
            id="ftjob-here",
            state=State.QUEUED,
            priority=7,
            host="h1",
            attempt=1,
            not_before=store.now() - 1,
        ),
    )
    claimed = claim_next(store, host="h1")
    assert claimed is not None
    assert claimed.job.id == "ftjob-here"
    assert claim_next(store, host="h1") is None
    assert claim_next(store, host="h2") is not None


AGES = {"idle_seconds": 0.5, "untended_seconds": 90.0, "since": 1.0}


@pytest.mark.parametrize(
    ("statement", "index", "values"),
    [
        (
            queue._FIRST_OF_EACH_PROJECT,
            "ix_jobs_queue_of_project",
            {"host_slots": 8, "unlimited": ["p1"]},
        ),
        (queue._MEASURED, "ix_jobs_measured", {}),
        (leases._CLAIM, "ix_jobs_attention", AGES),
        (leases._CLAIM_NEW_FIRST, "ix_jobs_attention", AGES),
        (leases._IDS_TO_LOOK_AT, "ix_jobs_attention", AGES),
        (leases._CLAIM_TOO_LARGE, "ix_jobs_queue", {"host_slots": 8}),
        (jobs_of_users._running_on(jobs_of_users._has_key("k")), "ix_jobs_attention", {}),
    ],
)
def test_claims_go_by_their_index(store, store_url, statement, index, values):
    """What keeps them quick with many ended jobs: only rows of the partial index are read, in its
    order.
    """
    create_job(store, new_job(state=State.SUCCEEDED))
    engine = create_engine(store_url)
    parameters = {"for_host": "h1", "owner": "o", "token": "t", "lease_seconds": 60.0} | values
    if isinstance(statement, dict):  # one for each kind of database
        statement = statement[engine.dialect.name]
    compiled = statement.compile(engine)
    expanded = compiled.construct_expanded_state(parameters)
    explain = "EXPLAIN QUERY PLAN" if engine.dialect.name == "sqlite" else "EXPLAIN"
    with engine.connect() as connection:
        if (
            engine.dialect.name == "postgresql"
        ):  # plans by what the table holds, and reads a small one whole
            _fill_with_ended_and_waiting(connection)
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            connection.execute(text("SET LOCAL enable_sort = off"))
        arguments = expanded.positional_parameters if compiled.positional else expanded.parameters
        plan = str(connection.exec_driver_sql(f"{explain} {expanded.statement}", arguments).all())
        connection.rollback()
    engine.dispose()
    assert index in plan
    assert "B-TREE" not in plan, "rows are sorted, not read in order"
    assert "Sort" not in plan
    assert "Seq Scan on jobs" not in plan


def _fill_with_ended_and_waiting(connection: Connection) -> None:
    """Copies of the one job there is: 2,000 that have ended, 400 queued of 2 projects, 20 that
    train, each with metadata; not committed.
    """
    copied = [column.name for column in jobs.columns if column.name != "position"]
    changed = {
        "id": "'ftjob-' || n",
        "project_id": "'p' || n % 2",
        "finished_at": "CASE WHEN n > 420 THEN n END",
        "looked_at": "n",
        "phase": f"CASE WHEN n <= 20 THEN '{Phase.TRAINING.value}' END",
        "state": f"CASE WHEN n <= 20 THEN '{State.RUNNING.value}' WHEN n <= 420 THEN "
        f"'{State.QUEUED.value}' ELSE state END",
        "work": "n",
    }
    values = ", ".join(changed.get(name, name) for name in copied)
    names = ", ".join(copied)
    # Asks for no projects of these names.
    connection.execute(text("SET LOCAL session_replication_role = replica"))
    connection.execute(
        text(f"INSERT INTO jobs ({names}) SELECT {values} FROM jobs, generate_series(1, 2420) AS n")
    )
    pairs = "SELECT position, 'k', 'v', project_id FROM jobs"
    connection.execute(
        text(f"INSERT INTO job_metadata (job_position, key, value, project_id) {pairs}")
    )
    connection.execute(text("ANALYZE jobs, job_metadata"))


def test_a_report_is_stored_without_a_claim_unless_somebody_has_one(store):
    running = create_job(store, new_job(state=State.RUNNING, phase=Phase.TRAINING, host="h1"))
    with store.writing() as connection:
        connection.execute(jobs.update().values(looked_at=1.0))
    here = {"host": "h1", "idle_seconds": 0.5}
    assert store.leases.ids_to_look_at(**here) == [running.id]
    assert store.leases.ids_to_look_at(**here | {"host": "h2"}) == []
    ((job, noted),), now = store.leases.jobs_to_look_at([running.id], **here)
    assert (noted, job) == (1.0, store.jobs.get_job(PROJECT, running.id))

    def stores(seen: Job, tokens: int) -> bool:
        change = JobChange(job=replace(seen, seen_tokens=tokens))
        return store.leases.apply(Claim(job=seen, token=None, now=now), change)

    assert stores(job, 5)
    assert not stores(job, 6), "it has changed since it was read"
    job = store.jobs.get_job(PROJECT, running.id)
    claim = store.leases.claim_given(job.id, host="h1", owner="test", lease_seconds=60.0)
    assert claim is not None
    assert store.leases.claim_given(job.id, host="h1", owner="b", lease_seconds=60.0) is None
    assert store.leases.ids_to_look_at(**here) == []
    assert not stores(job, 7), "another has the right"
    assert store.leases.apply(claim, JobChange(job=replace(claim.job, seen_tokens=8)))
    assert store.jobs.get_job(PROJECT, job.id).seen_tokens == 8


def test_a_job_larger_than_the_host_is_passed_by_and_told_once(store):
    large = create_job(store, new_job(id="ftjob-large", state=State.QUEUED, slots=4, priority=1))
    create_job(store, new_job(id="ftjob-small", state=State.QUEUED, slots=1))
    who = {"host": "h1", "owner": "test", "lease_seconds": 60.0}
    claimed = claim_next(store, host_slots=2)
    assert claimed is not None
    assert claimed.job.id == "ftjob-small"
    told = store.leases.claim_too_large(**who, host_slots=2)
    assert told is not None
    assert told.job.id == "ftjob-large"
    assert store.leases.apply(told, JobChange(job=too_large(told.job)))
    assert "needs 4 slots" in (store.jobs.get_job(PROJECT, large.id).pending or "")
    assert store.leases.claim_too_large(**who, host_slots=2) is None
    later = claim_next(store, host_slots=4)
    assert later is not None, "the host has grown"
    assert later.job.id == "ftjob-large"
    assert placed(later.job, "h1").pending is None


@pytest.mark.parametrize(
    ("elsewhere", "own_host", "told"), [(3, None, True), (4, None, False), (4, "h1", True)]
)
def test_a_job_is_told_that_it_is_too_large_if_no_host_has_room_for_it(
    store, elsewhere, own_host, told
):
    create_job(store, new_job(state=State.QUEUED, slots=4, host=own_host))
    store.queue.announce_host("h1", 2)
    store.queue.announce_host("h2", elsewhere)
    claimed = store.leases.claim_too_large(
        host="h1", owner="test", lease_seconds=60.0, host_slots=2
    )
    assert (claimed is not None) is told


def test_a_job_in_its_back_off_is_not_claimed_as_too_large(store):
    """It would be claimed again at once, in the place of all jobs that may start."""
    create_job(store, new_job(state=State.QUEUED, slots=4, not_before=store.now() + 100))
    assert (
        store.leases.claim_too_large(host="h1", owner="test", lease_seconds=60.0, host_slots=2)
        is None
    )


def test_a_host_that_is_renamed_keeps_its_jobs_slots_and_engines(store):
    running = create_job(store, new_job(state=State.QUEUED, slots=2))
    place(store, running, [0, 1], host="old")
    waiting = create_job(store, new_job(state=State.QUEUED, host="old"))
    other = create_job(store, new_job(state=State.QUEUED, host="new"))
    place(store, other, [1], host="new")
    store.queue.announce_host("old", 4)
    store.leases.move_host("old", "new")
    store.leases.move_host("old", "new")
    assert {store.jobs.get_job(PROJECT, job.id).host for job in (running, waiting, other)} == {
        "new"
    }
    assert (store.leases.held_slots(running.id), store.leases.held_slots(other.id)) == ([0, 2], [1])
    assert (store.leases.free_slots("old", 2), store.leases.free_slots("new", 4)) == ([0, 1], [3])
    assert try_claim(store, host="new") is not None
    assert store.queue.snapshot(Paces()).hosts == {}


def test_slots_that_were_taken_before_the_clock_went_back_were_held_for_no_time(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED, slots=2)), [0, 1])
    with store.writing() as connection:
        connection.execute(text("UPDATE slots SET taken_at = taken_at + 1000"))
        connection.execute(text("UPDATE jobs SET taken_at = taken_at + 1000"))
    claimed = claim(store)
    paused = replace(claimed.job, state=State.PAUSED, phase=None)
    assert store.leases.apply(claimed, JobChange(job=paused, release_slots=True))
    after = store.jobs.get_job(PROJECT, job.id)
    assert (after.held_seconds, after.slot_seconds) == (0.0, 0.0)


def test_a_job_rests_before_the_next_look_and_never_for_too_long(store):
    job = place(store, create_job(store, new_job(state=State.QUEUED)), [0])
    for asked, rests in ((5.0, 5.0), (1e6, leases.LONGEST_REST_SECONDS)):
        claimed = claim(store)
        change = JobChange(job=claimed.job, rest_seconds=asked)
        assert store.leases.apply(claimed, change)
        with store.reading() as connection:
            query = select(jobs.c.looked_at).where(jobs.c.id == job.id)
            looked_at = connection.scalars(query).one()
        assert looked_at == pytest.approx(claimed.now + rests, abs=0.01)
        with store.writing() as connection:
            connection.execute(text("UPDATE jobs SET looked_at = 0"))
