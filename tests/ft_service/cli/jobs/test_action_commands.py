from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ft_service.client.client import Client
from ft_service.client.responses import RemoteJob
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.jobs.user_actions import Verb
from ft_service.store.sql import open_store
from tests.support.command_line import Ft
from tests.support.creating import create_job
from tests.support.records import new_job
from tests.support.rest.stub_server import StubServer, job_body


def test_verbs(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")
    assert ft("pause", "ftjob-1").out == "ftjob-1 is paused\n"
    assert ft("resume", "ftjob-1").out == "ftjob-1 is queued\n"
    assert json.loads(ft("cancel", "ftjob-1", "--json").out)["status"] == "cancelled"


def test_a_job_is_renamed_and_noted(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", suffix="run-7")
    renamed = ft("rename", "run-7", "refunds", "--note", "half the data")
    assert renamed.out == "ftjob-1 is called refunds.\nNote: half the data\n"
    assert [server.jobs["ftjob-1"][part] for part in ("name", "note")] == [
        "refunds",
        "half the data",
    ]
    shown = ft("get", "refunds").out
    assert "half the data" in shown
    assert json.loads(ft("rename", "refunds", "", "--json").out)["name"] is None
    assert server.jobs["ftjob-1"]["note"] == "half the data", "what is not given stays"
    refused = ft("rename", "run-7")
    assert (refused.code, refused.err) == (64, "ft: Give the job a NAME, or --note TEXT.\n")


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


def test_an_operator_pauses_all_projects_and_resumes_just_those(ft: Ft, home: Path) -> None:
    """Without a server or a key; and not what users have paused themselves."""
    made = json.loads(ft("projects", "create", "second", "--json").out)
    with closing(open_store(f"sqlite:///{home / 'ft.db'}")) as store:
        create_job(store, new_job(id="ftjob-1", project_id="default", state=State.QUEUED))
        create_job(store, new_job(id="ftjob-2", project_id=made["id"], state=State.QUEUED))
        create_job(store, new_job(id="ftjob-3", project_id="default", state=State.QUEUED))
        create_job(
            store,
            new_job(id="ftjob-4", project_id="default", state=State.SUCCEEDED, finished_at=1.0),
        )
        store.jobs.request("default", "ftjob-3", Verb.PAUSE)
        assert json.loads(ft("pause", "--all", "--json").out) == {"pause": 2}
        two = [("default", "ftjob-1"), (made["id"], "ftjob-2")]
        paused = [store.jobs.get_job(*one) for one in two]
        assert [job.state for job in paused] == [State.PAUSED] * 2
        assert {job.reason for job in paused} == {Reason.MAINTENANCE}
        assert ft("pause", "--all").out.startswith("0 jobs")
        store.jobs.request("default", "ftjob-1", Verb.RESUME)
        assert json.loads(ft("resume", "--all", "--json").out) == {"resume": 1}
        states = [store.jobs.get_job(*one).state for one in (*two, ("default", "ftjob-3"))]
        assert states == [State.QUEUED, State.QUEUED, State.PAUSED]
    for wrong in (
        ("pause",),
        ("pause", "ftjob-1", "--all"),
        ("resume", "--all", "--nproc-per-node", 2),
    ):
        assert ft(*wrong).code == 64
