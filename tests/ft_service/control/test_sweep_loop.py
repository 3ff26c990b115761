"""A sweep's jobs through the reconciler, with attempts in memory: who is stopped, what stays, who
is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.control.jobs.reconciler import Reconciler
from ft_service.control.sweep_loop import move_sweeps
from ft_service.errors import LimitError, SpecError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Desired, ExitReason
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.spec import StoredSpec
from ft_service.store.records import JobChange, NewJob, NewSweep, Sweep
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, messages, new_reconciler, new_store, spec_of

SWEEP = "ftsweep-1"
STEPS = 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


class Places:
    """Where a sweep's jobs run, and what their workers would say."""

    def __init__(self, folder: Path, store: Store, slots: int = 8) -> None:
        self.store, self.launcher = store, FakeLauncher(slots)
        self.folder = folder
        self.reconciler: Reconciler = new_reconciler(folder, store, self.launcher)

    def run(self, job_id: str) -> RunDir:
        return RunDir(self.folder / "runs" / job_id)

    def report(self, job_id: str, steps: dict[int, float | None], attempt: int = 1) -> None:
        """The attempt has come so far: step → validation loss."""
        run = self.run(job_id)
        seq = len(self.run(job_id).list(f"attempts/{attempt}/events"))
        events = [
            Event(
                time=1.0,
                kind="metrics",
                message="",
                metrics=Metrics(step=step, total_steps=STEPS, valid_loss=loss),
            )
            for step, loss in steps.items()
        ]
        write_segment(run, attempt, seq, events)
        self.launcher.report(job_id, attempt)

    def end(
        self, job_id: str, reason: ExitReason, *, checkpoint: int = -1, attempt: int = 1
    ) -> None:
        self.launcher.end(job_id, attempt, exit_of(reason, "over"), checkpoint)

    def settle(self, turns: int = 16) -> None:
        """Turns for everybody, and looks at the sweeps in between, once the files of all jobs are
        checked.
        """
        self.check()
        for _ in range(turns):
            self.reconciler.step()
            move_sweeps(self.store)

    def check(self) -> None:
        """Turns until the files of all jobs are checked, by a thread."""

        def checked() -> bool:
            self.reconciler.step()
            with self.store.reading() as connection:
                return not connection.exec_driver_sql(
                    "SELECT count(*) FROM jobs WHERE state = 'validating_files'"
                ).scalar_one()

        wait_for(checked)


def add_sweep(
    store: Store, jobs: int, *, max_queued: int | None = None, sweep: str = SWEEP, first: int = 1
) -> list[str]:
    new = []
    for number in range(first, first + jobs):
        job_id = f"ftjob-{number}"
        job = Job(
            id=job_id,
            project_id=PROJECT,
            created_at=0.0,
            request={"model": "tiny", "training_file": "file-a"},
            stored_spec=StoredSpec.of(spec_of(job_id, rungs=(0.25, 0.5))),
            state=State.VALIDATING,
            sweep_id=sweep,
            sweep_values={"lora.r": number},
        )
        new.append(NewJob(job, (), max_queued))
    settings = {"method": "grid", "options": ["lora.r"], "eta": 2, "rungs": [0.25, 0.5]}
    made = NewSweep(
        id=sweep, project_id=PROJECT, request={"sweep": {"lora.r": [1, 2]}}, settings=settings
    )
    return [job.id for job in store.sweeps.create_sweep(made, new)]


def jobs_of(store: Store) -> list[Job]:
    return store.sweeps.jobs_of_sweeps([SWEEP])[SWEEP]


def sweep_of(store: Store) -> Sweep:
    return store.sweeps.get_sweep(PROJECT, SWEEP)


def states(store: Store) -> list[str]:
    return [
        f"{job.state.value}/{job.reason.value}" if job.reason else job.state.value
        for job in jobs_of(store)
    ]


def test_a_sweep_that_cannot_be_read_stops_no_other(tmp_path: Path, store: Store) -> None:
    """As if a later version had written its course."""
    add_sweep(store, 1, sweep="ftsweep-0", first=5)
    ids = add_sweep(store, 2)
    for job_id in ids:
        store.jobs.request(PROJECT, job_id, Verb.CANCEL)
    with store.writing() as connection:
        connection.execute(
            text("""UPDATE jobs SET sweep_course = '{"gone": 1}' WHERE sweep_id = 'ftsweep-0'""")
        )
    with pytest.raises(KeyError) as raised:
        move_sweeps(store)
    assert raised.value.__notes__ == ["It is the sweep ftsweep-0."]
    assert sweep_of(store).finished_at is not None


