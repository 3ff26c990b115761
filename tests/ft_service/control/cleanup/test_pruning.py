"""What may go goes, and nothing that an unfinished job needs."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select

from ft_service.control.cleanup import pruning
from ft_service.control.cleanup.housekeeping import free, retain
from ft_service.control.cleanup.pruning import DAY_SECONDS, RetentionLimits, plan_pruning, remove
from ft_service.jobs.states import Phase, State
from ft_service.settings import Settings
from ft_service.spec import AdapterRef
from ft_service.storage.locations import Places
from ft_service.store.records import File
from ft_service.store.sql import Store
from ft_service.store.tables import jobs
from tests.support.prunable import add_with_files, model_of
from tests.support.reconciling import PROJECT, new_store

ALL = RetentionLimits(runs=30, checkpoints=7, files=7, cache=7, leftovers=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def pruned(settings: Settings, store: Store, limits: RetentionLimits = ALL) -> list[str]:
    """What went, below FT_HOME."""
    planned = list(plan_pruning(settings, store, limits, cache=settings.home / "cache"))
    for removal in planned:
        assert remove(removal, store), removal
        assert not removal.path.exists()
    return sorted(removal.path.relative_to(settings.home).as_posix() for removal in planned)


def test_only_what_is_old_goes(settings: Settings, store: Store) -> None:
    add_with_files(store, settings, "ftjob-new", State.SUCCEEDED, 1)
    add_with_files(store, settings, "ftjob-week", State.FAILED, 8)
    add_with_files(store, settings, "ftjob-month", State.SUCCEEDED, 31)
    assert pruned(settings, store, RetentionLimits()) == []
    found = plan_pruning(settings, store, ALL)
    assert [(r.kind, r.bytes, r.job and r.job.id) for r in found if r.kind == "run"] == [
        ("run", 20, "ftjob-month")
    ]
    assert pruned(settings, store) == [
        "runs/ftjob-month",
        "runs/ftjob-week/checkpoints/step-3-a1",
        "runs/ftjob-week/checkpoints/step-6-a1",
    ]
    assert store.models.is_deleted(model_of("ftjob-month"))
    assert store.models.is_deleted(model_of("ftjob-month", 6))
    assert not store.models.is_deleted(model_of("ftjob-week"))
    assert (settings.runs_dir / "ftjob-week/adapters/step-3-a1/a").exists()
    assert pruned(settings, store) == []


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (State.VALIDATING, None),
        (State.QUEUED, None),
        (State.RUNNING, Phase.TRAINING),
        (State.PAUSED, None),
        (State.CANCELLED, Phase.STOPPING),
    ],
)
def test_what_is_not_over_is_never_touched(
    settings: Settings, store: Store, state: State, phase: Phase | None
) -> None:
    run = add_with_files(store, settings, "ftjob-1", state, 365, phase=phase)
    store.models.delete_model(PROJECT, model_of("ftjob-1"))
    os.utime(run.root, (0, 0))
    assert pruned(settings, store) == []


def test_what_an_unfinished_job_goes_on_from_stays(settings: Settings, store: Store) -> None:
    of_outcome = add_with_files(store, settings, "ftjob-a", State.SUCCEEDED, 99)
    of_checkpoint = add_with_files(store, settings, "ftjob-b", State.SUCCEEDED, 99)
    for model in (model_of("ftjob-a"), model_of("ftjob-b", 6)):
        store.models.delete_model(PROJECT, model)
    for child, path in (
        ("1", of_outcome.path("adapter")),
        ("2", of_checkpoint.path("adapters/step-6-a1")),
    ):
        ref = AdapterRef(
            name="ft:…",
            job_id=path.parents[0 if path.name == "adapter" else 1].name,
            path=str(path),
        )
        add_with_files(store, settings, f"ftjob-{child}", State.PAUSED, parent=ref)
    assert pruned(settings, store, RetentionLimits(runs=30)) == []
    gone = pruned(settings, store, RetentionLimits(checkpoints=7))
    assert gone == [
        "runs/ftjob-a/checkpoints/step-3-a1",
        "runs/ftjob-a/checkpoints/step-6-a1",
        "runs/ftjob-b/checkpoints/step-3-a1",
    ], "the other one's adapter is still to be made"


def test_a_job_that_comes_to_need_it_between_plan_and_removal_keeps_it(
    settings: Settings, store: Store
) -> None:
    run = add_with_files(store, settings, "ftjob-a", State.SUCCEEDED, 99)
    (removal,) = plan_pruning(settings, store, ALL)
    ref = AdapterRef(name="ft:…", job_id="ftjob-a", path=str(run.path("adapter")))
    add_with_files(store, settings, "ftjob-child", State.QUEUED, parent=ref)
    assert remove(removal, store) is False
    assert run.path("adapter/a").exists()
    assert removal.hides
    assert not any(store.models.is_deleted(model) for model in removal.hides)


def test_a_run_that_cannot_be_read_keeps_no_other(
    settings: Settings,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers may write there: a job can close its own folder to the service."""
    for name in ("ftjob-a", "ftjob-b", "ftjob-c"):
        add_with_files(store, settings, name, State.SUCCEEDED, 99)
    real = Path.is_dir

    def is_dir(path: Path) -> bool:
        if path.parents[1].name == "ftjob-b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert pruned(settings, store, RetentionLimits(runs=30)) == ["runs/ftjob-a", "runs/ftjob-c"]
    assert f"measuring {settings.runs_dir}/ftjob-b has failed: " in caplog.text


