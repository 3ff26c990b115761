from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body, tar_of


def test_download(
    ft: Ft, server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.adapter = tar_of({"adapter/adapter_config.json": b"{}"})
    monkeypatch.chdir(tmp_path)
    assert ft("download", "ftjob-1").out == "The adapter is in ftjob-1\n"
    assert (tmp_path / "ftjob-1/adapter_config.json").is_file()
    shown = json.loads(ft("download", "ftjob-1", "--out", tmp_path / "mine", "--json").out)
    assert shown == {"id": "ftjob-1", "adapter": str(tmp_path / "mine")}
    assert server.requests[-1].extensions["timeout"]["read"] <= 60, (
        "it is there, so that silence is an error soon"
    )
    assert ft("download", "ftjob-1").code == 64


def test_download_of_a_checkpoint_by_its_step(ft: Ft, server: StubServer, tmp_path: Path) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")
    point = {
        "fine_tuning_job_id": "ftjob-1",
        "fine_tuned_model_checkpoint": "ft:x",
        "created_at": 0,
    }
    server.checkpoints = [
        {**point, "id": f"ftckpt-{step}", "step_number": step} for step in (20, 10)
    ]
    server.adapter = tar_of({"adapter/adapter_config.json": b"{}"})
    assert ft("download", "ftjob-1", "--checkpoint", "10", "--out", tmp_path / "mine").code == 0
    assert (tmp_path / "mine/adapter_config.json").is_file()
    assert server.requests[-1].url.path.endswith("/ftjob-1/checkpoints/ftckpt-10/adapter")
    assert server.requests[-1].extensions["timeout"]["read"] >= 600, (
        "it may be made first, on a busy host"
    )
    missing = ft("download", "ftjob-1", "--checkpoint", "11")
    assert (missing.code, missing.err) == (
        1,
        "ft: Job ftjob-1 has no checkpoint at step 11; it has: 10, 20.\n",
    )
