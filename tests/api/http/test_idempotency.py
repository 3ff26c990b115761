"""A proxy that drops answers: what the client sends again by itself is one thing, what a user sends
again is two.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import httpx2
import openai
import pytest

from api.routes import files, fine_tuning
from api.routes.tuning import sweeps
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey
from tests.support.attempts import HANG_SECONDS
from tests.support.rest.refusals import check_error
from tests.support.rest.service import TRAINING, Service, stored, wait_until


@dataclass
class Proxy:
    """Passes everything on; after `drop` is set, that many answers to POSTs are lost on the way
    back.
    """

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
                # a try that is given up while the service is at it is no lost answer
                timeout=HANG_SECONDS,
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
    client = openai.OpenAI(
        base_url=f"{proxy.url}/v1", api_key=service.key, http_client=service.connections
    )
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

    assert [found.id for found in service.store.jobs.list_jobs("default").data] == [
        second.id,
        first.id,
    ]


def test_a_repeat_is_never_answered_by_a_job_that_was_cancelled(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    """Whose first try was turned away, by a limit of requests say, comes as a repeat of nothing."""
    first = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    client.fine_tuning.jobs.cancel(first.id)
    repeat = {"x-stainless-retry-count": "1"}
    second = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_headers=repeat
    )
    assert second.id != first.id
    same = client.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_headers=repeat
    )
    assert same.id == second.id


def test_a_file_whose_answer_is_lost_is_one_file(
    service: Service, proxy: Proxy, through: openai.OpenAI
) -> None:
    proxy.drop = 1
    file = through.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    assert stored(service) == [file.id]


def test_an_upload_whose_answers_are_lost_is_one_file(
    service: Service, proxy: Proxy, through: openai.OpenAI
) -> None:
    about: dict[str, Any] = {
        "filename": "a.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "fine-tune",
    }
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


def test_a_job_is_cancelled_once(
    service: Service, proxy: Proxy, through: openai.OpenAI, training_file: str
) -> None:
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
            "POST",
            "/v1/files",
            data={"purpose": "fine-tune"},
            files={"file": (name, content)},
            headers=RETRIED,
        )
        return answer.json()["id"]

    def aged(minutes: float) -> None:
        at = service.store.now() - 60 * minutes
        service.sql("UPDATE jobs SET created_at = :at WHERE id = :id", at=at, id=first)
        service.sql("UPDATE files SET created_at = :at WHERE id = :id", at=at, id=training_file)

    aged(30)
    assert (job_again(), file_again()) == (first, training_file)
    assert (
        len({training_file, file_again("other.jsonl"), file_again(content=TRAINING + TRAINING)})
        == 3
    )
    aged(41)
    assert file_again() != training_file
    assert job_again() != first


def test_a_retry_repeats_the_part_of_the_same_contents(
    service: Service, client: openai.OpenAI
) -> None:
    upload = client.uploads.create(
        bytes=100, filename="a.jsonl", mime_type="application/jsonl", purpose="fine-tune"
    )

    def part(content: bytes) -> str:
        path = f"/v1/uploads/{upload.id}/parts"
        return service.http(
            "POST", path, files={"data": ("data", content)}, headers=RETRIED
        ).json()["id"]

    first = part(b"abc")
    assert part(b"abd") != first
    assert part(b"abc") == first


UPLOAD = {
    "bytes": 10_000,
    "filename": "a.jsonl",
    "mime_type": "application/jsonl",
    "purpose": "fine-tune",
}
KEYED = {"idempotency-key": "once"}


class Sender:
    """Sends contents to one path: as a file, or as a part of one upload."""

    def __init__(self, service: Service, client: openai.OpenAI, what: str) -> None:
        self.service = service
        self.keeps = (files, "keep") if what == "file" else (Places, "keep_part")
        self.upload_id = "" if what == "file" else client.uploads.create(**UPLOAD).id
        self._path = f"/v1/uploads/{self.upload_id}/parts" if self.upload_id else "/v1/files"
        self._field = "data" if self.upload_id else "file"

    def send(self, headers: dict[str, str] | None = None, content: bytes = TRAINING) -> Any:
        return self.begin(headers or {}, content)()

    def begin(self, headers: dict[str, str], content: bytes = TRAINING) -> Callable[[], Any]:
        """Send half of a request. Returns what sends the rest, and returns the answer."""
        purpose = (
            b""
            if self.upload_id
            else b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        )
        named = (
            f'--b\r\ncontent-disposition: form-data; name="{self._field}"; '
            'filename="a.jsonl"\r\n\r\n'.encode()
        )
        body = purpose + named + content + b"\r\n--b--\r\n"
        connection = http.client.HTTPConnection(
            self.service.url.removeprefix("http://"), timeout=HANG_SECONDS
        )
        connection.putrequest("POST", self._path)
        length = {
            "content-length": str(len(body)),
            "content-type": "multipart/form-data; boundary=b",
        }
        for name, value in {
            "authorization": f"Bearer {self.service.key}",
            **length,
            **headers,
        }.items():
            connection.putheader(name, value)
        connection.endheaders(body[: len(body) // 2])
        self.connection = connection

        def rest() -> Any:
            connection.send(body[len(body) // 2 :])
            answer = json.load(connection.getresponse())
            connection.close()
            return answer

        return rest

    def kept(self) -> list[str]:
        """Ids of what is stored, in the database and soon on the disk: temporary files go after the
        answer.
        """
        store = self.service.store
        things = (
            store.uploads.list_parts("default", self.upload_id)
            if self.upload_id
            else store.files.list_files("default").data
        )
        ids = sorted(thing.id for thing in things)
        folder = (
            self.service.settings.uploads_dir / self.upload_id
            if self.upload_id
            else self.service.settings.files_dir
        )
        wait_until(lambda: sorted(path.name for path in folder.iterdir()) == ids)
        return ids


@pytest.fixture(params=["file", "part"])
def sender(request: pytest.FixtureRequest, service: Service, client: openai.OpenAI) -> Sender:
    return Sender(service, client, request.param)


def test_a_key_stands_for_one_file_or_part(sender: Sender) -> None:
    first = sender.send(KEYED)

    assert sender.send(KEYED) == first
    assert sender.send()["id"] != first["id"]
    other = sender.send(KEYED, TRAINING * 2)
    assert (other["error"]["code"], other["error"]["param"]) == (
        "idempotency_key_reused",
        "Idempotency-Key",
    )
    assert sender.send({"idempotency-key": "k" * 256})["error"]["param"] == "Idempotency-Key"
    assert len(sender.kept()) == 2


def test_tries_with_a_key_that_arrive_at_once_make_one_thing(sender: Sender) -> None:
    rests = [sender.begin(KEYED) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda rest: rest(), rests))

    assert [answer["id"] for answer in answers] == sender.kept() * 8


@pytest.mark.parametrize("same", [True, False])
def test_a_try_with_a_key_that_still_arrives_finds_what_a_later_one_made(
    sender: Sender, same: bool
) -> None:
    rest = sender.begin(KEYED, TRAINING if same else TRAINING * 2)
    second = sender.send(KEYED)

    first = rest()

    assert first == second if same else first["error"]["code"] == "idempotency_key_reused"
    assert sender.kept() == [second["id"]]


def test_a_key_is_of_a_project_and_of_an_upload(service: Service, client: openai.OpenAI) -> None:
    one = Sender(service, client, "part")
    other = Sender(service, client, "part")
    assert one.send(KEYED)["id"] != other.send(KEYED, TRAINING * 2)["id"]
    mine = Sender(service, client, "file").send(KEYED)
    service.store.projects.ensure_project("theirs", "local")
    _, service.key = service.store.keys.create_key(
        NewKey(project_id="theirs", name="test", scope="user")
    )
    assert Sender(service, client, "file").send(KEYED)["id"] != mine["id"]


def test_the_key_of_a_file_that_was_deleted_makes_no_other(
    service: Service, client: openai.OpenAI
) -> None:
    sender = Sender(service, client, "file")
    client.files.delete(sender.send(KEYED)["id"])

    refused = sender.send(KEYED)["error"]

    assert (refused["code"], refused["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    assert sender.kept() == []


def test_a_key_stands_for_a_file_of_one_lifetime(service: Service) -> None:
    def send(seconds: int | None) -> Any:
        expiry = (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}
            if seconds
            else {}
        )
        form = {
            "data": {"purpose": "fine-tune", **expiry},
            "files": {"file": ("a.jsonl", TRAINING)},
        }
        return service.http("POST", "/v1/files", headers=KEYED, **form).json()

    first = send(7200)

    assert send(7200) == first
    assert {send(seconds)["error"]["code"] for seconds in (3600, None)} == {
        "idempotency_key_reused"
    }


def test_a_key_stands_for_one_upload(service: Service, client: openai.OpenAI) -> None:
    def create(**more: Any) -> Any:
        return service.http("POST", "/v1/uploads", json=UPLOAD | more, headers=KEYED).json()

    with ThreadPoolExecutor(8) as pool:
        ids = {upload["id"] for upload in pool.map(lambda _: create(), range(8))}

    assert len(ids) == 1
    assert service.store.uploads.pending_uploads() == ids
    assert create(bytes=9)["error"]["code"] == "idempotency_key_reused"
    assert client.uploads.cancel(ids.pop()).status == create()["status"] == "cancelled"


class Paused:
    """Requests that pause in one function of a module or class, until they are let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
        self._arrived: queue.Queue[threading.Event] = queue.Queue()
        function = getattr(module, name)

        def pause(*arguments: Any) -> Any:
            going_on = threading.Event()
            self._arrived.put(going_on)
            assert going_on.wait(HANG_SECONDS)
            return function(*arguments)

        monkeypatch.setattr(module, name, pause)

    def next(self) -> threading.Event:
        """Wait for a request. Returns what lets it go on."""
        return self._arrived.get(timeout=HANG_SECONDS)


