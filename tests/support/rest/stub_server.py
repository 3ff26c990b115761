"""A server in the shape of ours, in memory: a handler for httpx2.MockTransport."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ft_service.client.client import Client
from ft_service.client.connection import Connection

BASE_URL = "http://service.test/v1"
KEY = "ft-secret"


def job_body(job_id: str = "ftjob-1", status: str = "queued", **more: Any) -> dict[str, Any]:
    return {
        "id": job_id,
        "object": "fine_tuning.job",
        "model": "tiny",
        "status": status,
        "created_at": 1_700_000_000,
        "training_file": "file-0",
        **more,
    }


def event_body(number: int, message: str = "something happened", **more: Any) -> dict[str, Any]:
    return {
        "id": f"ftevent-{number}",
        "created_at": 1_700_000_000 + number,
        "level": "info",
        "message": message,
        **more,
    }


def metrics_event(number: int, step: int, total: int = 10, **more: Any) -> dict[str, Any]:
    data = {"step": step, "total_steps": total, "train_loss": 2.0 - step / total, **more}
    return event_body(number, f"Step {step}/{total}", type="metrics", data=data)


def tar_of(files: dict[str, bytes], **links: str) -> bytes:
    """An archive; `links`: name → where a symbolic link points."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = target
            tar.addfile(info)
    return buffer.getvalue()


@dataclass
class StubServer:
    """Jobs and events as given; what was asked of it is in `requests`."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Oldest first."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Newest first."""
    engines: list[dict[str, Any]] = field(default_factory=list)
    """Oldest first."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """The newest step first."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """The newest step first."""
    adapter: bytes = b""
    logs: str = "rank 0 says hello\n"
    bases: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "tiny", "created": 0, "owned_by": "base"}]
    )
    files: list[dict[str, Any]] = field(default_factory=list)
    """Newest first; an upload does not add to it."""
    uploads: list[tuple[str, bytes]] = field(default_factory=list)
    checked: list[dict[str, Any]] = field(default_factory=list)
    refusal: httpx2.Response | None = None
    """What is answered to the check and to the creation of a job, if it is refused."""
    created: list[dict[str, Any]] = field(default_factory=list)
    requests: list[httpx2.Request] = field(default_factory=list)
    on_read: Callable[[int], None] = lambda count: None
    """Called before each answer to GET of a job, with the number of such reads so far: the place to
    let time pass.
    """
    reads: int = 0

    def client(self) -> Client:
        return Client(Connection(BASE_URL, KEY), transport=httpx2.MockTransport(self))

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error(401, "Incorrect API key.", code="invalid_api_key")
        path = request.url.path.removeprefix("/v1")
        if (request.method, path) == ("POST", "/files"):
            return self._upload(request)
        if (request.method, path) == ("POST", "/fine_tuning/jobs"):
            self.created.append(json.loads(request.read()))
            return self.refusal or self._add("queued")
        if path == "/fine_tuning/check":
            self.checked.append(json.loads(request.read()))
            return self.refusal or httpx2.Response(200, json={"accepted": True, "jobs": 1})
        if path == "/sign_in_links":
            return httpx2.Response(200, json={"path": "/sign-in?link=once"})
        if path == "/fine_tuning/jobs":
            return page(request, list(self.jobs.values())[::-1])
        if path == "/files":
            digest = request.url.params.get("sha256")
            return page(
                request, [file for file in self.files if digest in (None, file.get("sha256"))]
            )
        if path.startswith("/files/"):
            return self._file(request, path.removeprefix("/files/"))
        if request.method == "DELETE" and path.startswith("/models/"):
            return httpx2.Response(200, json={"id": path.removeprefix("/models/"), "deleted": True})
        if path.startswith("/models/"):
            name = path.removeprefix("/models/")
            known = httpx2.Response(200, json={"id": name, "created": 0, "owned_by": "base"})
            return (
                known
                if name == "tiny"
                else error(
                    404, f"model = {name!r}: there is no such base model.", code="model_not_found"
                )
            )
        if path == "/engines":
            return httpx2.Response(200, json={"object": "list", "data": self.engines})
        if path == "/models":
            return httpx2.Response(200, json={"object": "list", "data": self.bases})
        return self._job(request, *path.removeprefix("/fine_tuning/jobs/").partition("/")[::2])

    def _upload(self, request: httpx2.Request) -> httpx2.Response:
        head, _, rest = request.read().partition(b'filename="')[2].partition(b"\r\n\r\n")
        self.uploads.append((head.partition(b'"')[0].decode(), rest.rpartition(b"\r\n--")[0]))
        name = self.uploads[-1][0]
        return httpx2.Response(
            200,
            json={
                "id": f"file-{len(self.uploads)}",
                "filename": name,
                "bytes": len(self.uploads[-1][1]),
            },
        )

    def _file(self, request: httpx2.Request, file_id: str) -> httpx2.Response:
        found = next((file for file in self.files if file["id"] == file_id), None)
        if found is None:
            return error(404, f"There is no file {file_id!r} in this project.", code="not_found")
        if request.method == "DELETE":
            self.files.remove(found)
        return httpx2.Response(200, json=found)

    def _add(self, status: str) -> httpx2.Response:
        body = job_body(f"ftjob-{len(self.jobs) + 1}", status)
        self.jobs[body["id"]] = body
        return httpx2.Response(200, json=body)

    def _job(self, request: httpx2.Request, job_id: str, verb: str) -> httpx2.Response:
        if job_id not in self.jobs:
            return error(404, f"There is no job {job_id!r}.", code="not_found")
        if request.method == "DELETE":
            model = self.jobs.pop(job_id).get("fine_tuned_model")
            return httpx2.Response(
                200,
                json={"id": job_id, "deleted": True, "deleted_models": [model] if model else []},
            )
        if verb == "events":
            return page(request, self.events[::-1])
        if verb == "checkpoints":
            return page(request, self.checkpoints)
        if verb == "evaluation":
            return page(request, self.evaluations)
        if verb == "rollouts":
            return page(request, self.rollouts)
        if verb == "adapter" or verb in [
            f"checkpoints/{point['id']}/adapter" for point in self.checkpoints
        ]:
            return httpx2.Response(200, content=self.adapter)
        if verb == "logs" and "follow" in request.url.params:
            lines = [
                {"attempt": 1, "source": "rank 0 stdout", "line": line} for line in ("hello", "bye")
            ]
            return httpx2.Response(200, text="".join(json.dumps(line) + "\n" for line in lines))
        if verb == "logs":
            return httpx2.Response(200, text=self.logs)
        if verb:
            self.jobs[job_id]["status"] = {
                "cancel": "cancelled",
                "pause": "paused",
                "resume": "queued",
            }[verb]
        elif request.method == "POST":
            self.jobs[job_id] |= json.loads(request.read())
        else:
            self.reads += 1
            self.on_read(self.reads)
        return httpx2.Response(200, json=self.jobs[job_id])


def error(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> httpx2.Response:
    body = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return httpx2.Response(status, json={"error": body})


def page(request: httpx2.Request, items: list[dict[str, Any]]) -> httpx2.Response:
    """A slice of a list (newest first), by `after` and `limit`."""
    after = request.url.params.get("after")
    limit = int(request.url.params.get("limit", "20"))
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after else 0
    chosen = items[start : start + limit]
    return httpx2.Response(
        200, json={"object": "list", "data": chosen, "has_more": start + limit < len(items)}
    )
