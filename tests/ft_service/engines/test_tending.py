from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from ft_service.control.cleanup.housekeeping import remove_ended_engines
from ft_service.engines import tending
from ft_service.engines.engine_directory import EngineDirectory
from ft_service.engines.tending import EngineOptions, EngineTending
from ft_service.errors import UnavailableError
from ft_service.jobs.decisions import placed
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Running, State
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import Control, Desired, ExitReason, Stop
from ft_service.rundir.engine import ENGINE
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.store.records import JobChange, NewEngine
from ft_service.store.sql import Store
from tests.support.creating import create_job
from tests.support.engines import sharing_spec
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import new_store
from tests.support.records import new_job
from tests.support.storage import local_s3, new_bucket

NAME = "engine-1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def tends(
    tmp_path: Path, store: Store, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> EngineTending:
    monkeypatch.setattr(tending, "TEND_SECONDS", 0.0)
    return EngineTending(
        store, launcher, Places(tmp_path), EngineOptions(most_seats=8, idle_seconds=5.0)
    )


@pytest.fixture
def engine(tmp_path: Path, store: Store, tends: EngineTending) -> EngineDirectory:
    """An engine with one job, which is not started yet."""
    job = create_job(
        store,
        new_job(id="ftjob-1", project_id="proj", state=State.QUEUED, slots=2, share_key="key"),
    )
    claim = store.leases.claim_queued(
        job.id, host="fake", owner="t", lease_seconds=60, host_slots=2
    )
    assert claim is not None
    job = placed(claim.job, "fake", engine_id=NAME)
    assert store.leases.apply(claim, JobChange(job=job, take_slots=[0, 1], new_engine=NewEngine(8)))
    assert tends.prepare(job, sharing_spec()) == tmp_path / "engines" / NAME
    return EngineDirectory(Places(tmp_path), NAME)


def leave(store: Store) -> None:
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET engine_id = NULL"))


def starts(engine: EngineDirectory, launcher: FakeLauncher) -> None:
    launcher.start(engine.attempt)
    launcher.set(NAME, 1, Running())


def is_live(store: Store) -> bool:
    return bool(store.engines.live_engines())


def test_the_documents_of_an_engine(engine: EngineDirectory) -> None:
    spec = engine.run.read(ENGINE, EngineSpec)
    assert spec == EngineSpec(
        engine_id=NAME, project_id="proj", spec=sharing_spec(), most_seats=8, idle_seconds=5.0
    )
    start = engine.attempt.read_start()
    assert start is not None
    assert (start.job_id, start.world_size, start.slots, start.engine) == (NAME, 2, [0, 1], None)


def test_the_slots_are_free_once_the_engine_is_gone(store, tends, launcher, engine) -> None:
    starts(engine, launcher)
    tends.attend()
    assert is_live(store)
    launcher.end(NAME, 1, exit_of(ExitReason.STOPPED, "idle"))
    tends.attend()
    assert not is_live(store)
    assert store.leases.free_slots("fake", 2) == [0, 1]
    assert launcher.cleaned == [(NAME, 1)]


def test_an_engine_whose_job_left_before_it_was_started_never_starts(
    store, tends, launcher, engine
) -> None:
    tends.attend()
    assert launcher.kills == []
    leave(store)
    tends.attend()
    assert launcher.kills == [(NAME, 1, Reason.USER_CANCELLED)]
    tends.attend()
    assert not is_live(store)


def test_an_engine_is_asked_to_end_even_if_the_service_is_killed_before_it_says_so(
    store, tends, launcher, engine
) -> None:
    starts(engine, launcher)
    assert store.engines.close_engine(NAME, if_idle=False)
    tends.attend()
    assert launcher.signals == [(NAME, 1, Control(generation=2, desired=Desired.PAUSE))]
    assert not tends.close(NAME, if_idle=False)


def test_an_engine_whose_place_is_taken_back_takes_no_more_jobs(
    store, tends, launcher, engine
) -> None:
    starts(engine, launcher)
    engine.attempt.write_stop(Stop(reason="Slurm takes the allocation back"))
    tends.look_at(NAME)
    (live,) = store.engines.live_engines()
    assert live.closing_at is not None


