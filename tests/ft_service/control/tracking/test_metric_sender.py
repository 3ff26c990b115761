"""Sending over a real store, by real processes whose tracker is a folder
(tests/support/programs/tracker.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from ft_service.control.tracking import metric_sender
from ft_service.control.tracking.metric_sender import MetricsSender
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.events import Metrics
from ft_service.settings import Settings
from ft_service.spec import StoredSpec
from ft_service.store.records import JobChange, NewEvent
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, get, new_store, spec_of
from tests.support.secrets import SECRETS

TRAINING: dict[str, Any] = {
    "state": State.RUNNING,
    "phase": Phase.TRAINING,
    "attempt": 1,
    "host": "h",
}
PROGRAM = Path(__file__).parents[3] / "support/programs/tracker.py"
SECRET = "se-cret"


class Senders:
    """Servers that send to one tracker."""

    def __init__(self, settings: Settings, store: Store, tracker: Path) -> None:
        self.settings = settings
        self.store = store
        self.tracker = tracker
        self.all: list[MetricsSender] = []

    def new(self) -> MetricsSender:
        self.all.append(
            MetricsSender(
                self.settings, self.store, (sys.executable, str(PROGRAM), str(self.tracker))
            )
        )
        return self.all[-1]

    def run(self, job_id: str = "ftjob-1") -> dict[str, Any]:
        path = self.tracker / f"{job_id}.json"
        while path.exists():
            try:
                return json.loads(path.read_text())
            except ValueError:  # it is being written
                time.sleep(0.01)
        return {"steps": [], "ends": [], "described": [], "confirmed": []}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def senders(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Senders]:
    monkeypatch.setattr(metric_sender, "TURN_SECONDS", 0.02)
    monkeypatch.setattr(metric_sender, "installed", lambda package: True)
    (tmp_path / "tracker").mkdir()
    settings = Settings(home=tmp_path, wandb_api_key=SecretStr(SECRET))
    senders = Senders(settings, store, tmp_path / "tracker")
    yield senders
    for sender in senders.all:
        sender.stop()


def add(store: Store, job_id: str = "ftjob-1", integrations: int = 1) -> Job:
    request = {
        "training_file": "f",
        "integrations": [{"type": "wandb", "wandb": {"project": "p"}}] * integrations,
    }
    spec = StoredSpec.of(spec_of(job_id))
    state = State.VALIDATING
    job = Job(
        id=job_id,
        project_id=PROJECT,
        created_at=0.0,
        request=request,
        stored_spec=spec,
        state=state,
    )
    return create_job(store, job)


def put(store: Store, *steps: int, **changes: Any) -> None:
    """Steps that the job has reported, and what else became of it."""
    claim = store.leases.claim(host="h", owner="test", lease_seconds=60.0, idle_seconds=0.0)
    assert claim is not None
    events = [
        NewEvent(
            level="info", message="s", metrics=Metrics(step=step, total_steps=9), source=(step, 0)
        )
        for step in steps
    ]
    assert store.leases.apply(claim, JobChange(job=replace(claim.job, **changes), events=events))


def until(sender: MetricsSender, condition: Callable[[], object]) -> None:
    """Let a sender look for what is to be sent until the condition is true."""

    @wraps(condition)
    def looked() -> object:
        sender.look()
        return condition()

    wait_for(looked)


def told(store: Store, job_id: str = "ftjob-1") -> list[str]:
    return [
        e.message
        for e in reversed(store.jobs.list_events(PROJECT, job_id, limit=50).data)
        if "W&B" in e.message
    ]


def execute(store: Store, statement: str) -> None:
    with store.writing() as connection:
        connection.exec_driver_sql(statement)


def due(store: Store) -> None:
    execute(store, "UPDATE integrations SET next_try_at = 0")


def tries(store: Store) -> list[tuple[int, bool]]:
    """Tries that went wrong and whether it is over, of every integration."""
    with store.reading() as connection:
        query = "SELECT tries, finished_at IS NOT NULL FROM integrations ORDER BY number"
        return [(row[0], bool(row[1])) for row in connection.exec_driver_sql(query)]


def looks(sender: MetricsSender) -> None:
    """A few looks, to see that nothing comes of them."""
    for _ in range(5):
        sender.look()
        time.sleep(0.05)


def test_nothing_is_started_before_a_job_begins(store: Store, senders: Senders) -> None:
    sender = senders.new()
    add(store)
    looks(sender)
    assert (sender.pids, senders.run()["described"]) == ([], [])
    put(store, **TRAINING)
    until(sender, lambda: told(store))
    assert told(store) == ["W&B run: https://there/ftjob-1"]


def test_a_job_that_never_began_leaves_no_run(store: Store, senders: Senders) -> None:
    sender = senders.new()
    add(store)
    put(store, state=State.FAILED, finished_at=store.now())
    until(sender, lambda: tries(store) == [(0, True)])
    assert (sender.pids, senders.run()["described"]) == ([], [])


def test_steps_are_sent_once_over_attempts_and_pauses(store: Store, senders: Senders) -> None:
    sender = senders.new()
    add(store, integrations=2)
    both = ("ftjob-1", "ftjob-1-1")
    put(store, 1, 2, 3, **TRAINING)
    until(sender, lambda: all(senders.run(job)["steps"] == [1, 2, 3] for job in both))
    put(store, 4)
    until(sender, lambda: all(senders.run(job)["steps"] == [1, 2, 3, 4] for job in both))
    assert len(sender.pids) == 2
    put(store, state=State.PAUSED, phase=None)
    until(sender, lambda: all(senders.run(job)["ends"] == ["rest"] for job in both))
    until(sender, lambda: not sender.pids)
    looks(sender)
    assert sender.pids == []

    execute(store, "UPDATE jobs SET state = 'running', phase = 'training', attempt = 2")
    put(store, 3, 4, 5)
    until(sender, lambda: all(senders.run(job)["steps"][-1] == 5 for job in both))
    put(store, 6, state=State.SUCCEEDED, phase=None, finished_at=store.now())
    until(sender, lambda: tries(store) == [(0, True), (0, True)])
    for job in both:
        assert senders.run(job)["steps"] == [1, 2, 3, 4, 5, 6]
        assert senders.run(job)["ends"] == ["rest", 0]
        assert [run["name"] for run in senders.run(job)["described"]] == ["ftjob-1", None]
    assert len(told(store)) == 2, "one event for each run, however often it is opened"
    until(sender, lambda: not sender.pids)


def test_a_cancelled_job_ends_once_its_processes_are_gone(store: Store, senders: Senders) -> None:
    sender = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    put(store, state=State.CANCELLED, phase=Phase.STOPPING, finished_at=store.now())
    until(sender, lambda: senders.run()["steps"] == [1])
    looks(sender)
    assert senders.run()["ends"] == []
    put(store, 2, phase=None)
    until(sender, lambda: senders.run()["ends"])
    assert (senders.run()["steps"], senders.run()["ends"]) == ([1, 2], [255])


def test_what_is_away_is_told_once_and_tried_again_later(store: Store, senders: Senders) -> None:
    sender = senders.new()
    away = senders.tracker / "away"
    away.write_text("no answer of https://user:password@there/api")
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: tries(store) == [(1, False)])
    looks(sender)
    assert tries(store) == [(1, False)], "not before its time"
    due(store)
    until(sender, lambda: tries(store) == [(2, False)])
    (warning,) = told(store)
    assert "no answer of https://there/api" in warning
    assert get(store).state is State.RUNNING

    away.unlink()
    due(store)
    until(sender, lambda: senders.run()["steps"] == [1])
    assert told(store) == [warning, "W&B run: https://there/ftjob-1"]


def test_a_tracker_that_hangs_holds_up_no_other_run_and_no_end(
    store: Store, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sender, "REQUEST_SECONDS", 1.0)
    sender = senders.new()
    hang = senders.tracker / "hang"
    hang.touch()
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: tries(store) == [(1, False)])
    (warning,) = told(store)
    assert "took longer than 1 seconds" in warning
    monkeypatch.setattr(metric_sender, "REQUEST_SECONDS", 600.0)
    monkeypatch.setattr(metric_sender, "GRACE_SECONDS", 0.2)
    due(store)
    until(sender, lambda: sender.pids)
    begun = time.monotonic()
    sender.stop()
    assert time.monotonic() - begun < 300, "the request itself would take 600 seconds"
    assert tries(store) == [(1, False)], "the stop of a server is not the tracker's fault"


def test_a_process_that_dies_is_followed_by_another_and_its_last_words_hold_no_secret(
    store: Store, senders: Senders
) -> None:
    sender = senders.new()
    die = senders.tracker / "die"
    die.touch()
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: tries(store) == [(1, False)])
    (warning,) = told(store)
    assert "could not use …" in warning
    assert SECRET not in warning
    die.unlink()
    due(store)
    until(sender, lambda: senders.run()["steps"] == [1])
    os.kill(sender.pids[0], signal.SIGKILL)
    until(sender, lambda: not sender.pids)
    put(store, 2)
    due(store)
    until(sender, lambda: senders.run()["steps"] == [1, 2])


def test_what_does_not_arrive_is_found_and_sent_again(
    store: Store, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sender, "CHECK_SECONDS", 0.1)
    sender = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: senders.run()["confirmed"])
    assert set(senders.run()["confirmed"]) == {1}
    (senders.tracker / "lost").touch()
    put(store, 2)
    until(sender, lambda: tries(store) == [(1, False)])
    assert "step 2 has not arrived" in told(store)[-1]
    (senders.tracker / "lost").unlink()
    due(store)
    until(sender, lambda: senders.run()["steps"] == [1, 2])


def test_an_end_that_fails_is_tried_until_three_days_after_the_job(
    store: Store, senders: Senders
) -> None:
    sender = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: senders.run()["steps"] == [1])
    (senders.tracker / "away").write_text("step 1 has not arrived")
    put(store, state=State.SUCCEEDED, phase=None, finished_at=store.now() - 71 * 3600)
    until(sender, lambda: tries(store) == [(1, False)])

    execute(store, "UPDATE jobs SET finished_at = finished_at - 7200")
    due(store)
    until(sender, lambda: tries(store) == [(2, True)])
    assert [message.partition(":")[0] for message in told(store)] == [
        "W&B run",
        "W&B does not take the job's metrics now",
        "W&B",
    ]
    assert "not tried any more" in told(store)[-1]


def test_only_one_server_sends_until_its_lease_ends(
    store: Store, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = senders.new()
    second = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    until(first, lambda: senders.run()["steps"] == [1])
    looks(second)
    assert second.pids == []
    # As when the first server cannot reach the database.
    execute(store, "UPDATE integrations SET lease_expires_at = 0")
    until(second, lambda: second.pids)
    until(second, lambda: len(senders.run()["described"]) == 2)
    for running, _ in first._running.values():
        running.claimed_at -= metric_sender.LEASE_SECONDS
    until(first, lambda: not first.pids)
    put(store, 2)
    until(second, lambda: senders.run()["steps"] == [1, 2])


def test_a_server_that_stops_leaves_runs_open_and_lets_others_go_on(
    store: Store, senders: Senders
) -> None:
    first = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    until(first, lambda: senders.run()["steps"] == [1])
    first.stop()
    put(store, 2)
    until(senders.new(), lambda: senders.run()["steps"] == [1, 2])
    assert senders.run()["ends"] == []
    assert len(told(store)) == 1


def test_many_steps_are_read_in_parts(
    store: Store, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sender, "STEPS_AT_ONCE", 3)
    add(store)
    put(store, *range(1, 8), **TRAINING)
    until(senders.new(), lambda: senders.run()["steps"] == list(range(1, 8)))


def test_no_secret_is_in_the_environment_or_among_the_arguments(
    store: Store, senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SECRETS, "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    sender = senders.new()
    add(store)
    put(store, 1, **TRAINING)
    until(sender, lambda: senders.run()["steps"] == [1])
    process = Path(f"/proc/{sender.pids[0]}")
    environment = dict(
        (line.split("=", 1))
        for line in (process / "environ").read_text().split("\0")
        if "=" in line
    )
    assert SECRETS.keys() & environment.keys() == {"HTTPS_PROXY"}, "by which it reaches the tracker"
    assert environment["WANDB_DATA_DIR"].startswith(str(senders.settings.home))
    assert "WANDB_MODE" not in environment
    assert SECRET not in "".join(environment.values()) + (process / "cmdline").read_text()