def test_the_hopeless_are_stopped_at_a_checkpoint_and_the_best_is_named(
    tmp_path: Path, store: Store
) -> None:
    ids = add_sweep(store, 4)
    places = Places(tmp_path, store)
    places.settle()
    assert [job.state for job in jobs_of(store)] == [State.RUNNING] * 4

    for job_id, loss in zip(ids, (3.0, 1.0, 2.0, None), strict=True):
        places.report(job_id, {1: None, 5: loss} if loss else {1: None})
    places.settle()
    first = jobs_of(store)[0]
    assert first.phase is not None
    assert first.phase.value == "stopping"
    assert [(job, control.desired) for job, _, control in places.launcher.signals] == [
        ("ftjob-1", Desired.PAUSE)
    ]
    places.end("ftjob-1", ExitReason.STOPPED, checkpoint=6)
    places.report("ftjob-2", {10: 0.9, 20: 0.8})
    places.end("ftjob-2", ExitReason.SUCCEEDED)
    places.settle()
    assert states(store) == ["cancelled/sweep_stopped", "succeeded/succeeded", "running", "running"]
    assert jobs_of(store)[0].stopped == (
        "stopped by the sweep: after 25 % of its steps its validation loss was 3.0000, and 2 of 4 "
        "jobs "
        "were better there; 2 go on"
    )
    assert any(
        message.startswith("Stopped by the sweep: after 25 %") for message in messages(store)
    )

    places.report("ftjob-3", {10: 0.95})
    places.report("ftjob-4", {5: 0.5, 10: 0.7, 20: 0.8})
    places.settle()
    assert [job for job, _, _ in places.launcher.signals[1:]] == ["ftjob-3"], (
        "of the second rung one stays"
    )
    places.end("ftjob-3", ExitReason.WORKER_KILLED)  # killed while it stops: it is not tried again
    places.end("ftjob-4", ExitReason.SUCCEEDED)
    places.settle()
    assert states(store)[2:] == ["cancelled/sweep_stopped", "succeeded/succeeded"]
    assert sweep_of(store).finished_at is not None
    assert sweep_of(store).best_job == "ftjob-4"
    assert any(
        "Best of the 4 jobs of sweep ftsweep-1: validation loss 0.5000 at step 5" in line
        for line in messages(store, "ftjob-4")
    )
    told = messages(store, "ftjob-4")
    places.settle()
    assert messages(store, "ftjob-4") == told, "it is said once"


def test_a_job_without_processes_is_stopped_at_once_and_the_failed_do_not_count(
    tmp_path: Path, store: Store
) -> None:
    ids = add_sweep(store, 3)
    places = Places(tmp_path, store, slots=3)
    places.settle()
    places.report(ids[2], {5: 3.0})
    places.settle()
    store.jobs.request(PROJECT, ids[2], Verb.PAUSE)
    places.settle()
    places.end(ids[2], ExitReason.STOPPED, checkpoint=5)
    places.settle()
    assert jobs_of(store)[2].state is State.PAUSED
    places.report(ids[0], {5: 1.0})
    places.report(ids[1], {5: 2.0})
    places.settle()
    assert states(store)[2] == "cancelled/sweep_stopped"

    places.end(ids[0], ExitReason.PERMANENT_ERROR)
    places.report(ids[1], {10: 9.0})
    places.end(ids[1], ExitReason.SUCCEEDED)
    places.settle()
    assert states(store) == [
        "failed/permanent_error",
        "succeeded/succeeded",
        "cancelled/sweep_stopped",
    ]
    assert sweep_of(store).best_job == ids[1]


def test_a_keeper_that_comes_late_decides_the_same(tmp_path: Path, store: Store) -> None:
    """All losses are there before anybody looks, as after a restart."""
    ids = add_sweep(store, 4)
    places = Places(tmp_path, store)
    places.check()
    for _ in range(30):
        places.reconciler.step()
    for job_id, loss in zip(ids, (3.0, 1.0, 2.0, 4.0), strict=True):
        places.report(job_id, {5: loss})
    for _ in range(30):
        places.reconciler.step()
    again = new_reconciler(tmp_path, store, places.launcher)
    move_sweeps(store)
    for _ in range(10):
        again.step()
    assert sorted(job for job, _, _ in places.launcher.signals) == ["ftjob-1", "ftjob-4"]


