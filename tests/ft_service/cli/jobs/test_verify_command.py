from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_service.rundir.directory import RunDir
from tests.support.bases import save_base
from tests.support.command_line import Ft
from tests.support.run_directories import finished_run, flip_a_bit


def test_an_adapter_is_verified_by_its_job_s_name_too(ft: Ft, tmp_path: Path, home: Path) -> None:
    (home / "runs").mkdir(parents=True)
    finished_run(tmp_path).root.rename(home / "runs/ftjob-1")
    ended = ft("verify", "ftjob-1", "--json")
    assert (ended.code, json.loads(ended.out)["ok"]) == (0, True)
    assert "There is no file or folder a/b" in ft("verify", "a/b").err


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path)


def test_the_command_says_what_differs_and_exits_1(ft: Ft, run: RunDir) -> None:
    fine = ft("verify", run.root)
    assert fine.code == 0
    assert "is intact" in fine.out.splitlines()[-1]
    flip_a_bit(run.path("adapter/adapter_model.safetensors"))
    ended = ft("verify", run.root)
    assert ended.code == 1
    assert (
        "differs: adapter_model.safetensors has other contents than when it was written"
        in ended.out
    )
    document = json.loads(ft("verify", run.path("adapter"), "--json").out)
    assert (document["ok"], document["manifest"]["job"]) == (False, "ftjob-1")
    assert ft("verify", run.root / "absent").code == 64


def test_a_merged_model_is_whole_or_not(ft: Ft, tmp_path: Path) -> None:
    """It has no manifest; a truncated file is detected."""
    folder = save_base(tmp_path / "merged")
    fine = ft("verify", folder)
    assert (fine.code, "merged: is complete (checked: weight files)" in fine.out) == (0, True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    cut = ft("verify", folder)
    assert cut.code == 1
    assert "differs: The base's model.safetensors" in cut.out
