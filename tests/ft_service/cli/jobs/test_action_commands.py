from __future__ import annotations

import json
import sys

import pytest

from ft_service.client.client import Client
from ft_service.client.responses import RemoteJob
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body


def test_verbs(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")
    assert ft("pause", "ftjob-1").out == "ftjob-1 is paused\n"
    assert ft("resume", "ftjob-1").out == "ftjob-1 is queued\n"
    assert json.loads(ft("cancel", "ftjob-1", "--json").out)["status"] == "cancelled"


def test_a_job_that_still_stops_says_so(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = RemoteJob.model_validate(job_body(status="running", phase="stopping"))
    monkeypatch.setattr(Client, "pause", lambda self, job_id: job)
    server.jobs["ftjob-1"] = job_body(status="running")
    said = (
        "ftjob-1 will be paused as soon as it has written a checkpoint.\nResume it: ft resume "
        "ftjob-1\n"
    )
    assert ft("pause", "ftjob-1").out == said
    assert job.state_text == "stopping at a checkpoint"


TUNED = "ft:tiny:local:mine:1"


def test_rm_removes_a_file_or_a_tuned_model_and_asks_first(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = [{"id": "file-1", "filename": "train.jsonl", "bytes": 5}]
    server.jobs["ftjob-1"] = job_body(status="succeeded", fine_tuned_model=TUNED)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    refused = ft("rm", "file-1")
    assert (refused.code, len(server.files)) == (64, 1)
    assert "would remove the file train.jsonl (file-1). Say so with --yes" in refused.err
    assert ft("files").out.splitlines()[1].split()[:2] == ["file-1", "train.jsonl"]
    assert ft("rm", "file-", "--yes").out == "Removed the file train.jsonl (file-1).\n"
    assert server.files == []
    assert json.loads(ft("rm", "last", "--yes", "--json").out) == {"id": TUNED, "deleted": True}
    assert server.requests[-1].method == "DELETE"
    assert (
        "would remove the job ftjob-1 with all that it has made. Say so"
        in ft("rm", "--job", "last").err
    )
    assert ft("rm", "--job", "last", "--yes").out == f"Removed the job ftjob-1, {TUNED}.\n"
    assert server.jobs == {}
    server.jobs["ftjob-1"] = job_body(status="running", fine_tuned_model=None)
    assert "Job ftjob-1 has no tuned model to remove (running)." in ft("rm", "last", "--yes").err