def test_a_sweep_is_stored_whole_or_not_at_all(store: Store) -> None:
    with pytest.raises(LimitError, match="3 may"):
        add_sweep(store, 4, max_queued=3)
    assert store.sweeps.list_sweeps(PROJECT).data == []
    assert store.jobs.list_jobs(PROJECT).data == []


def test_cancelling_and_deleting_are_of_all_its_jobs(tmp_path: Path, store: Store) -> None:
    ids = add_sweep(store, 3)
    places = Places(tmp_path, store, slots=2)
    places.settle()
    places.report(ids[0], {5: 1.0})
    places.end(ids[0], ExitReason.SUCCEEDED)
    places.reconciler.step()
    places.settle()
    with pytest.raises(SpecError, match="2 of its 3 jobs are not"):
        store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=False)
    store.sweeps.cancel_sweep(PROJECT, SWEEP)
    places.settle()
    assert all(job.state in TERMINAL and job.phase is None for job in jobs_of(store))
    assert [job.reason for job in jobs_of(store)] == [
        Reason.SUCCEEDED,
        Reason.USER_CANCELLED,
        Reason.USER_CANCELLED,
    ]
    assert store.sweeps.cancel_sweep(PROJECT, SWEEP).cancelled_at is not None, (
        "again changes nothing"
    )
    store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=False)
    assert store.models.deleted_models(PROJECT) == {str(jobs_of(store)[0].tuned_name)}
    assert store.sweeps.list_sweeps(PROJECT).data == []
    assert store.sweeps.unfinished_sweeps() == []


def test_the_best_job_can_be_kept(tmp_path: Path, store: Store) -> None:
    ids = add_sweep(store, 2)
    places = Places(tmp_path, store)
    places.settle()
    for job_id, loss in zip(ids, (2.0, 1.0), strict=True):
        places.report(job_id, {20: loss})
        places.end(job_id, ExitReason.SUCCEEDED)
    places.settle()
    store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=True)
    assert store.models.deleted_models(PROJECT) == {str(jobs_of(store)[0].tuned_name)}


def test_no_model_is_deleted_if_none_is_the_best_to_keep(tmp_path: Path, store: Store) -> None:
    """As of reinforcement, which reports no validation loss."""
    ids = add_sweep(store, 2)
    places = Places(tmp_path, store)
    places.settle()
    for job_id in ids:
        places.report(job_id, {20: None})
        places.end(job_id, ExitReason.SUCCEEDED)
    places.settle()
    with pytest.raises(
        SpecError, match=r"no best job.*nothing was removed.*Leave out keep_best"
    ) as error:
        store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=True)
    assert error.value.param == "keep_best"
    assert store.models.deleted_models(PROJECT) == set()
    assert [sweep.id for sweep in store.sweeps.list_sweeps(PROJECT).data] == [SWEEP]
    store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=False)
    assert store.models.deleted_models(PROJECT) == {str(job.tuned_name) for job in jobs_of(store)}


def test_a_sweep_without_a_model_can_be_deleted_whatever_is_to_be_kept(store: Store) -> None:
    add_sweep(store, 2)
    store.sweeps.cancel_sweep(PROJECT, SWEEP)
    move_sweeps(store)
    store.sweeps.delete_sweep(PROJECT, SWEEP, keep_best=True)
    assert store.sweeps.list_sweeps(PROJECT).data == []


def test_what_a_sweep_writes_to_a_job_is_not_undone_by_its_reconciler(
    tmp_path: Path, store: Store
) -> None:
    """The stop is a wish of its own: a claim that read the job before it is not applied over it."""
    [first, _] = add_sweep(store, 2)
    claim = store.leases.claim(host="fake", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    assert claim.job.id == first
    assert store.sweeps.stop_by_sweep(first, "stopped by the sweep: a test")
    assert not store.leases.apply(claim, JobChange(job=replace(claim.job, state=State.QUEUED)))
    assert jobs_of(store)[0].reason is Reason.SWEEP_STOPPED
