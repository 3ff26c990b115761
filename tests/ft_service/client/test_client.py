from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from ft_service.client.client import PATIENCE, Client
from ft_service.client.connection import Connection
from ft_service.errors import (
    FtError,
    NotFoundError,
    SpecError,
    UnavailableError,
)
from tests.support.rest.stub_server import (
    KEY,
    StubServer,
    event_body,
    job_body,
    metrics_event,
    tar_of,
)


class _EmptyList(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": []}')

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_local_server_is_reached_past_a_proxy_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _EmptyList) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with Client(Connection(f"http://127.0.0.1:{server.server_port}/v1", KEY)) as client:
                assert client.models() == []
        finally:
            server.shutdown()
            thread.join()


def test_a_file_goes_up_whole_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"messages": []}\n')
    server = StubServer()
    with server.client() as client:
        uploaded = client.upload_file(path)
    assert server.uploads == [("train.jsonl", b'{"messages": []}\n')]
    assert (uploaded.id, uploaded.bytes) == ("file-1", 17)
    assert b'name="purpose"\r\n\r\nfine-tune\r\n' in server.requests[0].read()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        StubServer().client() as client,
        pytest.raises(SpecError, match=r"absent\.jsonl cannot be read"),
    ):
        client.upload_file(tmp_path / "absent.jsonl")


def test_lists_are_read_over_their_pages() -> None:
    server = StubServer(jobs={f"ftjob-{n}": job_body(f"ftjob-{n}") for n in range(250)})
    with server.client() as client:
        assert [job.id for job in client.jobs(230)] == [f"ftjob-{n}" for n in range(249, 19, -1)]
    assert len(server.requests) == 3


def test_events_come_in_the_order_they_happened_and_only_new_ones() -> None:
    server = StubServer(jobs={"ftjob-1": job_body()}, events=[event_body(n) for n in range(250)])
    with server.client() as client:
        assert [event.id for event in client.events("ftjob-1")] == [
            f"ftevent-{n}" for n in range(250)
        ]
        assert [event.id for event in client.events("ftjob-1", since="ftevent-247")] == [
            "ftevent-248",
            "ftevent-249",
        ]


def test_metrics_of_an_event() -> None:
    server = StubServer(jobs={"ftjob-1": job_body()}, events=[metrics_event(1, 5), event_body(2)])
    with server.client() as client:
        numbers, message = (event.metrics() for event in client.events("ftjob-1"))
    assert numbers is not None
    assert (numbers.step, numbers.train_loss) == (5, 1.5)
    assert message is None


def test_following_yields_every_event_once_and_ends_with_the_job() -> None:
    server = StubServer(jobs={"ftjob-1": job_body(status="running")}, events=[event_body(1)])

    def pass_time(reads: int) -> None:
        server.events.append(event_body(1 + reads))
        if reads == 3:
            server.jobs["ftjob-1"]["status"] = "succeeded"

    server.on_read = pass_time
    waits: list[float] = []
    with server.client() as client:
        seen = [
            (job.status, [event.id for event in events])
            for job, events in client.follow("ftjob-1", sleep=waits.append)
        ]
    assert seen == [
        ("running", ["ftevent-1", "ftevent-2"]),
        ("running", ["ftevent-3"]),
        ("succeeded", ["ftevent-4"]),
    ]
    assert waits == [1.0, 1.0]


def test_following_starts_with_the_newest_events_only() -> None:
    server = StubServer(
        jobs={"ftjob-1": job_body(status="succeeded")}, events=[event_body(n) for n in range(1000)]
    )
    with server.client() as client:
        [(_, events)] = client.follow("ftjob-1")
    assert [event.id for event in events] == [f"ftevent-{n}" for n in range(900, 1000)]
    assert len(server.requests) == 2


