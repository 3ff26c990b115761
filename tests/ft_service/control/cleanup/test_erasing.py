"""Deleted jobs and projects leave nothing on the disk or in the database, whatever interrupts their
erasure.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from ft_service.control.cleanup import housekeeping
from ft_service.control.cleanup.erasing import erase
from ft_service.control.cleanup.housekeeping import remove_expired
from ft_service.errors import NotFoundError
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.directory import RunDir
from ft_service.rundir.project_runs import project_folder
from ft_service.settings import Settings
from ft_service.spec import AdapterRef, StoredSpec, TunedName
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.store import erasure
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store, open_store
from ft_service.store.tables import engines, events, jobs, metadata, projects
from tests.support.creating import create_job
from tests.support.databases import (
    emptied_postgres_url,
    migrated_postgres_url,
    postgres_url,
    store_url,
)
from tests.support.reconciling import PROJECT, new_store, spec_of
from tests.support.records import new_file

__all__ = ["emptied_postgres_url", "migrated_postgres_url", "postgres_url", "store_url"]

DAY = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def add(
    store: Store,
    home: Path,
    job_id: str,
    *,
    days: float = 0.0,
    state: State = State.SUCCEEDED,
    **changes: Any,
) -> RunDir:
    """A job with ten events and a run directory in the folder of its project."""
    name = TunedName("tiny", "local", "", job_id.removeprefix("ftjob-"))
    job = Job(
        id=job_id,
        project_id=PROJECT,
        created_at=0.0,
        request={"training_file": "file-x"},
        stored_spec=StoredSpec.of(
            spec_of(job_id, tuned_name=str(name), parent=changes.pop("parent", None))
        ),
        state=state,
        reason=Reason.SUCCEEDED if state is State.SUCCEEDED else None,
        finished_at=store.now() - days * DAY
        if state in (State.SUCCEEDED, State.CANCELLED)
        else None,
        **changes,
    )
    create_job(store, job, [NewEvent(level="info", message=f"step {step}") for step in range(9)])
    run = Places(home).run_of_project(PROJECT, job_id)
    run.put("adapter/a", b"12345")
    return run


def run_out(settings: Settings, store: Store) -> int:
    """Erase what can be, as housekeeping does. Returns the number of steps."""
    return sum(1 for _ in erase(settings, store, Places.of(settings)))


def left(home: Path) -> list[str]:
    """Run directories, and links to them."""
    return sorted(
        path.name
        for folder in (home / "runs", project_folder(home, PROJECT))
        for path in folder.glob("*")
    )


def test_a_deleted_jobs_run_directory_goes_once_no_job_continues_from_it(
    store: Store, settings: Settings
) -> None:
    run = add(store, settings.home, "ftjob-a")
    add(store, settings.home, "ftjob-b")
    parent = AdapterRef(name="ft:…", job_id="ftjob-a", path=str(run.path("adapter")))
    add(store, settings.home, "ftjob-child", state=State.PAUSED, parent=parent)
    for job_id in ("ftjob-a", "ftjob-b"):
        store.erasure.delete_job(PROJECT, job_id)
    run_out(settings, store)
    assert left(settings.home) == ["ftjob-a", "ftjob-a", "ftjob-child", "ftjob-child"]
    assert run.path("adapter/a").read_bytes() == b"12345"
    assert store.jobs.known_jobs(["ftjob-a", "ftjob-b"]) == {"ftjob-a"}
    with store.writing() as connection:
        over = update(jobs).where(jobs.c.id == "ftjob-child")
        connection.execute(over.values(state="succeeded", finished_at=1.0))
    run_out(settings, store)
    assert left(settings.home) == ["ftjob-child", "ftjob-child"]
    assert store.jobs.get_job(PROJECT, "ftjob-child").known_spec.parent is not None


def test_a_job_that_cannot_be_removed_keeps_no_other_and_is_tried_again(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for job_id in ("ftjob-a", "ftjob-b", "ftjob-c"):
        add(store, settings.home, job_id)
        store.erasure.delete_job(PROJECT, job_id)
    outside = settings.home / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    shutil.rmtree(project_folder(settings.home, PROJECT) / "ftjob-c")
    # By a worker: only the link goes.
    (project_folder(settings.home, PROJECT) / "ftjob-c").symlink_to(outside)
    real = shutil.rmtree

    def rmtree(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "ftjob-a":
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *args, **options)

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", rmtree)
        run_out(settings, store)
    assert "erasing the job ftjob-a has failed: " in caplog.text
    assert store.jobs.known_jobs(["ftjob-a", "ftjob-b", "ftjob-c"]) == {"ftjob-a"}
    run_out(settings, store)
    assert (
        left(settings.home),
        store.jobs.known_jobs(["ftjob-a"]),
        (outside / "kept").exists(),
    ) == ([], set(), True)


def test_jobs_and_events_go_by_age_only_if_the_operator_says_so(
    store: Store, settings: Settings
) -> None:
    for number, days in enumerate((400, 40, 4)):
        add(store, settings.home, f"ftjob-{number}", days=days)
    assert run_out(settings, store) == 0
    run_out(settings.model_copy(update={"keep_events_days": 30.0}), store)
    assert [
        len(store.jobs.list_events(PROJECT, f"ftjob-{number}").data) for number in range(3)
    ] == [0, 0, 10]
    by_age = settings.model_copy(update={"keep_jobs_days": 365.0})
    run_out(by_age, store)
    run_out(by_age, store)
    assert sorted(job.id for job in store.jobs.list_jobs(PROJECT).data) == ["ftjob-1", "ftjob-2"]
    assert (left(settings.home), store.jobs.known_jobs(["ftjob-0"])) == (
        ["ftjob-1", "ftjob-1", "ftjob-2", "ftjob-2"],
        set(),
    )
    assert [entry.type for entry in store.audit.list_audit().data] == ["job.created"] * 3, (
        "age leaves no entries behind"
    )


class _Objects(ObjectStore):
    """Object storage in memory."""

    def __init__(self, objects: dict[str, int]) -> None:
        self.objects = objects

    def list(self, prefix: str) -> dict[str, int]:
        return {key: size for key, size in self.objects.items() if key.startswith(f"{prefix}/")}

    def remove(self, key: str) -> None:
        del self.objects[key]


def test_on_object_storage_the_objects_of_a_deleted_job_go(
    store: Store, settings: Settings
) -> None:
    add(store, settings.home, "ftjob-a")
    store.erasure.delete_job(PROJECT, "ftjob-a")
    objects = _Objects(
        {"runs/ftjob-a/adapter/a": 5, "runs/ftjob-a/spec.json": 5, "runs/ftjob-ab/spec.json": 5}
    )
    list(erase(settings, store, Places(settings.home, objects)))
    assert objects.objects == {"runs/ftjob-ab/spec.json": 5}


def test_others_have_their_turn_between_the_steps_of_an_erasure(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much there is to remove, a look at what has expired ends, and so does the service."""
    monkeypatch.setattr(erasure, "AT_ONCE", 1)
    monkeypatch.setattr(housekeeping, "MOST_ERASURES", 4)
    add(store, settings.home, "ftjob-a")
    store.erasure.delete_job(PROJECT, "ftjob-a")
    turns: list[int] = []

    class _Stop:
        """Set after two rounds."""

        def is_set(self) -> bool:
            return turns.count(0) == 2

        def wait(self, seconds: float) -> bool:
            turns.append(0 if seconds == housekeeping.EXPIRE_SECONDS else 1)
            return False

    housekeeping.run(settings, store, None, _Stop())  # pyright: ignore[reportArgumentType]
    assert turns == [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    with store.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(events)) == 10 - 6


