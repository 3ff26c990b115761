"""What cannot be removed keeps nothing else from being removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.cleanup import pruning
from ft_service.control.cleanup.housekeeping import KEEP_ENGINE_SECONDS, remove_expired, retain
from ft_service.control.tinker.tinker_models import remove_unused
from ft_service.errors import FtError, NotFoundError, UnavailableError
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.engines import EngineStore
from ft_service.store.records import File
from ft_service.store.sql import Store
from ft_service.store.tinker import TinkerSampler
from ft_service.tinker.names import job_id_of
from ft_service.tinker.saved_weights import sampler_key
from tests.support.reconciling import PROJECT, new_store

PARTS = "upload_0"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"home": tmp_path, "keep_files_days": 1.0})


@pytest.fixture
def swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes when the last of what `remove_expired` does is done."""
    done: list[str] = []
    monkeypatch.setattr(
        store.webhooks, "forget_deliveries", lambda *ages: done.append("deliveries")
    )
    return done


def add_files(store: Store, settings: Settings, *names: str) -> None:
    """Files of which all were uploaded long ago."""
    settings.files_dir.mkdir()
    for name in names:
        (settings.files_dir / name).write_text("12345")
        file = File(
            id=name,
            project_id=PROJECT,
            filename=name,
            purpose="p",
            bytes=5,
            sha256=name,
            created_at=0.0,
        )
        store.files.add_file(file)
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE files SET created_at = 1")


def fails_at(
    name: str, real: Callable[..., Any], error: Exception | None = None
) -> Callable[..., Any]:
    """The function, except for a path of this name."""

    def remove(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise error or PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    return remove


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_audit_log_is_kept_unless_its_age_is_limited(store: Store, settings: Settings) -> None:
    add_files(store, settings, "a")
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE audit SET created_at = 1")
    kept = Settings(home=settings.home)
    retain(kept, store)
    assert [entry.type for entry in store.audit.list_audit().data] == ["file.created"]
    retain(kept.model_copy(update={"keep_audit_days": 1.0}), store)
    assert store.audit.list_audit().data == []


@pytest.mark.parametrize("error", [None, NotFoundError("There is no job ftjob-1.")])
def test_an_item_that_cannot_be_removed_does_not_keep_those_behind_it(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: FtError | None,
) -> None:
    add_files(store, settings, "a", "b", "c")
    real = pruning.remove
    at_b = fails_at("b", lambda path, removal: real(removal, store), error)
    monkeypatch.setattr(pruning, "remove", lambda removal, *rest: at_b(removal.path, removal))
    retain(settings, store)
    assert left(settings.files_dir) == ["b"]
    assert f"removing {settings.files_dir}/b has failed: " in caplog.text


def test_while_the_database_is_away_nothing_else_is_tried(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_files(store, settings, "a", "b")
    tried: list[str] = []

    def remove(removal: pruning.Removal, *rest: object) -> bool:
        tried.append(removal.path.name)
        raise UnavailableError("The database is away.")

    monkeypatch.setattr(pruning, "remove", remove)
    with pytest.raises(UnavailableError):
        retain(settings, store)
    assert tried == ["a"]


def test_a_deleted_file_that_cannot_be_removed_keeps_no_other_and_is_tried_again(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, swept: list[str]
) -> None:
    add_files(store, settings, "a", "b", "c")
    for name in "abc":
        store.files.delete_file(PROJECT, name)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fails_at("a", Path.unlink))
        remove_expired(settings, store)
    assert (left(settings.files_dir), store.files.freeable_files()) == (["a"], ["a"])
    assert swept == ["deliveries"]
    remove_expired(settings, store)
    assert (left(settings.files_dir), store.files.freeable_files()) == ([], [])


def test_parts_that_cannot_be_removed_keep_no_others_and_what_is_no_upload_stays(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, swept: list[str]
) -> None:
    for name in (PARTS, "upload_1", "lost+found"):
        (settings.uploads_dir / name).mkdir(parents=True)
    (settings.uploads_dir / "notes").write_text("of a person")
    monkeypatch.setattr(shutil, "rmtree", fails_at(PARTS, shutil.rmtree))
    remove_expired(settings, store)
    assert left(settings.uploads_dir) == ["lost+found", "notes", PARTS]
    assert swept == ["deliveries"]


def test_an_engines_folder_that_cannot_be_removed_keeps_no_others(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, swept: list[str]
) -> None:
    ids = ["engine-0", "engine-1", "engine-2"]
    for name in ids:
        (settings.home / "engines" / name).mkdir(parents=True)

    def ended(engines: EngineStore, found: list[str], seconds: float) -> list[str]:
        assert (sorted(found), seconds) == (ids, KEEP_ENGINE_SECONDS)
        return ids

    monkeypatch.setattr(EngineStore, "ended_engines", ended)
    monkeypatch.setattr(shutil, "rmtree", fails_at("engine-1", shutil.rmtree))
    remove_expired(settings, store)
    assert left(settings.home / "engines") == ["engine-1"]
    assert swept == ["deliveries"]


def test_weights_of_a_sampler_that_cannot_be_removed_keep_no_others(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods of engines may write to the folder of their project, and put a link in a run directory's
    place.
    """
    places = Places.of(settings)
    models = ["session-0:train:0", "session-1:train:0"]
    runs = [places.run_of_project(PROJECT, job_id_of(model)).root for model in models]
    for run in runs:
        (run / sampler_key("own")).mkdir(parents=True)
    runs[0].rename(runs[0].with_name("elsewhere"))
    runs[0].symlink_to(runs[0].with_name("elsewhere"))
    unused = [
        TinkerSampler(
            id=model,
            project_id=PROJECT,
            session_id=model,
            base="tiny",
            model_path=f"tinker://{model}/sampler_weights/own",
        )
        for model in models
    ]
    forgotten: list[str] = []
    monkeypatch.setattr(store.tinker, "unused_samplers", lambda seconds: unused)
    monkeypatch.setattr(store.tinker, "delete_sampler", forgotten.append)
    remove_unused(store, places)
    assert forgotten == models[1:]
    assert [(run / sampler_key("own")).exists() for run in runs] == [True, False]
