from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from ft_service.control.checks.data_checks import Checked
from ft_service.control.jobs import job_placement
from ft_service.control.jobs.ingest import SEGMENTS_PER_PASS
from ft_service.control.jobs.reconciler import POLL_SECONDS, Reconciler
from ft_service.data.examiner import Examiner, Tell
from ft_service.errors import UnavailableError
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Ended, Job, Phase, Running, State, Unknown
from ft_service.jobs.user_actions import Verb
from ft_service.meters import Meters
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import (
    CheckpointMarker,
    Control,
    Desired,
    ErrorInfo,
    ExitReason,
    Result,
    Start,
)
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.rundir.presence import Presence
from ft_service.settings import Settings
from ft_service.spec import DistributedOptions, JobSpec
from ft_service.store.records import Claim, JobChange
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

STOPPED = exit_of(ExitReason.STOPPED, "Training has stopped at checkpoint step-5-a1.")
SUCCEEDED = exit_of(ExitReason.SUCCEEDED, "Training has finished.")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher(slots=2)


@pytest.fixture
def reconciler(tmp_path: Path, store: Store, launcher: FakeLauncher) -> Reconciler:
    return new_reconciler(tmp_path, store, launcher)


def run_of(folder: Path, job_id: str = "ftjob-1") -> RunDir:
    return RunDir(folder / "runs" / job_id)


def start_running(
    reconciler: Reconciler,
    store: Store,
    launcher: FakeLauncher,
    job_id: str = "ftjob-1",
    attempt: int = 1,
) -> Job:
    """Give jobs their turns until this attempt was started."""

    def started() -> Job | None:
        reconciler.step()
        return get(store, job_id) if (job_id, attempt) in launcher.started else None

    return wait_for(started)


def write_checkpoint(run: RunDir, step: int, attempt: int = 1) -> None:
    marker = CheckpointMarker(step=step, attempt=attempt, world_size=2, files=[])
    run.write(f"checkpoints/step-{step}-a{attempt}/COMPLETE", marker)


@pytest.mark.parametrize(
    "planted",
    [b"{", Start(job_id="x", attempt=1, world_size=64, generation=1, checkpoint=None, nodes=8)],
)
def test_what_a_worker_has_planted_for_the_next_attempt_does_not_start_it(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    reconciler: Reconciler,
    planted: bytes | Start,
) -> None:
    """Ranks and nodes are the service's to say: a job must not take more of a cluster than its
    slots.
    """
    run = RunDir(tmp_path / "runs" / "ftjob-1")
    run.put(
        "attempts/1/start.json",
        planted if isinstance(planted, bytes) else planted.model_dump_json().encode(),
    )
    seen: list[Start | None] = []
    launcher.on_start = lambda attempt: seen.append(attempt.read_start())
    add_job(store)
    while not seen:
        reconciler.step()
    assert seen == [
        Start(
            job_id="ftjob-1", attempt=1, world_size=2, generation=1, checkpoint=None, slots=[0, 1]
        )
    ]


