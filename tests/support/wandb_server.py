"""As much of W&B's server as its SDK asks of one: runs, what is streamed into them, and how the SDK
finds them again.

GraphQL requests are matched by operation name. What is streamed is kept by its place, as W&B does:
a line that is sent twice to one place is there once.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef0123456789abcdef01234567"
ENTITY = "somebody"
"""The key's default one."""


@dataclass
class RecordedRun:
    display_name: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)
    """Place → a line of history, as JSON."""
    summary: str = "{}"
    states: list[str] = field(default_factory=list)
    """running, preempting, and exit codes, in their order."""

    @property
    def history(self) -> list[dict[str, Any]]:
        assert sorted(self.lines) == list(range(len(self.lines))), "no place is left out"
        return [json.loads(self.lines[place]) for place in sorted(self.lines)]

    @property
    def steps(self) -> list[int]:
        return [line["_step"] for line in self.history]


@dataclass
class WandbServer:
    url: str = ""
    key: str = KEY
    runs: dict[str, RecordedRun] = field(default_factory=dict)
    """`entity/project/id` → run."""
    refused: int = 0
    """Requests that came without the key."""
    paths: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Other requests: names of files, hosts."""
    stream_status: int = 200
    """Of answers to what is streamed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        match = re.search(r"\b(?:query|mutation)\s+(\w+)", query)
        operation = match[1] if match else ""
        entity = given.get("entity") or ENTITY
        project = given.get("project")
        run = self.runs.get(f"{entity}/{project}/{given.get('name')}")
        match operation:
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "Viewer" | "GetDefaultEntity":
                return {
                    "viewer": {
                        "__typename": "User",
                        "id": "u",
                        "entity": ENTITY,
                        "username": ENTITY,
                        "flags": "{}",
                        "teams": {"edges": []},
                    }
                }
            case "RunResumeStatus":
                there = {"id": "p", "name": project, "entity": {"id": "e", "name": entity}}
                return {"model": {**there, "bucket": run and _resume_status(run, given["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(entity, given)}
            case "CreateRunFiles":
                self.told.update(given["files"])
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
            case "Run" | "RunHistoryKeys":
                assert run is not None
                return {"project": {"run": _public(run, given["name"])}}
        raise AssertionError(f"the SDK asks for {operation or query}")

    def stream(self, place: str, body: dict[str, Any]) -> None:
        run = self.runs[place]
        for name, content in body.get("files", {}).items():
            if name == "wandb-history.jsonl":
                run.lines.update(enumerate(content["content"], content["offset"]))
            elif name == "wandb-summary.json":
                run.summary = content["content"][-1]
            else:
                self.told.add(name)
        if body.get("preempting"):
            run.states.append("preempting")
        if body.get("complete"):
            run.states.append(str(body["exitcode"]))

    def _upsert(self, entity: str, given: dict[str, Any]) -> dict[str, Any]:
        place = f"{entity}/{given['project']}/{given['name']}"
        inserted = place not in self.runs
        self.told.update(filter(None, (given.get("host"), given.get("repo"), given.get("commit"))))
        run = self.runs.setdefault(place, RecordedRun())
        if given.get(
            "program"
        ):  # the first of an opened run; later ones bring the configuration up to date
            run.states.append("running")
        run.display_name = given.get("displayName") or run.display_name
        run.tags = given.get("tags") or run.tags
        run.config |= {
            name: value["value"] for name, value in json.loads(given.get("config") or "{}").items()
        }
        project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": entity}}
        bucket = {
            **_bucket(run, given["name"]),
            "project": project,
            "sweepName": None,
            "description": None,
        }
        return {"bucket": bucket, "inserted": inserted}


def _bucket(run: RecordedRun, name: str) -> dict[str, Any]:
    config = json.dumps({key: {"value": value} for key, value in run.config.items()})
    return {
        "id": "b",
        "name": name,
        "displayName": run.display_name,
        "config": config,
        "historyLineCount": len(run.lines),
    }


def _resume_status(run: RecordedRun, name: str) -> dict[str, Any]:
    return {
        **_bucket(run, name),
        "summaryMetrics": run.summary,
        "logLineCount": 0,
        "eventsLineCount": 0,
        "historyTail": json.dumps([run.lines[max(run.lines)]] if run.lines else []),
        "eventsTail": "[]",
        "tags": run.tags,
        "notes": None,
        "wandbConfig": json.dumps({"t": 1}),
    }


def _public(run: RecordedRun, name: str) -> dict[str, Any]:
    unknown = dict.fromkeys(
        ("sweepName", "group", "jobType", "commit", "description", "notes", "systemMetrics")
    )
    return {
        **unknown,
        **_bucket(run, name),
        "projectId": "1",
        "tags": run.tags,
        "state": "running",
        "user": {"name": ENTITY, "username": ENTITY},
        "readOnly": False,
        "createdAt": "2026-01-01T00:00:00",
        "heartbeatAt": "2026-01-01T00:00:00",
        "summaryMetrics": run.summary,
        "historyKeys": {"lastStep": max(run.steps, default=-1)},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        server = self.recorder
        with server.lock:
            server.paths.add(self.path)
            wanted = "Basic " + base64.b64encode(f"api:{server.key}".encode()).decode()
            if self.headers.get("authorization") != wanted:
                server.refused += 1
                return self._answer(401, {"errors": [{"message": "invalid credentials"}]})
            if self.path == "/graphql":
                asked = json.loads(body)
                return self._answer(
                    200, {"data": server.graphql(asked["query"], asked.get("variables") or {})}
                )
            match = re.fullmatch(r"/files/(.+)/file_stream", self.path)
            assert match is not None, f"the SDK asks for {self.path}"
            if server.stream_status == 200:
                server.stream(match[1], json.loads(body))
            return self._answer(server.stream_status, {})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def wandb_serving() -> Iterator[WandbServer]:
    recorder = WandbServer()
    handler = type("Handler", (_Handler,), {"recorder": recorder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
