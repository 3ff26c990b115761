"""The run directory: documents are whole or absent, one writer wins, and only complete, intact
checkpoints exist.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ft_service.rundir.attempt import last_attempt
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, UnreadableDocumentError, sha256_of
from ft_service.rundir.documents import CheckpointMarker, Control, Desired, Start
from ft_service.rundir.file_digest import NamedFile
from tests.support.unreadable import GARBAGE, put_garbage


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def add_checkpoint(run: RunDir, name: str, *, complete: bool = True) -> None:
    step, attempt = (int(part.lstrip("step-a")) for part in name.removeprefix("step-").split("-"))
    run.put(f"checkpoints/{name}/shard", f"weights of {name}".encode())
    if complete:
        path = run.path(f"checkpoints/{name}/shard")
        file = NamedFile(name="shard", bytes=path.stat().st_size, sha256=sha256_of(path))
        marker = CheckpointMarker(step=step, attempt=attempt, world_size=2, files=[file])
        run.write(f"checkpoints/{name}/COMPLETE", marker)


def test_documents_come_back_as_written(run: RunDir) -> None:
    assert run.read("attempts/1/control.json", Control) is None
    for generation in (1, 2):
        control = Control(generation=generation, desired=Desired.PAUSE)
        run.write("attempts/1/control.json", control)
        assert run.read("attempts/1/control.json", Control) == control
    assert run.list("attempts") == ["attempts/1/control.json"]
    assert run.list("nothing") == []


def test_put_if_absent_has_one_winner_and_never_replaces(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(
            pool.map(lambda number: run.put_if_absent("key", str(number).encode()), range(32))
        )
    assert won.count(True) == 1
    assert run.get("key") == str(won.index(True)).encode()
    assert not run.put_if_absent("key", b"later")
    assert run.list(".") == ["key"], "no temporary file stays"


def test_a_failed_write_leaves_the_old_document_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.put("key", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.put("key", b"new")
    assert run.get("key") == b"old"
    assert run.list(".") == ["key"]


def test_a_checkpoint_without_marker_does_not_exist(run: RunDir) -> None:
    assert newest_checkpoint(run) is None
    add_checkpoint(run, "step-4-a1")
    add_checkpoint(run, "step-8-a1", complete=False)
    assert complete_checkpoints(run) == ["step-4-a1"]
    assert newest_checkpoint(run) == "step-4-a1"


def test_checkpoints_are_ordered_by_step_then_attempt_as_numbers(run: RunDir) -> None:
    for name in ("step-12-a1", "step-8-a10", "step-8-a2", "step-100-a1"):
        add_checkpoint(run, name)
    run.put("checkpoints/step-x-a1/COMPLETE", b"{}")
    assert complete_checkpoints(run) == ["step-8-a2", "step-8-a10", "step-12-a1", "step-100-a1"]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: path.write_bytes(b"short"), "has 5 bytes instead of 20"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "has other contents"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    run: RunDir, damage: object, fault: str
) -> None:
    add_checkpoint(run, "step-4-a1")
    add_checkpoint(run, "step-8-a1")
    damage(run.path("checkpoints/step-8-a1/shard"))  # type: ignore[operator]
    assert fault in checkpoint_faults(run, "step-8-a1")[0]
    assert newest_checkpoint(run) == "step-4-a1"


def test_last_attempt(run: RunDir) -> None:
    assert last_attempt(run) == 0
    for attempt in (1, 2, 10):
        start = Start(job_id="j", attempt=attempt, world_size=1, generation=1, checkpoint=None)
        run.write(f"attempts/{attempt}/start.json", start)
    run.put("attempts/11/logs/early", b"")
    assert last_attempt(run) == 10


def test_a_folder_that_goes_while_keys_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for key in ("checkpoints/a/COMPLETE", "checkpoints/b/COMPLETE"):
        run.put(key, b"{}")
    scandir = os.scandir

    def after_its_removal(folder: str) -> Any:
        if str(folder).endswith("/b"):
            shutil.rmtree(folder, ignore_errors=True)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", after_its_removal)
    assert run.list("checkpoints") == ["checkpoints/a/COMPLETE"]


def test_what_a_worker_has_linked_is_not_read_for_it(tmp_path: Path) -> None:
    """The service sees secrets that its workers do not; neither a link, nor a path that climbs, nor
    a pipe gets at them.
    """
    secret = tmp_path / "secrets/key"
    secret.parent.mkdir()
    secret.write_text("ft-secret")
    run = RunDir(tmp_path / "run")
    run.put("attempts/1/start.json", b"{}")
    run.path("events.jsonl").symlink_to(secret)
    run.path("adapter").symlink_to(secret.parent)
    os.mkfifo(run.path("pipe"))
    for key in ("adapter/key", "../secrets/key", "attempts/../../secrets/key", str(secret)):
        assert run.get(key) is None, key
    for key in ("events.jsonl", "pipe", "attempts"):
        with pytest.raises(
            UnreadableDocumentError, match=f"{key} cannot be read: it is not a regular file"
        ):
            run.get(key)
    for key in ("events.jsonl", "adapter", "adapter/key", "../secrets", str(secret)):
        assert run.plain(key) is None, key
    assert run.get("attempts/1/start.json") == b"{}"
    assert run.plain("attempts/1") == run.root / "attempts/1"
    assert run.plain("attempts/2") is None


def test_a_run_directory_behind_a_link_is_one(tmp_path: Path) -> None:
    """The operator's links are followed: FT_HOME may be one."""
    RunDir(tmp_path / "there").put("a/b", b"x")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    run = RunDir(tmp_path / "here")
    assert (run.get("a/b"), run.plain("a")) == (b"x", tmp_path / "here/a")


@pytest.mark.parametrize("kind", sorted(GARBAGE))
def test_whatever_lies_in_a_documents_place_is_named_and_can_be_replaced(
    run: RunDir, kind: str
) -> None:
    control = Control(generation=1, desired=Desired.PAUSE)
    key = "attempts/1/control.json"
    put_garbage(run.path(key), kind)
    assert run.has(key)
    with pytest.raises(
        UnreadableDocumentError, match=r"^attempts/1/control.json cannot be read: .{3,}"
    ) as raised:
        run.read(key, Control, 2**20)
    assert len(raised.value.message) < 500
    assert run.readable(key, Control, 2**20) is None
    assert not run.write_if_absent(key, control)
    run.write(key, control)
    assert run.read(key, Control) == control
    assert run.list("attempts") == [key]