def test_following_ends_when_the_job_rests_paused() -> None:
    server = StubServer(jobs={"ftjob-1": job_body(status="paused")})
    with server.client() as client:
        assert [job.status for job, _ in client.follow("ftjob-1")] == ["paused"]


def test_following_outlives_a_restart_of_the_server_but_not_its_end() -> None:
    server = StubServer(jobs={"ftjob-1": job_body(status="running")}, events=[event_body(1)])
    away = range(2, 5)

    def pass_time(reads: int) -> None:
        if reads in away:
            raise httpx2.ConnectError("refused")

    server.on_read = pass_time
    waits: list[float] = []
    with server.client() as client:
        followed = client.follow("ftjob-1", sleep=waits.append)
        next(followed)
        next(followed)
        assert server.reads == 5
        away = range(6, 10_000)
        with pytest.raises(UnavailableError):
            next(followed)
    assert server.reads == 5 + PATIENCE + 1


def test_the_adapter_is_unpacked_without_the_archives_own_folder(tmp_path: Path) -> None:
    server = StubServer(
        jobs={"ftjob-1": job_body()},
        adapter=tar_of({"adapter/adapter_config.json": b"{}", "adapter/deep/er.bin": b"\0"}),
    )
    out = tmp_path / "new" / "out"
    noted: list[tuple[int, int]] = []
    with server.client() as client:
        assert client.download_adapter("ftjob-1", out, lambda *seen: noted.append(seen)) == out
    assert noted[-1] == (len(server.adapter), len(server.adapter))
    assert (out / "adapter_config.json").read_bytes() == b"{}"
    assert (out / "deep/er.bin").read_bytes() == b"\0"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "archive",
    [
        tar_of({"../evil": b"x"}),
        tar_of({"/evil": b"x"}),
        tar_of({"adapter/a": b"x"}, link="/etc"),
        tar_of({"adapter/a": b"x"})[:700],
        b"no archive",
    ],
)
def test_a_bad_archive_leaves_nothing(tmp_path: Path, archive: bytes) -> None:
    server = StubServer(jobs={"ftjob-1": job_body()}, adapter=archive)
    with server.client() as client, pytest.raises(FtError, match="archive"):
        client.download_adapter("ftjob-1", tmp_path / "below" / "out")
    assert list((tmp_path / "below").iterdir()) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "below"]


def test_a_download_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    server = StubServer(jobs={"ftjob-1": job_body()}, adapter=tar_of({"a": b""}))
    with server.client() as client, pytest.raises(SpecError, match="exists already"):
        client.download_adapter("ftjob-1", tmp_path)
    assert server.requests == []


def test_a_download_that_the_server_refuses_says_why(tmp_path: Path) -> None:
    with StubServer().client() as client, pytest.raises(NotFoundError, match="no job 'ftjob-1'"):
        client.download_adapter("ftjob-1", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_streamed_answer_may_hold_other_separators_of_lines(end: str) -> None:
    text = "a\u2028b\u2029c\x85d"
    event = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    body = f"data: {event}{end}{end}data: [DONE]{end}{end}".encode()
    pieces = [body[at : at + 5] for at in range(0, len(body), 5)]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=iter(pieces)))
    with Client(Connection("http://127.0.0.1:1/v1", KEY), transport=transport) as client:
        assert "".join(client.chat({})) == text


def test_verbs() -> None:
    server = StubServer(jobs={"ftjob-1": job_body(status="running")})
    with server.client() as client:
        assert client.pause("ftjob-1").paused
        assert client.resume("ftjob-1").status == "queued"
        assert client.cancel("ftjob-1").over
        assert client.logs("ftjob-1") == "rank 0 says hello\n"


def test_an_id_cannot_lead_to_another_path() -> None:
    server = StubServer()
    with server.client() as client, pytest.raises(NotFoundError):
        client.job("../files?x=1")
    assert server.requests[0].url.raw_path == b"/v1/fine_tuning/jobs/..%2Ffiles%3Fx%3D1"
