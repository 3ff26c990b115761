"""What an attempt leaves in its run directory, taken over by a service that may read more than its
workers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.control.jobs.ingest import collect_result, with_energy
from ft_service.jobs.decisions import placed
from ft_service.rundir.attempt import Attempt, AttemptKeys
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Energy, Result
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


def test_energy_is_added_up_over_attempts_and_never_twice(run: RunDir) -> None:
    job = new_job(attempt=1, grams_per_kwh=360.0)
    assert with_energy(job, run) == job, "not measured"
    Attempt(run, 1).node().write_energy(Energy(joules=2e6, source="nvml"))
    job = with_energy(job, run)
    assert (job.joules, job.attempt_joules, job.co2_grams) == (2e6, 2e6, 200.0)
    assert with_energy(job, run) == job
    Attempt(run, 1).node().write_energy(Energy(joules=5e6, source="nvml"))
    job = with_energy(job, run)
    Attempt(run, 1).node().write_energy(Energy(joules=1.0, source="nvml"))
    assert with_energy(job, run) == job, "it cannot fall"
    Attempt(run, 2).node().write_energy(Energy(joules=1e6, source="nvml"))
    second = with_energy(replace(placed(job, "h"), grams_per_kwh=None), run)
    assert (second.joules, second.attempt_joules) == (6e6, 1e6)
    assert second.co2_grams == 500.0, "what a kWh weighs is not known there"
    seated = replace(job, attempt=2, engine_id="engine-1")
    assert with_energy(seated, run) == seated, "the engine's own is divided"
