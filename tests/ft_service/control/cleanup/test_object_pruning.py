"""What is old goes from object storage as from the disk, and nothing that an unfinished job needs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.cleanup import stored_tree
from ft_service.control.cleanup.housekeeping import retain
from ft_service.control.cleanup.pruning import DAY_SECONDS, RetentionLimits, plan_pruning, remove
from ft_service.jobs.states import State
from ft_service.settings import Settings
from ft_service.spec import AdapterRef
from ft_service.storage.object_store import ObjectStore
from ft_service.store.records import File
from ft_service.store.sql import Store
from tests.support.cluster_settings import cluster_settings
from tests.support.prunable import add_with_files
from tests.support.reconciling import PROJECT, new_store
from tests.support.storage import local_s3, new_bucket


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return cluster_settings(tmp_path).model_copy(update={"storage": new_bucket()})


@pytest.fixture
def objects(settings: Settings) -> ObjectStore:
    return ObjectStore(settings.storage)


def stored(
    objects: ObjectStore, store: Store, settings: Settings, job_id: str, days: float, **more: Any
) -> None:
    """A job that ended some days ago, whose files are objects, with a copy on this host."""
    run = add_with_files(store, settings, job_id, more.pop("state", State.SUCCEEDED), days, **more)
    for key in run.list(""):
        objects.upload(run.path(key), f"runs/{job_id}/{key}")


def pruned(settings: Settings, store: Store, limits: RetentionLimits) -> dict[str, int]:
    """Path below FT_HOME → bytes told, of all that went."""
    planned = list(plan_pruning(settings, store, limits))
    gone = [removal for removal in planned if remove(removal, store)]
    return {r.path.relative_to(settings.home).as_posix(): r.bytes for r in gone}


def test_runs_checkpoints_and_deleted_models_go(
    settings: Settings, store: Store, objects: ObjectStore
) -> None:
    stored(objects, store, settings, "ftjob-month", 31)
    stored(objects, store, settings, "ftjob-week", 8)
    stored(objects, store, settings, "ftjob-fresh", 1)
    stored(objects, store, settings, "ftjob-running", 0, state=State.RUNNING)
    stored(objects, store, settings, "ftjob-parent", 31)
    parent = AdapterRef(
        name="ft:…", job_id="ftjob-parent", path=str(settings.runs_dir / "ftjob-parent/adapter")
    )
    stored(objects, store, settings, "ftjob-child", 0, state=State.QUEUED, parent=parent)
    deleted = store.jobs.get_job(PROJECT, "ftjob-fresh").tuned_name
    store.models.delete_model(PROJECT, str(deleted))
    assert pruned(settings, store, RetentionLimits(runs=30, checkpoints=7)) == {
        "runs/ftjob-month": 20,
        "runs/ftjob-week/checkpoints/step-3-a1": 5,
        "runs/ftjob-week/checkpoints/step-6-a1": 5,
        "runs/ftjob-fresh/adapter": 5,
    }
    left = {
        key for key in objects.list("runs") if key.split("/")[1] in ("ftjob-week", "ftjob-fresh")
    }
    assert left == {
        "runs/ftjob-week/adapter/a",
        "runs/ftjob-week/adapters/step-3-a1/a",
        "runs/ftjob-fresh/adapters/step-3-a1/a",
        "runs/ftjob-fresh/checkpoints/step-3-a1/COMPLETE",
        "runs/ftjob-fresh/checkpoints/step-6-a1/COMPLETE",
    }
    assert objects.names("runs") == [
        "ftjob-child",
        "ftjob-fresh",
        "ftjob-parent",
        "ftjob-running",
        "ftjob-week",
    ]
    assert not (settings.runs_dir / "ftjob-month").exists(), "the copy on this host went too"
    model = store.jobs.get_job(PROJECT, "ftjob-month").tuned_name
    assert store.models.is_deleted(str(model))


def test_a_checkpoints_marker_goes_first(
    settings: Settings, store: Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(objects, store, settings, "ftjob-a", 8)
    objects.put("runs/ftjob-a/checkpoints/step-3-a1/.early", b"before it in the alphabet")
    order: list[str] = []
    monkeypatch.setattr(
        stored_tree.ObjectStore, "remove", lambda self, key: order.append(key.rpartition("/")[2])
    )
    removal = next(plan_pruning(settings, store, RetentionLimits(checkpoints=7)))
    remove(removal, store)
    assert order == ["COMPLETE", ".early"]


def test_files_and_their_tokens_go_by_age(
    settings: Settings, store: Store, objects: ObjectStore
) -> None:
    sha256 = hashlib.sha256(b"x").hexdigest()
    for name, days in (("file-old", 8), ("file-new", 1)):
        digest = sha256 if name == "file-old" else hashlib.sha256(b"y").hexdigest()
        store.files.add_file(
            File(
                id=name,
                project_id=PROJECT,
                filename="a.jsonl",
                purpose="fine-tune",
                bytes=1,
                sha256=digest,
                created_at=0.0,
            )
        )
        with store.writing() as connection:
            connection.exec_driver_sql(
                "UPDATE files SET created_at = ? WHERE id = ?",
                (store.now() - days * DAY_SECONDS, name),
            )
        objects.put(f"files/{name}", b"x")
        objects.put(f"tokens/{digest}.t/ids", b"x")
    retain(settings.model_copy(update={"keep_files_days": 7.0}), store)
    assert objects.names("files") == ["file-new"]
    assert len(objects.names("tokens")) == 1
    assert not objects.list(f"tokens/{sha256}.t")


def test_leftovers_are_a_day_old(
    settings: Settings, store: Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(objects, store, settings, "ftjob-a", 1)
    objects.put("runs/ftjob-unknown/spec.json", b"12")
    objects.put("files/file-unknown", b"1")
    leftovers = RetentionLimits(leftovers=True)
    assert pruned(settings, store, leftovers) == {}, "they may be on their way in"
    later = time.time() + 2 * DAY_SECONDS
    monkeypatch.setattr("ft_service.control.cleanup.pruning.time.time", lambda: later)
    assert pruned(settings, store, leftovers) == {"runs/ftjob-unknown": 2, "files/file-unknown": 1}
    assert objects.list("files") == {}
    assert objects.names("runs") == ["ftjob-a"]


def test_retention_asks_once_for_each_old_job(
    settings: Settings, store: Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        stored(objects, store, settings, f"ftjob-{number}", 8)
    stored(objects, store, settings, "ftjob-fresh", 1)
    asked: list[str] = []
    real = stored_tree.ObjectStore.entries

    def counted(self: ObjectStore, prefix: str) -> Any:
        asked.append(prefix)
        return real(self, prefix)

    monkeypatch.setattr(stored_tree.ObjectStore, "entries", counted)
    assert len(list(plan_pruning(settings, store, RetentionLimits(runs=30, checkpoints=7)))) == 6
    assert asked == [f"runs/ftjob-{number}" for number in range(3)]