def test_a_repeat_finds_what_a_try_stores_meanwhile(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has a key, and the first had stored nothing when the second was there whole."""
    paused = Paused(monkeypatch, *sender.keeps)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sender.send)
        first_goes_on = paused.next()
        second = pool.submit(sender.send, RETRIED)
        second_goes_on = paused.next()
        first_goes_on.set()
        wait_until(first.done)
        second_goes_on.set()

    assert sender.kept() == [first.result()["id"]] == [second.result()["id"]]


def test_a_try_whose_client_has_gone_stores_nothing(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tries again, so there would be two."""
    with monkeypatch.context() as patch:
        paused = Paused(patch, *sender.keeps)
        rest = sender.begin({})
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(rest)
            goes_on = paused.next()
            sender.connection.sock.shutdown(socket.SHUT_RDWR)
            assert first.exception() is not None
    second = sender.send(RETRIED)
    goes_on.set()

    assert sender.kept() == [second["id"]]


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("path", "module", "more"),
    [
        ("/v1/fine_tuning/jobs", fine_tuning, {}),
        ("/v1/fine_tuning/sweeps", sweeps, {"sweep": {"lora.r": [4, 8]}}),
    ],
)
def test_tries_that_are_checked_at_once_make_one_job_or_sweep(
    service: Service,
    training_file: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    module: ModuleType,
    more: dict[str, Any],
    is_gone: bool,
) -> None:
    """The first look at a base may take longer than a client waits.

    `is_gone`: the client of the first try.
    """
    caplog.set_level("INFO", logger="ft_service.api")
    body = {
        "model": "tiny",
        "training_file": training_file,
        "validation_file": training_file,
        **more,
    }
    paused = Paused(monkeypatch, module, "create_job" if module is fine_tuning else "create_sweep")
    first = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=HANG_SECONDS)
    first.request("POST", path, json.dumps(body), {"authorization": f"Bearer {service.key}"})
    first_goes_on = paused.next()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(service.http, "POST", path, json=body, headers=RETRIED)
        second_goes_on = paused.next()
        if is_gone:
            first.close()
            second_goes_on.set()
            wait_until(second.done)
            first_goes_on.set()
        else:
            first_goes_on.set()
            assert json.load(first.getresponse())["id"]
            first.close()
            second_goes_on.set()
    created = second.result().json()["id"]
    wait_until(lambda: caplog.text.count(f"POST {path}: ") == 2)

    store = service.store
    found = (
        store.jobs.list_jobs("default").data
        if module is fine_tuning
        else store.sweeps.list_sweeps("default").data
    )
    assert [one.id for one in found] == [created]


