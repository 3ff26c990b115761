"""What an attempt leaves in its run directory, taken over by a service that may read more than its
workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.control.jobs.ingest import collect_result
from ft_service.rundir.attempt import AttemptKeys
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Result
from ft_service.rundir.events import Event, read_segments, write_segment
from ft_service.storage.locations import Places
from tests.support.records import new_job


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secrets/url"
    path.parent.mkdir()
    path.write_text("postgresql://ft:password@db/ft")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "home/runs/ftjob-a")


def collected(run: RunDir, metrics: str) -> list[bytes]:
    """The files that a job which names these metrics leaves."""
    run.write(
        "result.json",
        Result(
            attempt=1, steps=1, trained_tokens=1, train_loss=None, valid_loss=None, metrics=metrics
        ),
    )
    places = Places(run.root.parent.parent)
    _, files = collect_result(run, new_job(id="ftjob-a"), places)
    return [places.file(file.id).read_bytes() for file in files]


def test_metrics_are_a_file_of_the_run_directory_and_nothing_else(
    run: RunDir, secret: Path
) -> None:
    run.put("metrics.csv", b"step\n1\n")
    assert collected(run, "metrics.csv") == [b"step\n1\n"]
    run.path("linked.csv").symlink_to(secret)
    for named in (str(secret), "../../../secrets/url", "linked.csv"):
        assert collected(run, named) == [], named


def test_an_event_segment_that_is_a_link_is_none(run: RunDir, secret: Path) -> None:
    """A line of it that is no event would be shown as a message."""
    write_segment(run, 1, 0, [Event(time=1.0, message="mine")])
    run.path(AttemptKeys(1).segment(1)).symlink_to(secret)
    assert [event.message for segment in read_segments(run, 1) for event in segment.events] == [
        "mine"
    ]
