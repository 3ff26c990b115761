"""Documents of a run directory that cannot be read: the attempt is lost, the job continues or ends,
and no slot stays taken.

Every document × several kinds of what may lie in its place (tests/ft_service/rundir reads all of
them), with the reconciler's own turns over the launcher of this host. Attempts without processes
leave what a supervisor that has died leaves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.control.jobs import reconciler as of_reconciler
from ft_service.control.jobs.reconciler import Reconciler
from ft_service.errors import UnavailableError
from ft_service.host import processes
from ft_service.host.processes import ProcessIdentity
from ft_service.jobs import decisions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Observation, Phase, State
from ft_service.jobs.user_actions import Verb
from ft_service.launcher.local_launcher import LocalLauncher
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import (
    CheckpointMarker,
    ExitReason,
    Outcome,
    OutcomeKind,
    Result,
    Stop,
)
from ft_service.rundir.events import Event, write_segment
from ft_service.spec import JobSpec
from ft_service.store.sql import Store
from tests.support.attempts import all_processes, gone, scripted, supervisor_of, wait_for
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
from tests.support.unreadable import GARBAGE, put_garbage

DEAD = ProcessIdentity(boot_id="an earlier boot", pid_namespace=1, pid=1, start_ticks=1)
EXIT = "attempts/1/exit.json"
RESULT = "result.json"
SUPERVISOR = "attempts/1/supervisor.json"
SEGMENT = "attempts/1/events/00000000.jsonl"
TOLD = (EXIT, RESULT, SUPERVISOR, SEGMENT)
"""Documents that the service itself has to read: an event names them."""
DOCUMENTS = (
    *TOLD,
    *(
        "attempts/1/start.json",
        "attempts/1/control.json",
        "attempts/1/stop.json",
        "attempts/1/outcome.json",
    ),
    *(
        "attempts/1/launched.json",
        "spec.json",
        "checkpoints/step-3-a1/COMPLETE",
        "attempts/2/start.json",
        "attempts/2/stop.json",
    ),
)


def kinds(document: str) -> list[str]:
    """Some of them for each document, all over all documents: with a file, and with something that
    is none.
    """
    files = sorted(kind for kind, body in GARBAGE.items() if body is not None)
    others = sorted(GARBAGE.keys() - files)
    place = DOCUMENTS.index(document)
    return [files[place % len(files)], others[place % len(others)]]


class Dying(LocalLauncher):
    """A host on which the first attempt of every job leaves garbage in the place of one document,
    and dies; the second one is done.
    """

    def __init__(self, document: str, kind: str) -> None:
        super().__init__(2, host="here")
        self.document = document
        self.kind = kind

    def start(self, attempt: Attempt, spec: JobSpec | None = None) -> None:
        run = attempt.run
        number = attempt.number
        if attempt.node().has_supervisor():
            return
        attempt.node().write_supervisor(DEAD)
        write_segment(run, number, 0, [Event(time=time.time(), message=f"attempt {number}")])
        run.write(f"checkpoints/step-{3 * number}-a{number}/COMPLETE", _marker(3 * number, number))
        if number == 2 or self.document == RESULT:
            attempt.write_outcome(Outcome(kind=OutcomeKind.SUCCEEDED))
            run.write(
                RESULT,
                Result(attempt=number, steps=6, trained_tokens=7, train_loss=1.0, valid_loss=None),
            )
            attempt.write_exit(exit_of(ExitReason.SUCCEEDED, "done"))
        if number == 1:
            attempt.write_stop(Stop(reason="r"))
            put_garbage(run.path(self.document), self.kind)


def _marker(step: int, attempt: int) -> CheckpointMarker:
    return CheckpointMarker(step=step, attempt=attempt, world_size=1, files=[])


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = new_store(folder)
    yield store
    store.close()


def _steps_until(reconciler: Reconciler, store: Store, job_id: str, *states: State) -> Job:
    """A turn that fails is a fault, and is not waited for."""
    job = step_until(reconciler, store, *states, job_id=job_id)
    assert not reconciler._failed_turns, "no turn fails"
    return job


@pytest.mark.parametrize("document", DOCUMENTS)
def test_an_attempt_with_an_unreadable_document_is_lost_and_the_next_one_goes_on(
    folder: Path, store: Store, document: str
) -> None:
    for kind in kinds(document):
        job_id = f"ftjob-{kind.replace('_', '')}"
        add_job(store, job_id)
        reconciler = new_reconciler(folder, store, Dying(document, kind), lease_seconds=0.2)
        job = _steps_until(reconciler, store, job_id)
        assert (job.state, job.attempt, job.trained_tokens) == (State.SUCCEEDED, 2, 7), kind
        assert store.leases.free_slots("here", 2) == [0, 1], kind
        told = [message for message in messages(store, job_id) if document in message]
        empty = document == SEGMENT and kind == "empty"  # a segment without a line is none's fault
        assert len(told) == (document in TOLD and not empty), (kind, messages(store, job_id))


@pytest.mark.parametrize("document", TOLD)
def test_a_job_with_an_unreadable_document_can_be_cancelled(
    folder: Path, store: Store, document: str
) -> None:
    for kind in kinds(document):
        job_id = f"ftjob-{kind.replace('_', '')}"
        add_job(store, job_id)
        reconciler = new_reconciler(folder, store, Dying(document, kind), lease_seconds=0.2)
        _steps_until(reconciler, store, job_id, State.RUNNING)
        while not RunDir(folder / f"runs/{job_id}").has(SUPERVISOR):
            reconciler.step()
        store.jobs.request(PROJECT, job_id, Verb.CANCEL)
        job = _steps_until(reconciler, store, job_id, State.CANCELLED)
        assert (job.phase, store.leases.free_slots("here", 2)) == (None, [0, 1]), kind


# With processes
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["control.json", "supervisor.json"])
def test_living_processes_are_ended_with_an_unreadable_document(
    folder: Path, store: Store, document: str
) -> None:
    add_job(store)
    run = RunDir(folder / "runs/ftjob-1")
    reconciler = new_reconciler(
        folder, store, LocalLauncher(2, worker_command=scripted("event,hang/succeed"))
    )
    wait_for(lambda: (reconciler.step() or True) and run.has("pids/1-1"))
    everything = all_processes(run)
    supervisor = supervisor_of(run)
    put_garbage(run.path(f"attempts/1/{document}"), "no_json")
    if document == "supervisor.json":  # it does not read its own
        processes.kill(supervisor)
    job = step_until(reconciler, store)
    assert (job.state, job.attempt, store.leases.free_slots(LocalLauncher(2).host, 2)) == (
        State.SUCCEEDED,
        2,
        [0, 1],
    )
    lost = [
        message
        for message in messages(store)
        if f"attempts/1/{document} cannot be read: it is not JSON." in message
    ]
    assert len(lost) == 1
    assert "is lost" in lost[0]
    wait_for(lambda: gone(everything))


def test_a_living_supervisor_that_cannot_be_named_is_asked_to_end(
    folder: Path, store: Store
) -> None:
    """As a stalled attempt is ended, whose supervisor is found by its record."""
    add_job(store)
    run = RunDir(folder / "runs/ftjob-1")
    launcher = LocalLauncher(2, worker_command=scripted("event,hang"))
    reconciler = new_reconciler(folder, store, launcher)
    wait_for(lambda: (reconciler.step() or True) and run.has("pids/1-1"))
    everything = all_processes(run)
    put_garbage(run.path(SUPERVISOR), "pipe")
    launcher.kill(Attempt(run, 1, job_id="ftjob-1"), Reason.STALLED)
    wait_for(lambda: gone(everything))


# Turns that fail for another reason
# ------------------------------------------------------------------------------


class Unseen(FakeLauncher):
    """A place that cannot be observed, for an unforeseen reason."""

    error: Exception | None = None

    def observe(self, attempt: Attempt) -> Observation:
        if self.error is not None:
            raise self.error
        return super().observe(attempt)


def _stuck(folder: Path, store: Store, error: Exception) -> tuple[Reconciler, Unseen]:
    launcher = Unseen(2)
    reconciler = new_reconciler(folder, store, launcher, lease_seconds=0.01)
    add_job(store)
    step_until(reconciler, store, State.RUNNING)
    wait_for(lambda: (reconciler.step() or True) and launcher.started)
    launcher.error = error
    return reconciler, launcher


def test_a_job_whose_turns_fail_says_so_once_and_can_be_cancelled(
    folder: Path, store: Store
) -> None:
    reconciler, launcher = _stuck(folder, store, RuntimeError("/srv/secret/path"))
    wait_for(
        lambda: (reconciler.step() or True) and reconciler._failed_turns.get("ftjob-1", 0) >= 6
    )
    said = [
        message for message in messages(store) if "times in a row to look after this job" in message
    ]
    assert len(said) == 1
    assert "RuntimeError" in said[0]
    assert "/srv" not in said[0]
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    job = step_until(reconciler, store, State.CANCELLED)
    assert (job.phase, store.leases.free_slots("fake", 2)) == (None, [0, 1])
    assert launcher.kills == [("ftjob-1", 1, Reason.USER_CANCELLED)]
    assert messages(store)[-1] == of_reconciler.CANCELLED_UNOBSERVED


def test_a_disk_without_room_is_named_by_the_job_whose_turns_fail(
    folder: Path, store: Store
) -> None:
    reconciler, _ = _stuck(folder, store, OSError(28, "No space left on device"))
    wait_for(
        lambda: (reconciler.step() or True) and reconciler._failed_turns.get("ftjob-1", 0) >= 3
    )
    assert "look after this job. The disk is full. It is tried again" in messages(store)[-1]


def test_a_storage_that_is_away_frees_nothing(folder: Path, store: Store) -> None:
    """What is away comes back, and its processes train on meanwhile."""
    reconciler, launcher = _stuck(folder, store, UnavailableError("s3://bucket cannot be used"))
    store.jobs.request(PROJECT, "ftjob-1", Verb.CANCEL)
    for _ in range(30):
        reconciler.step()
        time.sleep(0.011)
    assert (get(store).phase, store.leases.free_slots("fake", 2)) == (Phase.STOPPING, [])
    launcher.error = None
    step_until(reconciler, store, State.CANCELLED)
    assert store.leases.free_slots("fake", 2) == [0, 1]
