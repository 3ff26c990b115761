"""A proxy that drops answers: what the client sends again by itself is one thing, what a user sends again is two."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import openai
import pytest

from tests.support.attempts import HANG_SECONDS
from tests.support.rest.service import TRAINING, Service, stored


@dataclass
class Proxy:
    """Passes everything on; after `drop` is set, that many answers to POSTs are lost on the way back."""

    url: str = ""
    drop: int = 0
    retry_counts: list[str] = field(default_factory=list)


@contextmanager
def proxying(service: Service) -> Iterator[Proxy]:
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.pass_on()

        def do_GET(self) -> None:
            self.pass_on()

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = httpx2.request(
                self.command,
                f"{service.url}{self.path}",
                headers=dict(self.headers),
                content=body,
                verify=False,
                trust_env=False,
                timeout=HANG_SECONDS,  # a try that is given up while the service is at it is no lost answer
            )
            if self.command == "POST":
                proxy.retry_counts.append(self.headers["x-stainless-retry-count"])
                if proxy.drop:
                    proxy.drop -= 1
                    self.close_connection = True
                    return
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    with proxying(service) as proxy:
        yield proxy


@pytest.fixture
def through(service: Service, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> openai.OpenAI:
    """The client behind the proxy, as it comes: with its own two retries, but without its waits."""
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=service.key, http_client=service.connections)
    monkeypatch.setattr(client, "_calculate_retry_timeout", lambda *_, **__: 0.0)
    return client


@pytest.mark.parametrize("lost", [1, 2])
def test_a_job_whose_answers_are_lost_is_one_job(
    service: Service, proxy: Proxy, through: openai.OpenAI, training_file: str, lost: int
) -> None:
    proxy.drop = lost

    job = through.fine_tuning.jobs.create(model="tiny", training_file=training_file)

    assert proxy.retry_counts == [str(number) for number in range(lost + 1)]
    assert [found.id for found in service.store.jobs.list_jobs("default").data] == [job.id]


def test_a_second_submit_is_a_second_job_even_when_answers_are_lost(
    service: Service, proxy: Proxy, through: openai.OpenAI, training_file: str
) -> None:
    first = through.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    proxy.drop = 1
    second = through.fine_tuning.jobs.create(model="tiny", training_file=training_file)

    assert [found.id for found in service.store.jobs.list_jobs("default").data] == [second.id, first.id]


def test_a_repeat_is_never_answered_by_a_job_that_was_cancelled(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    """Whose first try was turned away, by a limit of requests say, comes as a repeat of nothing."""
    first = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    client.fine_tuning.jobs.cancel(first.id)
    repeat = {"x-stainless-retry-count": "1"}
    second = client.fine_tuning.jobs.create(model="tiny", training_file=training_file, extra_headers=repeat)
    assert second.id != first.id
    same = client.fine_tuning.jobs.create(model="tiny", training_file=training_file, extra_headers=repeat)
    assert same.id == second.id


def test_a_file_whose_answer_is_lost_is_one_file(service: Service, proxy: Proxy, through: openai.OpenAI) -> None:
    proxy.drop = 1
    file = through.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    assert stored(service) == [file.id]


def test_an_upload_whose_answers_are_lost_is_one_file(service: Service, proxy: Proxy, through: openai.OpenAI) -> None:
    about: dict[str, Any] = {"filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "fine-tune"}
    upload = through.uploads.create(bytes=2 * len(TRAINING), **about)
    proxy.drop = 1
    first = through.uploads.parts.create(upload.id, data=TRAINING)
    second = through.uploads.parts.create(upload.id, data=TRAINING)
    assert first.id != second.id
    assert len(service.store.uploads.list_parts("default", upload.id)) == 2
    proxy.drop = 2

    done = through.uploads.complete(upload.id, part_ids=[first.id, second.id])

    assert done.file is not None
    assert stored(service) == [done.file.id]


def test_a_job_is_cancelled_once(service: Service, proxy: Proxy, through: openai.OpenAI, training_file: str) -> None:
    job = through.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    proxy.drop = 1
    assert through.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    events = service.store.jobs.list_events("default", job.id).data
    assert [event.message for event in events].count("Cancel requested.") == 1


RETRIED = {"x-stainless-retry-count": "1"}


def test_a_retry_repeats_what_is_as_young_as_the_clients_patience(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    """The client waits ten minutes, three times."""
    body = {"model": "tiny", "training_file": training_file}
    first = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    client.fine_tuning.jobs.create(model="tiny", training_file=training_file, suffix="another")

    def job_again() -> str:
        return service.http("POST", "/v1/fine_tuning/jobs", json=body, headers=RETRIED).json()["id"]

    def file_again(name: str = "train.jsonl", content: bytes = TRAINING) -> str:
        answer = service.http(
            "POST", "/v1/files", data={"purpose": "fine-tune"}, files={"file": (name, content)}, headers=RETRIED
        )
        return answer.json()["id"]

    def aged(minutes: float) -> None:
        at = service.store.now() - 60 * minutes
        service.sql("UPDATE jobs SET created_at = :at WHERE id = :id", at=at, id=first)
        service.sql("UPDATE files SET created_at = :at WHERE id = :id", at=at, id=training_file)

    aged(30)
    assert (job_again(), file_again()) == (first, training_file)
    assert len({training_file, file_again("other.jsonl"), file_again(content=TRAINING + TRAINING)}) == 3
    aged(41)
    assert file_again() != training_file
    assert job_again() != first


def test_a_retry_repeats_the_part_of_the_same_contents(service: Service, client: openai.OpenAI) -> None:
    upload = client.uploads.create(bytes=100, filename="a.jsonl", mime_type="application/jsonl", purpose="fine-tune")

    def part(content: bytes) -> str:
        path = f"/v1/uploads/{upload.id}/parts"
        return service.http("POST", path, files={"data": ("data", content)}, headers=RETRIED).json()["id"]

    first = part(b"abc")
    assert part(b"abd") != first
    assert part(b"abc") == first
