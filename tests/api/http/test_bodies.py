"""Memory of a real server under hostile bodies, and the room of bodies by project."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi import HTTPException, Request

from api.http import bodies
from api.http.bodies import ArrivingBody, BodyTooLargeError
from api.http.gone_clients import DISCONNECTED
from ft_service.bases.describing import DESCRIPTIONS, Descriptions, versions_name
from ft_service.bases.description import Versions
from ft_service.errors import SpecError, UnavailableError
from ft_service.rundir.directory import RunDir
from ft_service.shared_work.places import Kind, Places
from ft_service.store.records import NewKey
from ft_service.store.sql import migrate, open_store
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.names import KEY_PREFIX
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import save_base
from tests.support.describing import small_document

GIB = 1024**3
CALL_BYTES = 32 * 1024**2
BOUND = 528 * 1024**2
"""Memory of a server as docs/operating.md states it: 256 MiB, twice the bytes of all bodies, and
0.3 MiB a connection.
"""


@dataclass(frozen=True)
class Client:
    """A project's client of Tinker's wire, with a model whose ranks have done nothing yet."""

    url: str
    key: str
    model: str

    @classmethod
    def of(cls, url: str, key: str) -> Client:
        client = cls(url, KEY_PREFIX + key, "")
        session = client.post("create_session", json={}).json()["session_id"]
        new = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        }
        answer = client.post("create_model", json=new)
        assert answer.status_code == 200, answer.text
        return replace(client, model=answer.json()["model_id"])

    def post(self, path: str, **body: Any) -> httpx2.Response:
        with httpx2.Client(timeout=HANG_SECONDS) as client:
            return client.post(f"{self.url}/api/v1/{path}", headers={"x-api-key": self.key}, **body)

    def call(self, seq: int, part: bytes) -> int:
        """Send a call of CALL_BYTES. Returns the status."""
        head = pb.ForwardBackwardRequest(model_id=self.model, seq_id=seq).SerializeToString()
        return self.post(
            "forward_backward", content=head + part * ((CALL_BYTES - len(head)) // len(part))
        ).status_code

    def stalled(self, seq: int) -> socket.socket:
        """A connection with a call that has stopped arriving, after as much of it as the server
        takes, up to a MiB less.
        """
        address = urlsplit(self.url)
        connection = socket.create_connection((address.hostname, address.port))
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {self.key}\r\n"
        connection.sendall(f"{head}content-length: {CALL_BYTES}\r\n\r\n".encode())
        connection.settimeout(1.0)
        call = pb.ForwardBackwardRequest(model_id=self.model, seq_id=seq).SerializeToString()
        with contextlib.suppress(TimeoutError):
            connection.sendall(call + bytes(CALL_BYTES - 1024**2))
        return connection


def _limit_memory() -> None:
    # Threads take as much of the limit, used or not.
    resource.setrlimit(resource.RLIMIT_STACK, (1024**2, 1024**2))
    resource.setrlimit(resource.RLIMIT_DATA, (GIB, GIB))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a service with a base that is described."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    migrate(f"sqlite:///{home / 'ft.db'}")
    versions = Versions.installed()
    base = save_base(tmp_path / "models" / "tiny")
    described = Descriptions(RunDir(home / "cache" / DESCRIPTIONS), versions_name(versions))
    described.add(base, small_document(base, versions))
    return home


@pytest.fixture
def server(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ft serve --api-only`, with the memory that deploy/kubernetes/base/api.yaml gives it."""
    own = {
        "FT_HOME": str(home),
        "FT_MODELS": str(home.parent / "models"),
        "FT_PORT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "ft_service.cli", "serve", "--api-only"]
        process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=log, stderr=log, preexec_fn=_limit_memory
        )
    try:
        wait_for(
            lambda: (home / "server.json").exists() or process.poll() is not None, HANG_SECONDS
        )
        yield process
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