KEYED = {"Idempotency-Key": "of a provisioning script"}
RECEIVER: dict[str, Any] = {
    "name": "ci",
    "url": "https://93.184.215.14/hook",
    "event_types": ["fine_tuning.job.succeeded", "fine_tuning.job.failed"],
}
ORGANIZATION = {
    "/v1/webhook_endpoints": RECEIVER,
    "/v1/organization/projects": {"name": "team", "limits": {"max_slots": 2, "bases": ["tiny"]}},
    "/v1/organization/projects/default/api_keys": {"name": "ci", "scope": "read"},
}


@pytest.mark.parametrize("path", ORGANIZATION)
def test_a_key_stands_for_one_webhook_project_or_api_key(service: Service, path: str) -> None:
    body = ORGANIZATION[path]
    before = len(service.http("GET", path).json()["data"])
    with ThreadPoolExecutor(3) as threads:
        made = list(
            threads.map(lambda _: service.http("POST", path, json=body, headers=KEYED), range(3))
        )
    assert [answer.status_code for answer in made] == [200] * 3, [answer.text for answer in made]
    assert len({answer.json()["id"] for answer in made}) == 1
    assert len(service.http("GET", path).json()["data"]) == before + 1
    refused = service.http("POST", path, json={**body, "name": "other"}, headers=KEYED)
    assert check_error(refused, 400)["code"] == "idempotency_key_reused"
    assert service.http("POST", path, json=body).json()["id"] != made[0].json()["id"], (
        "a deliberate second one"
    )


