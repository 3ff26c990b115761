from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import FtError
from ft_service.rundir.project_runs import move_run, run_root
from ft_service.storage.locations import Places

JOB = "ftjob-1"


def test_a_run_directory_moves_with_what_it_holds_and_is_found(tmp_path: Path) -> None:
    places = Places(tmp_path)
    before = places.run(JOB)
    before.put("attempts/1/start.json", b"{}")
    moved = places.run_of_project("proj_1", JOB)
    assert moved.root == tmp_path / "project-runs/proj_1" / JOB
    assert places.run(JOB).root == places.run_of_project("proj_1", JOB).root == moved.root
    assert moved.get("attempts/1/start.json") == before.get("attempts/1/start.json") == b"{}"
    assert moved.plain("attempts/1") == moved.root / "attempts/1"
    assert not (tmp_path / "runs" / JOB).readlink().is_absolute(), (
        "the volume may be mounted elsewhere"
    )


def test_one_that_is_not_there_yet_is_made_and_an_interrupted_move_is_completed(
    tmp_path: Path,
) -> None:
    assert run_root(tmp_path, JOB) == tmp_path / "runs" / JOB
    root = move_run(tmp_path, "proj_1", JOB)
    (root / "spec.json").touch()
    (tmp_path / "runs" / JOB).unlink()
    assert move_run(tmp_path, "proj_1", JOB) == root
    assert (tmp_path / "runs" / JOB / "spec.json").exists()


def test_a_link_of_a_worker_is_refused_and_one_of_the_operators_is_followed(tmp_path: Path) -> None:
    root = move_run(tmp_path, "../proj", JOB)
    assert root == tmp_path / "project-runs/..%2Fproj" / JOB
    root.rmdir()
    root.symlink_to(tmp_path / "runs/ftjob-victim")
    with pytest.raises(FtError, match="was replaced by a link"):
        run_root(tmp_path, JOB)
    (tmp_path / "disk").mkdir()
    own = tmp_path / "runs/ftjob-2"
    own.symlink_to(tmp_path / "disk")
    assert run_root(tmp_path, "ftjob-2") == own