def test_an_engine_that_should_have_ended_long_ago_is_asked_to(
    store, tends, launcher, engine
) -> None:
    starts(engine, launcher)
    leave(store)
    tends.attend()
    assert launcher.signals == []
    with store.writing() as connection:
        connection.execute(text("UPDATE engines SET divided_at = divided_at - 71"))
    tends.attend()
    assert [signal[0] for signal in launcher.signals] == [NAME]


def test_an_engine_that_waits_for_its_place_without_a_job_is_asked_to_end_until_its_place_hears(
    store, tends, launcher, engine, monkeypatch
) -> None:
    starts(engine, launcher)
    launcher.set(NAME, 1, Running(admitted=False))
    leave(store)
    away = monkeypatch.context()
    with away as patched:
        patched.setattr(
            launcher, "signal", lambda attempt, control: attempt.write_control(control) or 1 / 0
        )
        tends.attend()
    assert launcher.signals == []
    (live,) = store.engines.live_engines()
    assert live.closing_at is not None
    tends.attend()
    assert launcher.signals == [(NAME, 1, Control(generation=2, desired=Desired.PAUSE))]


def test_what_a_place_keeps_of_an_engine_is_removed_though_the_service_is_killed_meanwhile(
    store, tends, launcher, engine, monkeypatch
) -> None:
    starts(engine, launcher)
    launcher.end(NAME, 1, None)
    with monkeypatch.context() as patched:
        patched.setattr(launcher, "clean", lambda attempt: 1 / 0)
        tends.attend()
    assert is_live(store)
    tends.attend()
    assert not is_live(store)
    assert launcher.cleaned == [(NAME, 1)]


def test_an_engine_that_cannot_be_observed_keeps_no_other_waiting(
    store, tends, launcher, engine, monkeypatch
) -> None:
    monkeypatch.setattr(launcher, "observe", lambda attempt: 1 / 0)
    tends.attend()
    assert is_live(store)


def test_storage_that_denies_an_engine_keeps_no_other_job_waiting(
    tmp_path, store, launcher, engine, monkeypatch
) -> None:
    denied = UnavailableError("s3://b/ft denies reading", code="storage_denied")

    def observe(attempt: object) -> None:
        raise denied

    monkeypatch.setattr(launcher, "observe", observe)
    with pytest.raises(UnavailableError):  # here it is the database
        EngineTending(store, launcher, Places(tmp_path), EngineOptions(most_seats=8)).attend()
    with local_s3():
        places = Places(tmp_path, ObjectStore(new_bucket()))
        EngineTending(store, launcher, places, EngineOptions(most_seats=8)).attend()
    assert is_live(store)


def test_folders_of_ended_engines_are_removed_later(
    tmp_path, store, tends, launcher, engine, monkeypatch
) -> None:
    starts(engine, launcher)
    launcher.end(NAME, 1, None)
    tends.attend()
    remove_ended_engines(store, Places(tmp_path))
    assert engine.run.has(ENGINE)
    (tmp_path / "engines/engine-strange").mkdir()
    with store.writing() as connection:
        connection.execute(text("UPDATE engines SET ended_at = ended_at - 700000"))
    remove_ended_engines(store, Places(tmp_path))
    assert [folder.name for folder in (tmp_path / "engines").iterdir()] == ["engine-strange"]


def test_objects_of_ended_engines_are_removed_later(tmp_path, store, launcher, engine) -> None:
    with local_s3():
        places = Places(tmp_path, ObjectStore(new_bucket()))
        there = EngineDirectory(places, NAME)
        there.run.put("attempts/1/logs/supervisor.log", b"hello")
        assert there.attempt.find_logs() is not None, "a copy is on this host"
        places.engine("engine-strange").put(ENGINE, b"{}")
        assert store.engines.end_engine(NAME)
        remove_ended_engines(store, places)
        assert places.engine_ids() == {NAME, "engine-strange"}
        with store.writing() as connection:
            connection.execute(text("UPDATE engines SET ended_at = ended_at - 700000"))
        remove_ended_engines(store, places)
        assert places.engine_ids() == {"engine-strange"}
        assert not (tmp_path / "engines" / NAME).exists()
