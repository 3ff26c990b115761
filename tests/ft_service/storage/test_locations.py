from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.rundir.attempt import last_attempt
from ft_service.rundir.documents import (
    Start,
)
from ft_service.rundir.events import Event, read_segments, write_segment
from ft_service.storage.locations import ObjectRunDir, Places
from ft_service.storage.object_store import ObjectStore
from tests.support.storage import local_s3, new_bucket

JOB = "ftjob-1"


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore(new_bucket())


@pytest.fixture
def service(objects: ObjectStore, tmp_path: Path) -> Places:
    """The service, whose disk is not the nodes'."""
    return Places(tmp_path / "service", objects)


def test_a_run_directory_is_the_same_there(service: Places) -> None:
    run = service.run(JOB)
    assert isinstance(run, ObjectRunDir)
    assert last_attempt(run) == 0
    for attempt in (1, 2):
        run.write(f"attempts/{attempt}/start.json", start_of(attempt))
    assert last_attempt(run) == 2
    assert run.read("attempts/2/start.json", Start) == start_of(2)
    for seq in range(2):
        write_segment(run, 1, seq, [Event(time=1.0, message=f"event {seq}")])
    with pytest.raises(FileExistsError):
        write_segment(run, 1, 1, [Event(time=1.0, message="again")])
    assert [segment.seq for segment in read_segments(run, 1)] == [0, 1]
    run.put("adapter/config.json", b"{}")
    assert "adapter/config.json" in run.list("")
    assert "adapter/config.json" in run.list("adapter")
    assert [path.name for path in run.path("adapter").iterdir()] == ["config.json"]
    run.put("attempts/1/logs/a.log", b"one line\n")
    assert run.path("attempts/1/logs/a.log").read_text() == "one line\n"
    run.put("attempts/1/logs/a.log", b"one line\nanother\n")
    assert run.path("attempts/1/logs/a.log").read_text() == "one line\nanother\n"


def test_files_are_found_by_every_process(
    service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    other = Places(tmp_path / "other", objects)
    service.files_dir.mkdir(parents=True)
    (service.files_dir / "file-1").write_bytes(b"data")
    service.keep("file-1")
    assert other.file("file-1").read_bytes() == b"data"
    assert other.fetched(other.files_dir / "file-1").read_bytes() == b"data"
    assert not other.file("file-2").exists()
    other.remove("file-1")
    assert objects.list("files") == {}


def start_of(attempt: int, checkpoint: str | None = None) -> Start:
    return Start(
        job_id=JOB, attempt=attempt, world_size=2, generation=1, checkpoint=checkpoint, nodes=2
    )