def test_a_deleted_models_adapter_goes_and_the_rest_stays(settings: Settings, store: Store) -> None:
    add_with_files(store, settings, "ftjob-a", State.SUCCEEDED)
    store.models.delete_model(PROJECT, model_of("ftjob-a"))
    assert pruned(settings, store, RetentionLimits()) == ["runs/ftjob-a/adapter"]
    store.models.delete_model(PROJECT, model_of("ftjob-a", 3))
    assert pruned(settings, store, RetentionLimits()) == [
        "runs/ftjob-a/adapters/step-3-a1",
        "runs/ftjob-a/checkpoints/step-3-a1",
    ]


def repeat(store: Store, settings: Settings, job_id: str, number: int) -> None:
    """As many more jobs like this one, with empty run directories."""
    with store.writing() as connection:
        row = dict(connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().one())
        del row["position"]
        connection.execute(
            insert(jobs), [row | {"id": f"{job_id}{place:04}"} for place in range(number)]
        )
    for place in range(number):
        (settings.runs_dir / f"{job_id}{place:04}").mkdir()


@pytest.fixture
def loaded(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records of jobs, or of files, each statement has loaded."""
    numbers: list[int] = []

    def counting(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def load(*args: Any, **options: Any) -> list[Any]:
            found = real(*args, **options)
            numbers.append(len(found))
            return found

        return load

    monkeypatch.setattr(store.jobs, "jobs_by_id", counting(store.jobs.jobs_by_id))
    monkeypatch.setattr(store.files, "old_files", counting(store.files.old_files))
    return numbers


def test_records_are_loaded_only_of_what_goes_and_a_page_at_a_time(
    settings: Settings, store: Store, loaded: list[int]
) -> None:
    add_with_files(store, settings, "ftjob-old", State.SUCCEEDED, 31)
    add_with_files(store, settings, "ftjob-new", State.SUCCEEDED, 1)
    repeat(store, settings, "ftjob-old", 400)
    repeat(store, settings, "ftjob-new", 2600)
    assert (list(plan_pruning(settings, store, RetentionLimits(leftovers=True))), sum(loaded)) == (
        [],
        0,
    )
    store.models.delete_model(PROJECT, model_of("ftjob-new", 6))
    store.models.delete_model(PROJECT, model_of("ftjob-old0399"))  # of which there are no files
    assert [removal.kind for removal in plan_pruning(settings, store, RetentionLimits())] == [
        "checkpoints"
    ]
    assert sum(loaded) == 1
    loaded.clear()
    found = list(plan_pruning(settings, store, RetentionLimits(runs=30)))
    assert sorted(removal.path for removal in found if removal.kind == "run") == sorted(
        settings.runs_dir.glob("ftjob-old*")
    )
    assert sum(loaded) == len(found) == 402
    assert max(loaded) <= pruning.PAGE


def test_old_files_are_loaded_a_page_at_a_time(
    settings: Settings, store: Store, loaded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PAGE", 3)
    names = [f"file-{number}" for number in range(8)]
    add_files(settings, store, *names)
    (settings.files_dir / "file-0").unlink()
    (settings.files_dir / "file-0").mkdir()  # cannot be removed as a file
    retain(settings.model_copy(update={"keep_files_days": 7.0}), store)
    assert loaded == [3, 3, 2, 0]
    assert [path.name for path in settings.files_dir.iterdir()] == ["file-0"]


def add_files(settings: Settings, store: Store, *names: str) -> None:
    """Files of which all were uploaded long ago."""
    settings.files_dir.mkdir()
    for name in names:
        store.files.add_file(
            File(
                id=name,
                project_id=PROJECT,
                filename=name,
                purpose="p",
                bytes=1,
                sha256="",
                created_at=0.0,
            )
        )
        (settings.files_dir / name).write_bytes(b"1")
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE files SET created_at = 5")


def test_files_go_by_age_unless_a_job_needs_them(settings: Settings, store: Store) -> None:
    add_files(settings, store, "file-old", "file-needed")
    store.files.add_file(
        File(
            id="file-new",
            project_id=PROJECT,
            filename="n",
            purpose="p",
            bytes=1,
            sha256="",
            created_at=0.0,
        )
    )
    add_with_files(store, settings, "ftjob-1", State.PAUSED, training_file="file-needed")
    assert pruned(settings, store) == ["files/file-old"]
    assert [file.id for file in store.files.list_files(PROJECT, order="asc").data] == [
        "file-needed",
        "file-new",
    ]
    assert (
        store.files.kept_files(["file-old", "file-needed", "file-new"]),
        store.files.freeable_files(),
    ) == (
        {"file-needed", "file-new"},
        [],
    )


def test_a_file_that_a_job_comes_to_need_between_plan_and_removal_keeps_its_bytes(
    settings: Settings, store: Store
) -> None:
    add_files(settings, store, "file-old", "file-gone")
    needed, gone = sorted(
        plan_pruning(settings, store, ALL), key=lambda removal: removal.path.name, reverse=True
    )
    add_with_files(store, settings, "ftjob-1", State.QUEUED, training_file="file-old")
    store.files.delete_file(PROJECT, "file-gone")
    assert [remove(removal, store) for removal in (needed, gone)] == [False, False]
    assert (settings.files_dir / "file-old").exists()
    assert store.files.kept_files(["file-old", "file-gone"]) == {"file-old", "file-gone"}


def test_leftovers_are_a_day_old_and_belong_to_nothing(settings: Settings, store: Store) -> None:
    add_with_files(store, settings, "ftjob-1", State.PAUSED)
    add_files(settings, store, "file-known")
    for name in ("runs/ftjob-unknown/spec.json", "files/file-unknown", "files/.upload-x"):
        path = settings.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    leftovers = RetentionLimits(leftovers=True)
    assert pruned(settings, store, leftovers) == [], "they may be on their way in"
    for path in [*settings.runs_dir.rglob("*"), *settings.files_dir.rglob("*")]:
        os.utime(path, (1, 1))
    assert pruned(settings, store, RetentionLimits()) == []
    assert pruned(settings, store, leftovers) == [
        "files/.upload-x",
        "files/file-unknown",
        "runs/ftjob-unknown",
    ]


def test_of_a_link_only_the_link_goes(settings: Settings, store: Store, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "COMPLETE").touch()
    settings.runs_dir.mkdir()
    link = settings.runs_dir / "ftjob-linked"
    link.symlink_to(target)
    os.utime(link, (1, 1), follow_symlinks=False)
    assert pruned(settings, store, RetentionLimits(leftovers=True)) == ["runs/ftjob-linked"]
    assert (target / "COMPLETE").exists()


def test_a_checkpoints_marker_goes_first(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_with_files(store, settings, "ftjob-week", State.FAILED, 8)
    seen: list[list[str]] = []

    def interrupted(folder: Path) -> None:
        seen.append([path.name for path in folder.iterdir()])
        raise OSError("the disk is gone")

    monkeypatch.setattr("ft_service.control.cleanup.stored_tree.shutil.rmtree", interrupted)
    removal, _ = plan_pruning(settings, store, ALL)
    with pytest.raises(OSError, match="the disk is gone"):
        remove(removal, store)
    assert seen == [[]]


def cache_entry(settings: Settings, name: str, days: float, folder: str = "cache") -> Path:
    """A quantised base, or the tokens of a file, last used so many days ago."""
    index = settings.home / folder / name / "index.json"
    index.parent.mkdir(parents=True)
    (index.parent / "lock").touch()
    index.touch()
    used = time.time() - days * DAY_SECONDS
    os.utime(index, (used, used))
    return index.parent


def test_a_cached_base_that_is_in_use_stays(settings: Settings, store: Store) -> None:
    for name, days in (("old", 9), ("used", 9), ("new", 1)):
        cache_entry(settings, name, days)
    with (settings.home / "cache/used/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        found = plan_pruning(settings, store, ALL, cache=settings.home / "cache")
        assert [(removal.path.name, remove(removal, store)) for removal in found] == [
            ("old", True),
            ("used", False),
        ]
    assert sorted(path.name for path in (settings.home / "cache").iterdir()) == ["new", "used"]


def test_tokens_go_by_age_too_and_with_their_file(settings: Settings, store: Store) -> None:
    old = cache_entry(settings, "12.a", 9, "tokens")
    new = cache_entry(settings, "12.b", 1, "tokens")
    tokens = settings.home / "tokens"
    planned = plan_pruning(settings, store, ALL, cache=settings.home / "cache", tokens=tokens)
    assert [(removal.kind, removal.path, remove(removal, store)) for removal in planned] == [
        ("cache", old, True)
    ]
    assert list(tokens.iterdir()) == [new]
    store.files.add_file(
        File(
            id="f",
            project_id=PROJECT,
            filename="a.jsonl",
            purpose="fine-tune",
            bytes=1,
            sha256="12",
            created_at=0.0,
        )
    )
    free(Places(settings.home), store, ["f"])
    assert list(tokens.iterdir()) == []


def test_a_cached_base_that_was_used_since_the_plan_stays(settings: Settings, store: Store) -> None:
    entry = cache_entry(settings, "old", 9)
    (found,) = plan_pruning(settings, store, ALL, cache=settings.home / "cache")
    os.utime(entry / "index.json")
    assert not remove(found, store)
    assert entry.is_dir()


def test_descriptions_that_are_not_used_go(settings: Settings, store: Store) -> None:
    folder = settings.home / "cache" / "descriptions"
    folder.mkdir(parents=True)
    for name, days in (("new.json", 1), ("old.json", 9), ("used.json", 9)):
        (folder / name).write_text("{}")
        used = time.time() - days * DAY_SECONDS
        os.utime(folder / name, (used, used))
    planned = sorted(
        plan_pruning(settings, store, ALL, cache=settings.home / "cache"),
        key=lambda removal: removal.path,
    )
    assert [(removal.kind, removal.path.name, removal.bytes) for removal in planned] == [
        ("cache", "old.json", 2),
        ("cache", "used.json", 2),
    ]
    os.utime(folder / "used.json")
    assert [remove(removal, store) for removal in planned] == [True, False]
    assert sorted(path.name for path in folder.iterdir()) == ["new.json", "used.json"]


def test_a_cached_base_that_was_written_anew_meanwhile_stays(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening an entry's lock and taking it, a worker removes the entry and writes it
    again.
    """
    entry = cache_entry(settings, "old", 9)
    (found,) = plan_pruning(settings, store, ALL, cache=settings.home / "cache")
    state = (entry / "index.json").stat()
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(entry)
        os.utime(
            cache_entry(settings, "old", 0) / "index.json",
            ns=(state.st_atime_ns, state.st_mtime_ns),
        )
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not remove(found, store)
    assert sorted(path.name for path in entry.iterdir()) == ["index.json", "lock"]


def test_a_run_in_its_projects_folder_goes_with_its_link(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    add_with_files(store, settings, "ftjob-old", State.SUCCEEDED, 40)
    add_with_files(store, settings, "ftjob-kept", State.SUCCEEDED, 8)
    add_with_files(store, settings, "ftjob-tampered", State.SUCCEEDED, 40)
    places = Places(tmp_path)
    for job_id in ("ftjob-old", "ftjob-kept", "ftjob-tampered", "ftjob-strange"):
        root = places.run_of_project(PROJECT, job_id).root
        assert root == tmp_path / "project-runs" / PROJECT / job_id
    shutil.rmtree(root.parent / "ftjob-tampered")
    (root.parent / "ftjob-tampered").symlink_to(root.parent / "ftjob-kept")
    parent = AdapterRef(
        name="ft:tiny:local::0",
        job_id="ftjob-kept",
        path=str(tmp_path / "runs/ftjob-kept/adapters/step-6-a1"),
    )
    add_with_files(store, settings, "ftjob-child", State.QUEUED, parent=parent)
    os.utime(root, (0, 0))
    shutil.rmtree(places.run_of_project(PROJECT, "ftjob-gone").root)
    base = f"project-runs/{PROJECT}"
    assert pruned(settings, store) == [
        f"{base}/ftjob-kept/checkpoints/step-3-a1",
        f"{base}/ftjob-old",
        f"{base}/ftjob-strange",
        "runs/ftjob-gone",
    ]
    assert {path.name for path in settings.runs_dir.iterdir()} == {
        "ftjob-kept",
        "ftjob-tampered",
        "ftjob-child",
    }
    assert (settings.runs_dir / "ftjob-kept/adapter/a").exists()
