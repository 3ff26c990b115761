from __future__ import annotations

import json

import pytest

from ft_service.cli.output import local_time
from ft_service.client.client import Client
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, event_body, job_body, metrics_event


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls without waiting."""
    follow = Client.follow
    monkeypatch.setattr(
        Client, "follow", lambda self, job_id: follow(self, job_id, sleep=lambda seconds: None)
    )


@pytest.mark.usefixtures("_at_once")
def test_watch_prints_plain_lines_where_there_is_no_terminal(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", phase="training")
    server.events += [event_body(0, "Job created.")]

    def pass_time(reads: int) -> None:
        steps = range(100 * (reads - 1) + 1, 100 * reads + 1)
        server.events.extend(
            metrics_event(step, step, total=200, step_seconds=0.5, tokens=64) for step in steps
        )
        if reads == 2:
            server.events.append(event_body(999, "Nearly out of disk.", level="warn"))
            server.jobs["ftjob-1"].update(
                status="succeeded", phase=None, fine_tuned_model="ft:tiny"
            )

    server.on_read = pass_time
    ended = ft("watch", "ftjob-1")
    assert ended.code == 0
    lines = [line[10:] for line in ended.out.splitlines()]
    progress = [line for line in lines if line.startswith("step")]
    assert len(progress) == 20
    assert progress[-1] == "step 200/200 · loss 1.000 · 128 tokens/s"
    assert "warn: Nearly out of disk." in lines
    assert lines.count("training") == 1
    assert "\x1b" not in ended.out


@pytest.mark.usefixtures("_at_once")
def test_watch_says_with_whom_a_job_shares_its_engine(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", phase="training", engine_id="engine-1")
    seats = [
        {"id": f"ftjob-{n}", "since": 1_700_000_000, "slot_seconds": seconds}
        for n, seconds in ((1, 10.0), (3, 30.0))
    ]
    server.engines = [
        {"id": "engine-1", "created_at": 1_700_000_000, "ranks": 2, "most_jobs": 8, "jobs": seats}
    ]

    def pass_time(reads: int) -> None:
        if reads == 3:
            server.jobs["ftjob-1"].update(status="succeeded", phase=None, engine_id=None)

    server.on_read = pass_time
    lines = [line[10:] for line in ft("watch", "ftjob-1").out.splitlines()]
    told = (
        f"training in engine-1 since {local_time(1_700_000_000)}, 25% of its time, beside ftjob-3"
    )
    assert lines.count(told) == 1


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        ("paused", 75, "ft: ftjob-1 is paused. Resume it: ft resume ftjob-1\n"),
        ("cancelled", 1, "ft: ftjob-1 was cancelled.\n"),
        ("failed", 1, "ft: ftjob-1 has failed: Out of memory.\n"),
    ],
)
def test_watch_ends_with_the_jobs_outcome(
    ft: Ft, server: StubServer, status: str, code: int, line: str
) -> None:
    server.jobs["ftjob-1"] = job_body(
        status=status, error={"message": "Out of memory."} if status == "failed" else None
    )
    ended = ft("watch", "ftjob-1")
    assert (ended.code, ended.err) == (code, line)


@pytest.mark.usefixtures("_at_once")
def test_watch_as_json_prints_a_line_for_each_event_and_the_job_last(
    ft: Ft, server: StubServer
) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.events += [event_body(1), metrics_event(2, 10)]
    lines = [json.loads(line) for line in ft("watch", "ftjob-1", "--json").out.splitlines()]
    assert [line["id"] for line in lines] == ["ftevent-1", "ftevent-2", "ftjob-1"]


@pytest.mark.usefixtures("_at_once")
def test_leaving_watch_leaves_the_job_running_and_says_so(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running")

    def press_ctrl_c(reads: int) -> None:
        if reads == 2:
            raise KeyboardInterrupt

    server.on_read = press_ctrl_c
    ended = ft("watch", "ftjob-1")
    assert ended.code == 130
    assert "the job keeps running.\n  Watch it again: ft watch ftjob-1\n" in ended.err
    assert {request.method for request in server.requests} == {"GET"}


def test_watching_says_when_it_does_not_begin_at_the_beginning(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="succeeded")
    server.events = [event_body(number, f"event {number}") for number in range(150)]
    assert "Earlier events are left out; these are the newest 100." in ft("watch", "ftjob-1").out
    server.events = server.events[:20]
    assert "Earlier events" not in ft("watch", "ftjob-1").out


def test_models_and_logs(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert ft("models").out.splitlines()[1].split() == ["tiny"], (
        "of a server that does not say more"
    )
    assert ft("logs", "ftjob-1").out == "rank 0 says hello\n"
    assert (
        json.loads(ft("logs", "ftjob-1", "--rank", "0", "--json").out)["text"]
        == "rank 0 says hello\n"
    )
    assert server.requests[-1].url.params["rank"] == "0"
    assert ft("logs", "-f", "ftjob-1").out == "rank 0 stdout | hello\nrank 0 stdout | bye\n"
    assert [
        json.loads(line)["line"] for line in ft("logs", "-f", "ftjob-1", "--json").out.splitlines()
    ] == ["hello", "bye"]
    assert ft("logs", "-f", "ftjob-1", "--attempt", "1").code == 64
