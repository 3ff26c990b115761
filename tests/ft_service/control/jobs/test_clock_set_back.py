"""A job that ends while the clock is set back by two hours, and a cancel that comes after its
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.control.jobs.ingest import cancel_job
from ft_service.errors import SpecError
from ft_service.jobs.states import Phase, State
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExitReason, Result
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.attempts import wait_for
from tests.support.databases import set_clock
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, add_job, get, new_reconciler, new_store, step_until

SUCCEEDED = exit_of(ExitReason.SUCCEEDED, "Training has finished.")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


def write_result(folder: Path) -> None:
    result = Result(attempt=1, steps=1, trained_tokens=77, train_loss=2.0, valid_loss=None)
    RunDir(folder / "runs/ftjob-1").write("result.json", result)


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_job_that_has_ended_is_seen_to_and_the_next_one_starts(
    tmp_path: Path, store: Store, hours: int
) -> None:
    launcher = FakeLauncher(slots=2)
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store)
    wait_for(lambda: reconciler.step() and ("ftjob-1", 1) in launcher.started)
    add_job(store, "ftjob-2")
    wait_for(lambda: reconciler.step() and get(store, "ftjob-2").state is State.QUEUED)

    set_clock(store, hours * 3600)
    write_result(tmp_path)
    launcher.end("ftjob-1", 1, SUCCEEDED)

    assert step_until(reconciler, store).state is State.SUCCEEDED
    wait_for(lambda: reconciler.step() and ("ftjob-2", 1) in launcher.started)


def test_a_cancel_after_the_result_throws_nothing_away(tmp_path: Path, store: Store) -> None:
    launcher = FakeLauncher(slots=2)
    places = Places(tmp_path)
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store)
    wait_for(lambda: reconciler.step() and ("ftjob-1", 1) in launcher.started)
    write_result(tmp_path)

    with pytest.raises(SpecError, match="already succeeded"):
        cancel_job(store, places, PROJECT, "ftjob-1")

    assert (get(store).state, get(store).phase) == (State.RUNNING, Phase.LAUNCHING)
    launcher.end("ftjob-1", 1, SUCCEEDED)
    assert step_until(reconciler, store).state is State.SUCCEEDED


@pytest.mark.parametrize("written", [b"", b"{", b"\xff\xfe"])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, store: Store, written: bytes) -> None:
    launcher = FakeLauncher(slots=2)
    reconciler = new_reconciler(tmp_path, store, launcher)
    add_job(store)
    wait_for(lambda: reconciler.step() and ("ftjob-1", 1) in launcher.started)
    RunDir(tmp_path / "runs/ftjob-1").put("result.json", written)
    assert cancel_job(store, Places(tmp_path), PROJECT, "ftjob-1").state is State.CANCELLED