def peak_bytes(pid: int) -> int:
    """Return the memory that a process has had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_hostile_bodies_stay_within_a_servers_memory(
    home: Path, server: subprocess.Popen[bytes]
) -> None:
    """32 MiB of parts of two bytes are 1 GiB as objects of protobuf; and one project's bodies that
    have stopped arriving leave the other its room.
    """
    url = json.loads((home / "server.json").read_text())["url"]
    with contextlib.closing(open_store(f"sqlite:///{home / 'ft.db'}")) as store:
        store.projects.ensure_project("other", "default")
        _, secret = store.keys.create_key(NewKey(project_id="other", name="other", scope="submit"))
    hostile, other = (
        Client.of(url, key)
        for key in (json.loads((home / "credentials").read_text())["api_key"], secret)
    )
    stalled = [hostile.stalled(seq) for seq in range(100, 124)]
    try:
        with ThreadPoolExecutor(8) as clients:
            empty = [clients.submit(other.call, seq, b"\x1a\x02\x0a\x00") for seq in range(1, 7)]
            whole = [
                clients.submit(other.call, seq, b"\x1a\x82\x80\x08" + bytes(2**17 + 2 - 4))
                for seq in range(7, 9)
            ]
            codes = Counter(call.result() for call in (*empty, *whole))
    finally:
        for connection in stalled:
            connection.close()
    assert codes == {200: 8}
    assert server.poll() is None
    assert peak_bytes(server.pid) < BOUND


def arriving(
    project: str, *pieces: bytes, ends: bool = True, length: int | None = None
) -> ArrivingBody:
    """A body of a project, of at most 100 bytes, that arrives in pieces; not `ends`: and then stops
    arriving.
    """
    left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if ends:
        left.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    request = Request(
        {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {}}, receive
    )
    request.state.principal = SimpleNamespace(project_id=project)
    return ArrivingBody(request, 100)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Room for 300 bytes, of a project 100."""
    room = Places(Kind(name="test", places=300, of_project=100, seconds=0.05))
    monkeypatch.setattr(bodies, "_BODIES", room)
    monkeypatch.setattr(bodies, "FREE_BYTES", 10)
    return room


def test_a_projects_bodies_wait_for_its_own_room(room: Places) -> None:
    async def both() -> None:
        async with arriving("a", b"x" * 60, b"y" * 30, length=90).whole() as held:
            assert held == b"x" * 60 + b"y" * 30
            assert room.projects() == {"a": (0, 90)}
            async with (
                arriving("a", b"small", length=5).whole(),
                arriving("b", b"z", length=100).whole(),
            ):
                assert room.projects() == {"a": (0, 90), "b": (0, 100)}
            with pytest.raises(UnavailableError):
                async with arriving("a", b"x" * 20, length=20).whole():
                    pass

    asyncio.run(both())
    assert room.projects() == {}


def test_a_body_without_a_length_takes_the_room_of_the_largest(room: Places) -> None:
    async def one() -> None:
        async with arriving("a", b"x" * 20).whole():
            assert room.projects() == {"a": (0, 100)}

    asyncio.run(one())


def test_a_body_that_is_too_large_is_read_to_its_end(room: Places) -> None:
    async def one() -> None:
        body = arriving("a", b"x" * 60, b"y" * 60, b"z" * 60)
        with pytest.raises(BodyTooLargeError):
            async with body.whole():
                pass
        assert await body.beginning(1) == b""

    asyncio.run(one())
    assert room.projects() == {}


def test_a_body_that_stops_arriving_gives_its_room_back(
    room: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LEAST_SECONDS", 0.01)

    async def one() -> None:
        body = arriving("a", b"x" * 60, ends=False)
        assert await body.beginning(10) == b"x" * 10
        with pytest.raises(SpecError) as refused:
            async with body.whole():
                pass
        assert refused.value.code == "request_too_slow"

    asyncio.run(one())
    assert room.projects() == {}


def test_a_client_that_goes_away_is_no_fault_of_the_server(room: Places) -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def one() -> None:
        body = ArrivingBody(
            Request(
                {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}, gone
            ),
            100,
        )
        with pytest.raises(HTTPException) as refused:
            async with body.whole():
                pass
        assert refused.value.status_code == DISCONNECTED

    asyncio.run(one())
    assert room.projects() == {}