def test_a_job_from_submission_to_its_result(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    def work(attempt: Attempt) -> None:
        run = attempt.run
        metrics = Metrics(step=1, total_steps=1, train_loss=2.0)
        events = [
            Event(time=50.0, kind="metrics", message="step 1", metrics=metrics),
            Event(
                time=51.0,
                kind="checkpoint",
                message="saved",
                metrics=metrics,
                checkpoint="step-1-a1",
            ),
        ]
        write_segment(run, attempt.number, 0, events)
        run.put("metrics.csv", b"step,train_loss\n1,2.0\n")
        run.write(
            "result.json",
            Result(attempt=1, steps=1, trained_tokens=77, train_loss=2.0, valid_loss=None),
        )
        launcher.end("ftjob-1", 1, SUCCEEDED, checkpoint_step=1)

    launcher.on_start = work
    add_job(store)
    job = step_until(reconciler, store)
    assert (job.state, job.reason, job.trained_tokens) == (State.SUCCEEDED, Reason.SUCCEEDED, 77)
    assert messages(store) == [
        "Created fine-tuning job: ftjob-1",
        "Files validated, moving job to queued state.",
        "Attempt 1 is placed on 2 slots.",
        "step 1",
        "saved",
        "The job has succeeded.",
    ]
    assert store.jobs.list_events(PROJECT, "ftjob-1").data[1].created_at == 51.0
    [checkpoint] = store.jobs.list_checkpoints(PROJECT, "ftjob-1").data
    assert (checkpoint.name, checkpoint.step, checkpoint.metrics) == (
        "step-1-a1",
        1,
        Metrics(step=1, total_steps=1, train_loss=2.0),
    )
    assert job.result_file is not None
    file = store.files.get_file(PROJECT, job.result_file)
    assert (file.purpose, file.bytes) == ("fine-tune-results", 22)
    assert (tmp_path / "files" / file.id).read_bytes() == b"step,train_loss\n1,2.0\n"
    assert store.leases.free_slots("fake", 2) == [0, 1]


def test_the_attempt_gets_what_it_needs_to_know(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    run = run_of(tmp_path)
    assert run.read("spec.json", JobSpec) == get(store).spec
    expected = Start(
        job_id="ftjob-1", attempt=1, world_size=2, generation=1, checkpoint=None, slots=[0, 1]
    )
    assert run.read("attempts/1/start.json", Start) == expected


def test_a_data_file_at_fault_fails_the_job_without_an_attempt(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    error = ErrorInfo(
        code="invalid_training_file",
        message="train.jsonl: line 3: is blank.",
        param="training_file",
    )
    reconciler = new_reconciler(
        tmp_path, store, launcher, check=lambda job, examiner, tell: Checked(error)
    )
    add_job(store)
    job = step_until(reconciler, store)
    assert (job.state, job.error) == (
        State.FAILED,
        error.model_dump(include={"code", "message", "param"}),
    )
    assert launcher.started == []
    assert messages(store)[-1] == error.message


def test_no_job_tells_its_owner_where_the_host_keeps_things(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    """Though a worker has named the folder: to an operator, its log still does."""
    settings = Settings(home=tmp_path, models=[tmp_path / "bases"])
    error = ErrorInfo(
        code="invalid_model",
        message=f"The base in {tmp_path}/bases/org/tiny has a config.json that makes no model.",
        param="model",
    )
    reconciler = new_reconciler(
        tmp_path,
        store,
        launcher,
        check=lambda job, examiner, tell: Checked(error),
        without_paths=settings.without_paths,
    )
    add_job(store)
    job = step_until(reconciler, store)
    told = "The base in org/tiny has a config.json that makes no model."
    assert (job.error or {})["message"] == told
    assert messages(store)[-1] == told
    assert not any(str(tmp_path) in message for message in messages(store))


def test_a_new_job_and_a_verb_end_the_loops_rest(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_service.control.jobs.reconciler.POLL_SECONDS", 3600.0)
    monkeypatch.setattr("ft_service.control.jobs.reconciler.MAX_POLL_SECONDS", 3600.0)
    reconciler = new_reconciler(tmp_path, store, launcher, idle_seconds=3600.0)
    stop = threading.Event()
    loop = threading.Thread(target=reconciler.run, args=(stop,))
    loop.start()
    try:
        add_job(store)
        # A job that is cancelled before that needs no signal.
        wait_for(lambda: len(launcher.started) == 1)
        store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
        wait_for(lambda: get(store).signalled == get(store).generation)
    finally:
        stop.set()
        reconciler.wake()
        loop.join()


def test_while_one_process_reads_a_jobs_files_no_other_does(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    go_on = threading.Event()
    begun = []

    def check(job: Job, examiner: Examiner, tell: Tell) -> Checked:
        begun.append(job.id)
        go_on.wait(30)
        return Checked()

    one, other = (new_reconciler(tmp_path, store, launcher, check=check) for _ in range(2))
    for number in range(3):
        add_job(store, f"ftjob-{number}")
    try:
        assert [one.step() for _ in range(4)] == [True, True, True, False], "it looks at each once"
        assert not other.step()
        go_on.set()
        step_until(one, store, State.QUEUED, State.RUNNING, job_id="ftjob-2")
        assert sorted(begun) == ["ftjob-0", "ftjob-1", "ftjob-2"]
    finally:
        go_on.set()
        one.close()
        other.close()


def test_a_slow_check_keeps_no_other_job_waiting(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    go_on = threading.Event()

    def check(job: Job, examiner: Examiner, tell: Tell) -> Checked:
        assert job.id == "ftjob-1" or go_on.wait(60)
        return Checked()

    reconciler = new_reconciler(tmp_path, store, launcher, check=check)
    add_job(store, "ftjob-1")
    step_until(reconciler, store, State.QUEUED, State.RUNNING)
    add_job(store, "ftjob-slow")
    start_running(reconciler, store, launcher)
    launcher.end("ftjob-1", 1, SUCCEEDED)
    step_until(reconciler, store, State.SUCCEEDED)
    assert get(store, "ftjob-slow").state is State.VALIDATING
    go_on.set()
    start_running(reconciler, store, launcher, "ftjob-slow")


def test_jobs_wait_for_slots_in_order_of_priority(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store, "ftjob-first")
    start_running(reconciler, store, launcher, "ftjob-first")
    for job_id, priority in (("ftjob-low", 0), ("ftjob-high", 5), ("ftjob-lower", 0)):
        add_job(store, job_id, priority=priority)
        step_until(reconciler, store, State.QUEUED, job_id=job_id)
    for job_id in ("ftjob-first", "ftjob-high", "ftjob-low", "ftjob-lower"):
        start_running(reconciler, store, launcher, job_id)
        launcher.end(job_id, 1, SUCCEEDED)
    assert [name for name, _ in launcher.started] == [
        "ftjob-first",
        "ftjob-high",
        "ftjob-low",
        "ftjob-lower",
    ]


def test_a_pause_is_told_once_and_ends_at_rest(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.STOPPING)
    for _ in range(3):
        reconciler.step()
    assert launcher.signals == [("ftjob-1", 1, Control(generation=2, desired=Desired.PAUSE))]
    launcher.end("ftjob-1", 1, STOPPED)
    job = step_until(reconciler, store, State.PAUSED)
    assert (job.failures, store.leases.free_slots("fake", 2)) == (0, [0, 1])
    assert messages(store)[-1] == STOPPED.message
    assert not reconciler.step()
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME)
    assert start_running(reconciler, store, launcher, attempt=2).attempt == 2


def test_resume_while_stopping_goes_on(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    store.jobs.request(PROJECT, "ftjob-1", Verb.PAUSE)
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.STOPPING)
    store.jobs.request(PROJECT, "ftjob-1", Verb.RESUME)
    wait_for(lambda: reconciler.step() and len(launcher.signals) == 2)
    assert launcher.signals[-1][2] == Control(generation=3, desired=Desired.RUN)
    launcher.end("ftjob-1", 1, STOPPED)
    assert start_running(reconciler, store, launcher, attempt=2).attempt == 2


def test_cancel_is_final_even_if_the_attempt_succeeds(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    launcher.end("ftjob-1", 1, SUCCEEDED)
    job = step_until(reconciler, store)
    assert (job.state, job.reason, job.result_file) == (
        State.CANCELLED,
        Reason.USER_CANCELLED,
        None,
    )
    assert store.leases.free_slots("fake", 2) == [0, 1]


def test_cancel_reaches_the_attempt(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    assert step_until(reconciler, store).state is State.CANCELLED
    assert launcher.signals == [("ftjob-1", 1, Control(generation=2, desired=Desired.CANCEL))]


def test_an_attempt_that_is_not_wanted_any_more_is_sealed_before_its_slots_are_free(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    """Another reconciler of this host may be about to start it."""
    add_job(store)
    wait_for(lambda: reconciler.step() and get(store).state is State.RUNNING)
    assert launcher.started == []
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    step_until(reconciler, store)
    assert launcher.kills == [("ftjob-1", 1, Reason.USER_CANCELLED)]
    assert launcher.started == []
    assert store.leases.free_slots("fake", 2) == [0, 1]


def test_an_attempt_that_cannot_be_sealed_keeps_its_slots(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store)
    wait_for(lambda: reconciler.step() and get(store).state is State.RUNNING)
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    monkeypatch.setattr(
        launcher, "kill", lambda attempt, reason: launcher.set("ftjob-1", 1, Running())
    )
    reconciler.step()
    assert store.leases.free_slots("fake", 2) == []
    monkeypatch.undo()
    step_until(reconciler, store)
    assert store.leases.free_slots("fake", 2) == [0, 1]


def test_the_slots_of_a_start_survive_a_crash_between_placing_and_launching(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    wait_for(lambda: reconciler.step() and get(store).state is State.RUNNING)
    assert run_of(tmp_path).get("attempts/1/start.json") is None
    successor = new_reconciler(tmp_path, store, launcher)
    start_running(successor, store, launcher)
    start = run_of(tmp_path).read("attempts/1/start.json", Start)
    assert start is not None
    assert start.slots == [0, 1]
    assert launcher.started == [("ftjob-1", 1)]


def test_slots_of_a_cluster_are_no_numbers_of_gpus(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod with one GPU would not see it in a job that holds slot 7."""
    monkeypatch.setattr(FakeLauncher, "slots_name_gpus", False)
    launcher = FakeLauncher()
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store)
    start_running(reconciler, store, launcher)
    start = run_of(tmp_path).read("attempts/1/start.json", Start)
    assert start is not None
    assert start.slots == []
    reconciler.close()


def test_a_lost_attempt_goes_on_from_its_checkpoint_after_a_back_off(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    write_checkpoint(run_of(tmp_path), 5)
    launcher.end("ftjob-1", 1, None, checkpoint_step=5)
    job = step_until(reconciler, store, State.QUEUED)
    assert (job.reason, job.failures, job.losses, job.failed_at_step) == (
        Reason.SUPERVISOR_LOST,
        0,
        1,
        5,
    )
    assert job.not_before > store.now() - 5
    assert messages(store)[-1].endswith("continues from step 5 in 1 second.")
    start_running(reconciler, store, launcher, attempt=2)
    start = run_of(tmp_path).read("attempts/2/start.json", Start)
    assert start is not None
    assert start.checkpoint == "step-5-a1"
    assert launcher.started == [("ftjob-1", 1), ("ftjob-1", 2)]


def test_nothing_is_done_on_unknown(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    launcher.set("ftjob-1", 1, Unknown("the host does not answer"))
    before = get(store)
    for _ in range(3):
        reconciler.step()
    after = get(store)
    assert replace(after, version=before.version) == before
    assert (launcher.kills, launcher.started) == ([], [("ftjob-1", 1)])


def test_a_queued_job_that_cannot_be_observed_steps_aside(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store, "ftjob-stuck", priority=9)
    start_running(reconciler, store, launcher, "ftjob-stuck")
    store.jobs.request(PROJECT, "ftjob-stuck", Verb.PAUSE)
    launcher.end("ftjob-stuck", 1, STOPPED)
    step_until(reconciler, store, State.PAUSED, job_id="ftjob-stuck")
    launcher.set("ftjob-stuck", 1, Unknown("a rank still lives"))
    store.jobs.request(PROJECT, "ftjob-stuck", Verb.RESUME)
    add_job(store, "ftjob-1")
    start_running(reconciler, store, launcher)
    assert get(store, "ftjob-stuck").state is State.QUEUED


def test_a_stalled_attempt_is_killed_and_tried_again(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    launcher.report("ftjob-1", 1, silent_seconds=1e6)
    job = step_until(reconciler, store, State.QUEUED)
    assert launcher.kills == [("ftjob-1", 1, Reason.STALLED)]
    assert job.reason is Reason.STALLED


def test_a_start_that_fails_is_tried_again_until_the_operator_has_mended_it(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)
    launcher.refusal = "There is no such partition."
    add_job(store)
    wait_for(lambda: reconciler.step() and get(store).losses > decisions.MAX_FAILURES)
    job = get(store)
    assert (job.state, job.reason, job.failures) == (State.QUEUED, Reason.LAUNCH_FAILED, 0)
    assert launcher.refusal in (job.pending or "")
    assert store.leases.free_slots("fake", 2) == [0, 1]
    launcher.refusal = None
    start_running(reconciler, store, launcher, attempt=job.attempt + 1)


def test_training_is_shown_once_the_first_event_is_there(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    assert get(store).phase is Phase.LAUNCHING
    launcher.report("ftjob-1", 1)
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.TRAINING)


def test_every_event_is_there_before_the_job_is_done(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    count = 2 * SEGMENTS_PER_PASS + 3
    for seq in range(count):
        write_segment(run_of(tmp_path), 1, seq, [Event(time=1.0, message=f"event {seq}")])
    launcher.end("ftjob-1", 1, SUCCEEDED)
    step_until(reconciler, store, State.SUCCEEDED)
    found: list[str] = []
    after = None
    while page := store.jobs.list_events(PROJECT, "ftjob-1", limit=100, after=after).data:
        found += [event.message for event in page]
        after = page[-1].id
    assert [message for message in reversed(found) if message.startswith("event ")] == [
        f"event {seq}" for seq in range(count)
    ]
    assert found[0] == "The job has succeeded."


def test_what_an_attempt_wrote_right_before_its_end_is_there(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    reconciler: Reconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last event comes between the look at the run directory's events and the look at its
    processes.
    """
    add_job(store)
    start_running(reconciler, store, launcher)

    def ending(attempt: Attempt) -> Ended:
        if not attempt.has_segment(0):
            write_segment(
                attempt.run, attempt.number, 0, [Event(time=1.0, message="the last words")]
            )
        return Ended(SUCCEEDED)

    monkeypatch.setattr(launcher, "observe", ending)
    step_until(reconciler, store, State.SUCCEEDED)
    assert "the last words" in messages(store)


def test_a_queued_job_whose_processes_live_steps_aside_until_they_are_gone(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(decisions, "RECHECK_SECONDS", 600.0)
    add_job(store, priority=1)
    start_running(reconciler, store, launcher)
    launcher.end("ftjob-1", 1, None, checkpoint_step=5)
    wait_for(lambda: reconciler.step() and get(store).state is State.QUEUED)
    launcher.set("ftjob-1", 1, Running())
    monkeypatch.setattr(
        launcher,
        "kill",
        lambda attempt, reason: launcher.kills.append((attempt.job_id, attempt.number, reason)),
    )
    wait_for(lambda: reconciler.step() and len(launcher.kills) > 0)
    assert get(store).not_before > store.now()
    add_job(store, "ftjob-2")
    start_running(reconciler, store, launcher, "ftjob-2")
    assert launcher.started == [("ftjob-1", 1), ("ftjob-2", 1)]


def test_an_error_in_one_jobs_turn_costs_only_that_job_its_turn(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher = FakeLauncher(slots=4)
    observe = launcher.observe

    def broken(attempt: Attempt) -> Any:
        if attempt.job_id == "ftjob-bad":
            raise OSError("the disk is gone")
        return observe(attempt)

    monkeypatch.setattr(launcher, "observe", broken)
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store, "ftjob-bad")
    step_until(reconciler, store, State.RUNNING, job_id="ftjob-bad")
    add_job(store, "ftjob-1")
    start_running(reconciler, store, launcher)
    assert "a job's turn failed" in caplog.text
    assert "the disk is gone" in caplog.text


def test_the_loop_survives_a_database_that_is_away_and_wakes_early(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    stop = threading.Event()
    claim = store.leases.claim

    def away(**options: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise UnavailableError("no database")
        return claim(**options)

    monkeypatch.setattr(store.leases, "claim", away)
    reconciler = new_reconciler(tmp_path, store, launcher, idle_seconds=0.05)
    add_job(store)
    loop = threading.Thread(target=reconciler.run, args=[stop])
    loop.start()
    try:
        assert failed.wait(30)
        reconciler.wake()
        wait_for(lambda: launcher.started)
    finally:
        stop.set()
        reconciler.wake()
        loop.join(30)
    assert not loop.is_alive()


def test_the_loop_rests_longer_while_the_database_is_away_and_not_after_that(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float | None] = []
    stop = threading.Event()

    class Rest(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout)
            if len(rests) == 4:
                stop.set()
            return True

    def away(**options: Any) -> None:
        if len(rests) in (0, 1, 3):
            raise UnavailableError("no database")

    monkeypatch.setattr(store, "changed", Rest())
    monkeypatch.setattr(store.leases, "claim", away)
    new_reconciler(tmp_path, store, launcher).run(stop)
    assert rests == [2 * POLL_SECONDS, 4 * POLL_SECONDS, POLL_SECONDS, 2 * POLL_SECONDS]


def test_a_change_of_mind_during_a_turn_is_not_overwritten(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user cancels between the claim and the write: the write is refused, and the file it would
    have brought is removed.
    """
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store)
    start_running(reconciler, store, launcher)
    run = run_of(tmp_path)
    run.put("metrics.csv", b"step\n")
    run.write(
        "result.json", Result(attempt=1, steps=1, trained_tokens=1, train_loss=1.0, valid_loss=None)
    )
    observe = launcher.observe
    looks = []

    def cancelling(attempt: Attempt) -> Any:
        looks.append(attempt)
        if len(looks) == 2:  # the first is without a claim
            store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
            monkeypatch.setattr(launcher, "observe", observe)
        return Ended(SUCCEEDED)

    monkeypatch.setattr(launcher, "observe", cancelling)
    reconciler.step()
    assert (get(store).state, get(store).desired) == (State.CANCELLED, Desired.CANCEL)
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("stored", [False, True])
def test_a_result_whose_change_met_an_outage_is_one_file(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    monkeypatch: pytest.MonkeyPatch,
    stored: bool,
) -> None:
    """`stored`: the connection was lost behind the commit."""
    reconciler = new_reconciler(tmp_path, store, launcher, lease_seconds=0.0)
    add_job(store)
    start_running(reconciler, store, launcher)
    run = run_of(tmp_path)
    run.put("metrics.csv", b"step\n")
    run.write(
        "result.json", Result(attempt=1, steps=1, trained_tokens=1, train_loss=1.0, valid_loss=None)
    )
    launcher.end("ftjob-1", 1, SUCCEEDED)
    apply = store.leases.apply

    def lost(claim: Claim, change: JobChange) -> bool:
        if stored:
            apply(claim, change)
        monkeypatch.setattr(store.leases, "apply", apply)
        raise UnavailableError("The connection is lost.")

    monkeypatch.setattr(store.leases, "apply", lost)
    reconciler.step()
    job = step_until(reconciler, store)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [job.result_file]


def test_slots_that_were_taken_meanwhile_start_nothing(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    reconciler: Reconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_job(store, "ftjob-other")
    start_running(reconciler, store, launcher, "ftjob-other")
    monkeypatch.setattr(store.leases, "free_slots", lambda *_: [0, 1])  # what it was a moment ago
    add_job(store, "ftjob-1")
    step_until(reconciler, store, State.QUEUED)
    launcher.report("ftjob-other", 1)
    for _ in range(4):
        reconciler.step()
    assert get(store).state is State.QUEUED
    assert launcher.started == [("ftjob-other", 1)]
    assert get(store, "ftjob-other").phase is Phase.TRAINING, (
        "it has its turns although the queue always has one due"
    )


def test_a_change_that_names_no_new_attempt_writes_each_event_once(
    tmp_path: Path, store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    """A reconciler that lost its claim after writing nothing reads the same segment again."""
    add_job(store)
    start_running(reconciler, store, launcher)
    write_segment(run_of(tmp_path), 1, 0, [Event(time=1.0, message="only once")])
    real = store.leases.apply
    lost = store.leases.claim(host="fake", owner="another", lease_seconds=0.0, idle_seconds=0.0)
    assert lost is not None
    for _ in range(3):
        reconciler.step()
    assert not real(lost, JobChange(job=lost.job))
    assert messages(store).count("only once") == 1


def test_a_job_of_another_version_takes_no_slots_and_lets_others_pass(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store, "ftjob-later")
    step_until(reconciler, store, State.QUEUED, job_id="ftjob-later")
    document = get(store, "ftjob-later").stored_spec.document
    with store.writing() as connection:
        later = json.dumps({**document, "lora": {**document["lora"], "later": True}})
        connection.execute(text("UPDATE jobs SET spec = :spec, looked_at = 0"), {"spec": later})
    add_job(store, "ftjob-1")
    start_running(reconciler, store, launcher, "ftjob-1")
    waiting = get(store, "ftjob-later")
    assert (waiting.state, waiting.attempt, launcher.started) == (State.QUEUED, 0, [("ftjob-1", 1)])
    assert waiting.pending is not None
    assert "does not know its lora.later." in waiting.pending
    events = [event.message for event in store.jobs.list_events(PROJECT, "ftjob-later").data]
    assert events.count(f"The job waits. {waiting.pending}") == 1


def test_a_job_larger_than_the_host_says_so_and_lets_others_pass(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FT_SLOTS was lowered after it was accepted."""
    monkeypatch.setattr("ft_service.control.jobs.job_placement.TOO_LARGE_SECONDS", 0.0)
    meters = Meters()
    reconciler = new_reconciler(tmp_path, store, launcher, meters=meters)
    add_job(store, "ftjob-large", slots=3, priority=1)
    add_job(store, "ftjob-1")
    start_running(reconciler, store, launcher)
    wait_for(lambda: reconciler.step() and get(store, "ftjob-large").pending)
    large = get(store, "ftjob-large")
    assert large.state is State.QUEUED
    assert "more than this host has now" in (large.pending or "")
    assert sum("The job waits." in message for message in messages(store, "ftjob-large")) == 1
    assert meters.registry.get_sample_value("ft_attempts_started_total") == 1
    assert meters.registry.get_sample_value("ft_queue_wait_seconds_count") == 1
    assert store.jobs.request(PROJECT, "ftjob-large", Verb.CANCEL).pending is None


def test_what_a_place_says_of_an_attempt_is_told_once_and_its_remains_are_removed(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    for note in (
        "no node has 8 GPUs",
        "no node has 8 GPUs",
        "the quota is used up",
        "no node has 8 GPUs",
    ):
        launcher.set("ftjob-1", 1, Running(note=note, admitted=False))
        while get(store).pending != note:
            reconciler.step()
        reconciler.step()
    assert get(store).phase is Phase.WAITING
    launcher.set("ftjob-1", 1, Running())
    while get(store).phase is not Phase.LAUNCHING:
        reconciler.step()
    told = messages(store)
    assert [told.count(note) for note in ("no node has 8 GPUs", "the quota is used up")] == [1, 1]
    assert told[-1] == "The cluster has a place for the attempt."
    assert launcher.cleaned == []
    launcher.end("ftjob-1", 1, SUCCEEDED)
    step_until(reconciler, store)
    assert launcher.cleaned == [("ftjob-1", 1)]


def test_a_reason_whose_numbers_change_is_one_event(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    for used in (4, 5, 6):
        note = f"The cluster refuses pods: exceeded quota: gpus, used: pods={used}, limited: pods=6"
        launcher.set("ftjob-1", 1, Running(note=note, admitted=False, level="warn"))
        wait_for(lambda note=note: reconciler.step() and get(store).pending == note)
    told = [
        event
        for event in store.jobs.list_events(PROJECT, "ftjob-1").data
        if "exceeded quota" in event.message
    ]
    assert [event.level for event in told] == ["warn"]


def test_a_place_that_is_away_is_told_counted_and_told_when_it_is_back(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    meters = Meters()
    reconciler = new_reconciler(tmp_path, store, launcher, meters=meters)
    add_job(store)
    start_running(reconciler, store, launcher)
    launcher.report("ftjob-1", 1)
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.TRAINING)
    for seconds in (5.0, 20.0, 25.0):
        launcher.away_seconds = seconds
        launcher.set("ftjob-1", 1, Unknown(f"the cluster cannot be asked: try {seconds}", seconds))
        for _ in range(3):
            reconciler.step()
        assert meters.registry.get_sample_value("ft_place_away_seconds") == seconds
    assert "cannot be asked: try 20.0" in (get(store).pending or "")
    launcher.away_seconds = 0.0
    launcher.report("ftjob-1", 1)
    wait_for(lambda: reconciler.step() and get(store).pending is None)
    told = [
        event
        for event in reversed(store.jobs.list_events(PROJECT, "ftjob-1").data)
        if "observed" in event.message
    ]
    assert [event.level for event in told] == ["warn", "info"]
    assert told[1].message == "The job is observed again."
    assert get(store).phase is Phase.TRAINING
    assert meters.registry.get_sample_value("ft_place_away_seconds") == 0


@pytest.mark.parametrize(("slots", "words"), [(1, "1 slot."), (2, "2 slots.")])
def test_an_attempt_that_is_only_placed_does_not_say_that_it_trains(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler, slots: int, words: str
) -> None:
    add_job(store, slots=slots, distributed=DistributedOptions(nproc_per_node=slots))
    start_running(reconciler, store, launcher)
    assert messages(store)[-1] == f"Attempt 1 is placed on {words}"
    assert not any("Training starts" in message for message in messages(store))


def test_a_failed_attempt_is_told_as_an_error(
    store: Store, launcher: FakeLauncher, reconciler: Reconciler
) -> None:
    add_job(store)
    start_running(reconciler, store, launcher)
    launcher.end("ftjob-1", 1, exit_of(ExitReason.WORKER_ERROR, "Rank 0 failed."))
    wait_for(lambda: reconciler.step() and get(store).failures)
    newest = store.jobs.list_events(PROJECT, "ftjob-1", limit=1).data[0]
    assert (newest.level, newest.message.endswith("The job continues from the beginning.")) == (
        "error",
        True,
    )


def training_since(
    launcher: FakeLauncher, store: Store, reconciler: Reconciler, job_id: str, seconds: float
) -> Job:
    """A job whose workers have reported, and that has held its slots for so long."""
    launcher.report(job_id, 1)

    def trains() -> Job | None:
        reconciler.step()
        job = get(store, job_id)
        return job if job.phase is Phase.TRAINING else None

    job = wait_for(trains)
    with store.writing() as connection:
        for table, column in (("slots", "job_id"), ("jobs", "id")):
            move = f"UPDATE {table} SET taken_at = taken_at - :seconds WHERE {column} = :job"
            connection.execute(text(move), {"seconds": seconds, "job": job_id})
    return job


def test_a_higher_priority_displaces_what_has_held_its_slots_long_enough(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher, preempt_after=3600.0)
    add_job(store, "ftjob-low")
    start_running(reconciler, store, launcher, "ftjob-low")
    training_since(launcher, store, reconciler, "ftjob-low", 600.0)
    add_job(store, "ftjob-high", priority=5)
    step_until(reconciler, store, State.QUEUED, job_id="ftjob-high")
    for _ in range(5):
        reconciler.step()
    assert launcher.signals == [], "it has not held them for long enough"

    training_since(launcher, store, reconciler, "ftjob-low", 3000.0)
    wait_for(lambda: (reconciler.step(), launcher.signals or None)[1])
    [(job_id, _, control)] = launcher.signals
    assert (job_id, control.desired) == ("ftjob-low", Desired.PAUSE)
    assert "to make room for a job of priority 5" in (get(store, "ftjob-low").pending or "")
    launcher.end("ftjob-low", 1, STOPPED, checkpoint_step=5)
    start_running(reconciler, store, launcher, "ftjob-high")
    low = get(store, "ftjob-low")
    assert (low.state, low.reason, low.failures, low.desired) == (
        State.QUEUED,
        Reason.PREEMPTED,
        0,
        Desired.RUN,
    )

    launcher.end("ftjob-high", 1, SUCCEEDED)
    start_running(reconciler, store, launcher, "ftjob-low", attempt=2)
    launcher.end("ftjob-low", 2, SUCCEEDED)
    assert step_until(reconciler, store, job_id="ftjob-low").state is State.SUCCEEDED
    assert (
        "The job makes room. It stops at a checkpoint, to make room for a job of priority 5."
        in messages(store, "ftjob-low")
    )


def test_one_of_two_hosts_makes_room_and_not_both(tmp_path: Path, store: Store) -> None:
    launchers = [FakeLauncher(host=name) for name in ("host-a", "host-b")]
    reconcilers = [
        new_reconciler(tmp_path, store, launcher, preempt_after=600.0) for launcher in launchers
    ]
    for launcher, reconciler in zip(launchers, reconcilers, strict=True):
        add_job(store, f"ftjob-{launcher.host}")
        start_running(reconciler, store, launcher, f"ftjob-{launcher.host}")
        training_since(launcher, store, reconciler, f"ftjob-{launcher.host}", 700.0)
    add_job(store, "ftjob-high", priority=5)

    def signals() -> list[str]:
        for reconciler in reconcilers:
            reconciler.step()
        return [job_id for launcher in launchers for job_id, _, _ in launcher.signals]

    wait_for(lambda: signals() or None)
    for _ in range(20):
        assert len(signals()) == 1
        time.sleep(0.1)  # the next look for who must make room is a second after the last


def test_a_job_that_may_take_so_long_ends_there(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store, max_seconds=60)
    start_running(reconciler, store, launcher)
    training_since(launcher, store, reconciler, "ftjob-1", 61.0)
    wait_for(lambda: (reconciler.step(), launcher.signals or None)[1])
    assert launcher.signals[0][2].desired is Desired.PAUSE
    launcher.end("ftjob-1", 1, STOPPED, checkpoint_step=5)
    ended = step_until(reconciler, store)
    assert (ended.state, ended.reason) == (State.FAILED, Reason.TIME_LIMIT)
    assert ended.slot_seconds >= 2 * 61.0


class SlowUser:
    """A user of slots that leaves them when asked three times."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.preloaded: list[str] = []

    def release_slots(self, slots: Collection[int]) -> bool:
        self.asked.append(list(slots))
        return len(self.asked) >= 3

    def preload(self, job: Job) -> None:
        self.preloaded.append(job.id)


def test_no_attempt_starts_on_slots_that_are_still_in_use(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    user = SlowUser()
    reconciler = new_reconciler(tmp_path, store, launcher, slot_user=user)
    add_job(store)
    while len(user.asked) < 2:
        reconciler.step()
        assert not launcher.started
    start_running(reconciler, store, launcher)
    assert user.asked == [[0, 1]] * 3
    launcher.end("ftjob-1", 1, SUCCEEDED)
    assert not user.preloaded
    step_until(reconciler, store)
    assert user.preloaded == ["ftjob-1"]


def test_looks_that_change_nothing_are_one_write_of_all_and_no_claim(
    tmp_path: Path, store: Store
) -> None:
    launcher = FakeLauncher(6)
    reconciler = new_reconciler(tmp_path, store, launcher)
    for name in ("a", "b", "c"):
        add_job(store, name)
        start_running(reconciler, store, launcher, name)
        launcher.report(name, 1)
    wait_for(
        lambda: (
            not reconciler.step() or {get(store, name).phase for name in "abc"} == {Phase.TRAINING}
        )
    )
    before = [get(store, name) for name in "abc"]
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET looked_at = 1"))
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert new_reconciler(tmp_path, store, launcher, idle_seconds=3600.0).step()
    written = [
        statement.partition(" WHERE ")[0]
        for statement in statements
        if statement.startswith("UPDATE jobs SET ")
    ]
    assert sum("lease_owner" not in statement for statement in written) == 1, (
        "the others are claims that find none"
    )
    assert not any("version" in statement for statement in written)
    assert [get(store, name) for name in "abc"] == before


def test_a_queue_that_was_searched_in_vain_is_searched_again_once_something_changes(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_placement, "SEARCH_SHARE", 1e-9)
    launcher = FakeLauncher(3)
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store, "runs")
    start_running(reconciler, store, launcher, "runs")
    add_job(store, "waits")
    wait_for(lambda: not reconciler.step() or get(store, "waits").state is State.QUEUED)
    searched: list[str] = []
    snapshot_for = store.queue.snapshot_for

    def counted(name: str, *given: Any, **options: Any) -> Any:
        searched.append(name)
        return snapshot_for(name, *given, **options)

    monkeypatch.setattr(store.queue, "snapshot_for", counted)
    for _ in range(10):
        reconciler.step()
    assert len(searched) <= 2
    launcher.end("runs", 1, SUCCEEDED)
    run_of(tmp_path, "runs").write(
        "result.json", Result(attempt=1, steps=1, trained_tokens=1, train_loss=1.0, valid_loss=None)
    )
    step_until(reconciler, store, State.RUNNING, job_id="waits")


def test_ranks_that_live_by_commands_get_signs_and_what_trains_by_itself_gets_none(
    tmp_path: Path, store: Store, launcher: FakeLauncher
) -> None:
    reconciler = new_reconciler(tmp_path, store, launcher, leave_after_seconds=0.5)
    add_job(store, "ftjob-model", slots=1, training_data=None)
    add_job(store, "ftjob-trains", slots=1)
    for job_id in ("ftjob-model", "ftjob-trains"):
        start_running(reconciler, store, launcher, job_id)
    attempt = Attempt(run_of(tmp_path, "ftjob-model"), 1)
    signs: set[str] = set()

    def several() -> bool:
        reconciler.step()
        presence = attempt.read_presence()
        if presence is not None:
            assert presence.leave_after_seconds == 0.5
            signs.add(presence.sign)
        return len(signs) >= 3

    wait_for(several)
    assert Attempt(run_of(tmp_path, "ftjob-trains"), 1).read_presence() is None
    launcher.end("ftjob-model", 1, STOPPED)
    assert start_running(reconciler, store, launcher, "ftjob-model", attempt=2).failures == 0, (
        "it goes on by itself"
    )


def test_a_sign_that_the_disk_refuses_keeps_no_job_from_its_turn(
    tmp_path: Path,
    store: Store,
    launcher: FakeLauncher,
    reconciler: Reconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(attempt: Attempt, presence: Presence) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Attempt, "write_presence", full)
    add_job(store, training_data=None)
    start_running(reconciler, store, launcher)
    launcher.report("ftjob-1", 1)
    wait_for(lambda: reconciler.step() and get(store).phase is Phase.TRAINING)