def test_a_webhook_whose_answer_was_lost_is_told_with_its_secret(service: Service) -> None:
    path = "/v1/webhook_endpoints"
    for headers in (KEYED, RETRIED):
        first, again = (
            service.http("POST", path, json=RECEIVER, headers=headers).json() for _ in range(2)
        )
        assert first["signing_secret"] == again["signing_secret"]
    assert len(service.http("GET", path).json()["data"]) == 1


def test_an_api_key_whose_answer_was_lost_gets_another_value_until_it_is_used(
    service: Service,
) -> None:
    path = "/v1/organization/projects/default/api_keys"
    body = {"name": "ci", "scope": "read"}
    lost = service.http("POST", path, json=body, headers=KEYED).json()["value"]
    value = service.http("POST", path, json=body, headers=KEYED).json()["value"]
    check_error(service.http("GET", "/v1/files", key=lost), 401)
    assert service.http("GET", "/v1/files", key=value).status_code == 200
    service.store.keys.close()
    refused = service.http("POST", path, json=body, headers=KEYED)
    assert check_error(refused, 400)["code"] == "idempotency_key_reused"
    assert service.http("GET", "/v1/files", key=value).status_code == 200


def test_a_key_stands_for_an_api_key_of_one_lifetime(service: Service) -> None:
    path = "/v1/organization/projects/default/api_keys"
    body: dict[str, Any] = {"name": "ci", "scope": "read", "expires_in_seconds": 60}
    made = [service.http("POST", path, json=body, headers=KEYED).json()["id"] for _ in range(2)]
    assert made[0] == made[1]
    refused = service.http("POST", path, json={**body, "expires_in_seconds": 600}, headers=KEYED)
    assert check_error(refused, 400)["code"] == "idempotency_key_reused"