def in_a_process_killed_at(number: int, work: Callable[[], object]) -> bool:
    """Work in a process of its own that SIGKILL ends in its so-manyth transaction, or removal of a
    directory, before that is done. Returns whether it was killed.
    """
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    begun = 0

    def killed_in(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal begun
            begun += 1
            done = None if real is shutil.rmtree and begun == number else real(*args, **options)
            if begun == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    failed = 1
    try:
        erasure._remove = killed_in(erasure._remove)
        erasure._hide = killed_in(erasure._hide)
        shutil.rmtree = killed_in(shutil.rmtree)
        work()
        failed = 0
    finally:
        os._exit(failed)


# the statements, on both: tests/ft_service/store/test_erasure.py
@pytest.mark.parametrize(
    "store_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_a_projects_erasure_goes_on_where_a_kill_has_ended_it(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "AT_ONCE", 4)
    monkeypatch.setattr(erasure, "SETTLE_SECONDS", 0.0)
    settings = Settings(home=tmp_path, database_url=store_url)
    store = open_store(store_url)
    store.projects.ensure_project(PROJECT, "local")
    for number in range(3):
        add(store, tmp_path, f"ftjob-{number}")
    add(store, tmp_path, "ftjob-waits", state=State.QUEUED)
    stopping = add(
        store,
        tmp_path,
        "ftjob-stops",
        state=State.RUNNING,
        phase=Phase.TRAINING,
        attempt=1,
        host="elsewhere",
    )
    settings.files_dir.mkdir()
    (settings.files_dir / "file-1").write_text("12345")
    store.files.add_file(new_file(id="file-1", project_id=PROJECT))
    (tmp_path / "engines/engine-1").mkdir(parents=True)
    with store.writing() as connection:
        row = {
            "id": "engine-1",
            "project_id": PROJECT,
            "host": "h",
            "share_key": "",
            "ranks": 1,
            "most_seats": 2,
        }
        connection.execute(
            insert(engines).values(**row, created_at=1.0, divided_at=1.0, ended_at=1.0)
        )
    store.erasure.delete_project(PROJECT)
    store.close()

    def work() -> None:
        own = open_store(store_url)
        remove_expired(settings, own)
        run_out(settings, own)
        own.close()

    kills = 0
    while in_a_process_killed_at(4 + 4 * kills, work):
        kills += 1
    assert kills > 5
    store = open_store(store_url)
    assert stopping.path("adapter/a").exists(), "its processes may still be there"
    with store.reading() as connection:
        states = {row.id: row.state for row in connection.execute(select(jobs.c.id, jobs.c.state))}
    assert (states, store.erasure.projects_to_erase()) == ({"ftjob-stops": "cancelled"}, [PROJECT])
    with store.writing() as connection:
        connection.execute(update(jobs).values(phase=None))
    assert in_a_process_killed_at(20, work)
    for _ in range(3):
        assert not in_a_process_killed_at(1000, work)
    assert store.erasure.projects_to_erase() == []
    with store.reading() as connection:
        left_over = {
            table.name: number
            for table in metadata.sorted_tables
            if "project_id" in table.c
            and (number := connection.scalar(select(func.count()).select_from(table)))
        }
        name = connection.scalar(select(projects.c.name).where(projects.c.id == PROJECT))
    assert (left_over, name) == ({"audit": 1, "deleted_models": 3, "usage": 1}, None)
    assert (
        left(tmp_path),
        list(settings.files_dir.iterdir()),
        list((tmp_path / "engines").iterdir()),
    ) == ([], [], [])
    assert not project_folder(tmp_path, PROJECT).exists()
    with pytest.raises(NotFoundError):
        store.projects.get_project(PROJECT)
    store.close()
