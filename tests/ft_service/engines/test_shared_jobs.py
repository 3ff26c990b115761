"""Jobs that share an engine, moved by a real reconciler, with real supervisors and an engine that
follows scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.host import processes
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import ALONE, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.store.engines import EngineRecord
from ft_service.store.sql import Store
from tests.support.attempts import supervisor_of, wait_for
from tests.support.engines import add_sharing_job, engine_launcher, engine_reconciler
from tests.support.reconciling import PROJECT, add_job, get, messages, new_store, step_until


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = new_store(folder)
    yield store
    store.close()


def turn_until(reconciler, what):
    """Give jobs their turns until `what` is true, and return it."""

    @wraps(what)
    def turned():
        for _ in range(20):
            reconciler.step()
        return what()

    return wait_for(turned)


def engines(store: Store) -> list[EngineRecord]:
    return store.engines.live_engines()


def add_jobs(store: Store, *job_ids: str) -> list[str]:
    for job_id in job_ids:
        add_sharing_job(store, job_id)
    return list(job_ids)


def queue_first(store: Store, reconciler, *job_ids: str) -> None:
    """Have all jobs validated before one is placed, as those of a sweep are."""
    while any(get(store, job_id).state is State.VALIDATING for job_id in job_ids):
        claim = reconciler._claim_active()
        if claim is not None:
            reconciler._reconcile(*claim)


def phases(store: Store, *job_ids: str) -> list[Phase | None]:
    return [get(store, job_id).phase for job_id in job_ids]


def test_two_jobs_share_an_engine_and_its_slots(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(folder, store, "*:event,hold,checkpoint=3,succeed")
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    turn_until(reconciler, lambda: phases(store, *two) == [Phase.TRAINING] * 2)
    (engine,) = engines(store)
    assert [seat.id for seat in engine.seats] == ["ftjob-1", "ftjob-2"]
    assert [get(store, job_id).engine_id for job_id in two] == [engine.id] * 2
    assert store.leases.free_slots(engine.host, 2) == []
    start = Attempt(RunDir(folder / "runs/ftjob-2"), 1).read_start()
    assert start is not None
    assert (start.engine, start.world_size, start.slots) == (
        str(folder / "engines" / engine.id),
        2,
        [0, 1],
    )
    assert not (folder / "runs/ftjob-2/attempts/1/supervisor.json").exists()
    (folder / "go").touch()
    for job_id in two:
        job = step_until(reconciler, store, job_id=job_id)
        assert (job.state, job.trained_tokens, job.engine_id) == (State.SUCCEEDED, 100, None)
        assert [
            checkpoint.name for checkpoint in store.jobs.list_checkpoints(PROJECT, job_id).data
        ] == ["step-3-a1"]
    turn_until(reconciler, lambda: not engines(store))
    assert store.leases.free_slots(engine.host, 2) == [0, 1]
    assert any(
        f"has a seat in the engine {engine.id}" in message for message in messages(store, "ftjob-2")
    )


def test_a_job_without_company_and_one_that_wants_no_engine_run_alone(
    folder: Path, store: Store
) -> None:
    reconciler = engine_reconciler(folder, store, "*:event,hold,succeed", slots=6)
    add_jobs(store, "ftjob-1")
    add_job(store, "ftjob-2")  # its ranks choose what is "auto"
    turn_until(reconciler, lambda: phases(store, "ftjob-1", "ftjob-2") == [Phase.TRAINING] * 2)
    assert engines(store) == []
    assert (folder / "runs/ftjob-1/attempts/1/supervisor.json").exists()
    (folder / "go").touch()
    assert step_until(reconciler, store).state is State.SUCCEEDED
    assert step_until(reconciler, store, job_id="ftjob-2").state is State.SUCCEEDED


def test_without_the_operators_leave_every_job_runs_alone(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(folder, store, "*:event,succeed", most_seats=0, slots=4)
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    assert [step_until(reconciler, store, job_id=job_id).state for job_id in two] == [
        State.SUCCEEDED
    ] * 2
    assert not (folder / "engines").exists()


def test_the_first_job_of_a_sweep_starts_an_engine_though_the_others_are_still_validated(
    folder: Path, store: Store
) -> None:
    reconciler = engine_reconciler(folder, store, "*:event,hold,succeed")
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET sweep_id = 'sweep-1'"))
    turn_until(reconciler, lambda: phases(store, *two) == [Phase.TRAINING] * 2)
    assert [get(store, job_id).engine_id for job_id in two] == [engines(store)[0].id] * 2
    (folder / "go").touch()
    assert [step_until(reconciler, store, job_id=job_id).state for job_id in two] == [
        State.SUCCEEDED
    ] * 2


def test_a_job_resumed_on_other_ranks_leaves_those_it_shared_with(
    folder: Path, store: Store
) -> None:
    reconciler = engine_reconciler(folder, store, "*:checkpoint=2,event,hold,succeed", slots=4)
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    turn_until(reconciler, lambda: phases(store, *two) == [Phase.TRAINING] * 2)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    step_until(reconciler, store, State.PAUSED)
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME, 1)
    turn_until(reconciler, lambda: phases(store, "ftjob-1") == [Phase.TRAINING])
    assert (get(store).engine_id, get(store).slots) == (None, 1)
    (folder / "go").touch()
    assert [step_until(reconciler, store, job_id=job_id).state for job_id in two] == [
        State.SUCCEEDED
    ] * 2


def test_a_job_ends_in_its_engine_when_its_time_is_up(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(
        folder, store, "*:checkpoint=2,event,hold,succeed", idle_seconds=30.0
    )
    add_sharing_job(store, "ftjob-1", max_seconds=1)
    add_sharing_job(store, "ftjob-2")
    queue_first(store, reconciler, "ftjob-1", "ftjob-2")
    assert step_until(reconciler, store).reason is Reason.TIME_LIMIT
    assert len(engines(store)) == 1
    (folder / "go").touch()
    assert step_until(reconciler, store, job_id="ftjob-2").state is State.SUCCEEDED


def test_each_seat_is_paused_resumed_and_cancelled_for_itself(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(
        folder, store, "*:checkpoint=2,event,hold,succeed", idle_seconds=30.0
    )
    three = add_jobs(store, "ftjob-1", "ftjob-2", "ftjob-3")
    queue_first(store, reconciler, *three)
    turn_until(reconciler, lambda: phases(store, *three) == [Phase.TRAINING] * 3)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    store.jobs.request(PROJECT, "ftjob-2", Verb.CANCEL)
    assert step_until(reconciler, store, State.PAUSED).engine_id is None
    assert step_until(reconciler, store, State.CANCELLED, job_id="ftjob-2").engine_id is None
    (engine,) = engines(store)
    assert [seat.id for seat in engine.seats] == ["ftjob-3"]
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME)
    turn_until(reconciler, lambda: phases(store, "ftjob-1") == [Phase.TRAINING])
    job = get(store)
    assert (job.attempt, job.engine_id, job.failures) == (2, engine.id, 0)
    start = Attempt(RunDir(folder / "runs/ftjob-1"), 2).read_start()
    assert start is not None
    assert start.checkpoint == "step-2-a1"
    (folder / "go").touch()
    assert [
        step_until(reconciler, store, job_id=job_id).state for job_id in ("ftjob-1", "ftjob-3")
    ] == [State.SUCCEEDED] * 2
    # Which the idle engine keeps from its slots for half a minute, unless it is asked to end.
    add_job(store, "ftjob-4")
    assert step_until(reconciler, store, job_id="ftjob-4").state is State.SUCCEEDED


def test_the_failure_of_one_seat_is_its_own(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(
        folder, store, "ftjob-1:event,refuse;*:event,hold,succeed", idle_seconds=30.0
    )
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    assert step_until(reconciler, store).reason is Reason.PERMANENT_ERROR
    (folder / "go").touch()
    job = step_until(reconciler, store, job_id="ftjob-2")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1)


def test_the_job_that_ends_its_engines_fails_and_the_others_succeed(
    folder: Path, store: Store
) -> None:
    """Eight share an engine, then two engines of four follow each other, and so on until the guilty
    one dies alone.
    """
    scripts = "ftjob-5:event,hold,die;*:event,hold,event,event,checkpoint=3,event,succeed"
    reconciler = engine_reconciler(folder, store, scripts, idle_seconds=0.1)
    eight = add_jobs(store, *(f"ftjob-{number}" for number in range(1, 9)))
    queue_first(store, reconciler, *eight)
    turn_until(reconciler, lambda: phases(store, *eight) == [Phase.TRAINING] * 8)
    (folder / "go").touch()
    turn_until(reconciler, lambda: get(store, "ftjob-5").state is State.FAILED)
    job = get(store, "ftjob-5")
    assert (job.reason, job.failures) == (Reason.WORKER_KILLED, decisions.MAX_FAILURES)
    last = Attempt(RunDir(folder / "runs" / job.id), job.attempt).read_start()
    assert (last and last.engine) is None, "it died alone, at the last"
    lost = [
        folder for folder in (folder / "engines").iterdir() if (folder / "losses.json").exists()
    ]
    assert 1 <= len(lost) <= 4
    others = [job_id for job_id in eight if job_id != "ftjob-5"]
    turn_until(reconciler, lambda: all(get(store, job_id).finished_at for job_id in others))
    assert {(get(store, job_id).state, get(store, job_id).failures) for job_id in others} == {
        (State.SUCCEEDED, 0)
    }


def test_who_was_alone_in_a_lost_engine_goes_on_alone(folder: Path, store: Store) -> None:
    reconciler = engine_reconciler(
        folder,
        store,
        "ftjob-1:event,succeed;*:event,hold,checkpoint=4,hold,succeed",
        idle_seconds=30.0,
    )
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    assert step_until(reconciler, store).state is State.SUCCEEDED
    turn_until(reconciler, lambda: phases(store, "ftjob-2") == [Phase.TRAINING])
    (engine,) = engines(store)
    processes.kill(supervisor_of(RunDir(folder / "engines" / engine.id)))
    turn_until(
        reconciler,
        lambda: get(store, "ftjob-2").attempt == 2 and phases(store, "ftjob-2") == [Phase.TRAINING],
    )
    job = get(store, "ftjob-2")
    assert (job.failures, job.losses, job.engine_id, job.fault_group) == (0, 1, None, ALONE)
    assert (job.reason, engines(store)) == (Reason.WORKER_KILLED, [])
    (folder / "go").touch()
    job = step_until(reconciler, store, job_id="ftjob-2")
    assert (job.state, job.fault_group) == (State.SUCCEEDED, None), "it has made a checkpoint since"


@pytest.mark.parametrize("most_seats", [8, 0])
def test_a_restarted_service_finds_its_engine_again(
    folder: Path, store: Store, most_seats: int
) -> None:
    """Also if the operator has turned engines off meanwhile."""
    scripts = "*:event,hold,succeed"
    reconciler = engine_reconciler(folder, store, scripts)
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    turn_until(reconciler, lambda: phases(store, *two) == [Phase.TRAINING] * 2)
    successor = engine_reconciler(folder, store, scripts, most_seats=most_seats)
    for _ in range(5):
        successor.step()
    (folder / "go").touch()
    assert [step_until(successor, store, job_id=job_id).attempt for job_id in two] == [1, 1]


def test_a_job_of_higher_priority_takes_the_slots_of_an_engine(folder: Path, store: Store) -> None:
    play = "ftjob-3:event,succeed;*:checkpoint=1,event,hold,succeed"
    reconciler = engine_reconciler(folder, store, play, preempt_after=0.0, idle_seconds=30.0)
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    turn_until(reconciler, lambda: phases(store, *two) == [Phase.TRAINING] * 2)
    add_job(store, "ftjob-3", priority=5)
    assert step_until(reconciler, store, job_id="ftjob-3").state is State.SUCCEEDED
    (folder / "go").touch()
    for job_id in two:
        job = step_until(reconciler, store, job_id=job_id)
        assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 0)


def test_an_engine_that_cannot_be_started_costs_its_jobs_an_attempt(
    folder: Path, store: Store, monkeypatch
) -> None:
    reconciler = engine_reconciler(folder, store, "*:event,succeed")
    two = add_jobs(store, "ftjob-1", "ftjob-2")
    queue_first(store, reconciler, *two)
    monkeypatch.setattr("ft_service.launcher.local_launcher.program", lambda: ["/no/such/program"])
    wait_for(lambda: (reconciler.step() or True) and get(store).reason is Reason.LAUNCH_FAILED)
    monkeypatch.undo()
    assert [step_until(reconciler, store, job_id=job_id).state for job_id in two] == [
        State.SUCCEEDED
    ] * 2
    turn_until(reconciler, lambda: not engines(store))
    assert store.leases.free_slots(engine_launcher(folder, "").host, 2) == [0, 1]
