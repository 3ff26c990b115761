"""One installation as several processes: API replicas behind a balancer, reconcilers, and a host
whose jobs train nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai

from ft_service.store.sql import Store, open_store
from tests.support.attempts import wait_for
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
APIS = 3
RECONCILERS = 2
SLOTS = 32
STEP_SECONDS = 0.3
ADMIN_KEY = "sk-admin-key-of-an-installation-for-tests"
PROBE_SECONDS = 0.5
PROBE_TIMEOUT_SECONDS = 3.0
START_SECONDS = 120.0


class Unit:
    """A process of the installation that may be killed, and is started again."""

    def __init__(
        self, name: str, ready: str, words: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        """`ready`: what it prints when it begins to work."""
        self.name, self._ready, self._words, self._environment, self._log = (
            name,
            ready,
            list(words),
            environment,
            log,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, env=self._environment, cwd=ROOT, stdout=log, stderr=log
            )

    def end(self, number: int) -> int:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} has ended by itself"
        self._process.send_signal(number)
        return self._process.wait(60)

    def times_ready(self) -> int:
        """How often it has said that it works now."""
        return self._log.read_text().count(self._ready)

    def errors(self) -> list[str]:
        """What went wrong in it, by its log."""
        return [line for line in self._log.read_text().splitlines() if '"level": "error"' in line]

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-2000:]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Balancer:
    """TCP to whichever API process is ready, in turn: what stands before replicas of a server.

    Asks `/readyz` as often as such things do.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._next = 0
        self.ready: set[int] = set()
        """Ports whose process has said lately that it can serve."""
        self._loop = asyncio.new_event_loop()
        self._probes: set[asyncio.Task[None]] = set()
        self.port = 0
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), daemon=True)
        self._thread.start()
        begun.wait()

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self._ports)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, begun: threading.Event) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        for port in self._ports:
            self._probes.add(self._loop.create_task(self._probe(port)))
        begun.set()
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _probe(self, port: int) -> None:
        while True:
            try:
                is_ready = await asyncio.wait_for(_is_ready(port), PROBE_TIMEOUT_SECONDS)
            except OSError:
                is_ready = False
            (self.ready.add if is_ready else self.ready.discard)(port)
            await asyncio.sleep(PROBE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await self._connect()
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except (OSError, asyncio.CancelledError):  # its end is the benchmark's, or no replica's
            pass
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in self._ports:
            self._next = (self._next + 1) % len(self._ports)
            port = self._ports[self._next]
            if port in self.ready:
                try:
                    return await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:
                    self.ready.discard(port)
        raise ConnectionError("no replica is ready")


async def _is_ready(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@dataclass
class Installation:
    """Everything that runs."""

    home: Path
    store: Store
    """For looking on, and nothing else."""
    units: list[Unit]
    """Whatever of it may be killed."""
    balancer: Balancer
    host: Unit
    blows: Counter[str] = field(default_factory=Counter)

    def client(self, key: str) -> openai.OpenAI:
        """As a user has it, with the retries that it makes by itself."""
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.balancer.port}/v1", api_key=key)


@contextlib.contextmanager
def installation(folder: Path, url: str) -> Iterator[Installation]:
    """In a folder, on an empty PostgreSQL.

    Fails if a process ends by itself, or not in order at the end.
    """
    with contextlib.ExitStack() as stack:
        home = folder / "home"
        key = folder / "key"
        (home / "orders").mkdir(parents=True)
        key.write_text(ADMIN_KEY)
        shared = {
            "FT_HOME": str(home),
            "FT_DATABASE_URL": url,
            "FT_SLOTS": str(SLOTS),
            "FT_BOOTSTRAP_KEY_FILE": str(key),
        }
        shared |= {
            "FT_MODELS": str(ROOT / "examples/models"),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
        }
        environment = {**os.environ, **shared}
        ft = [sys.executable, "-m", "ft_service.cli"]
        subprocess.run(
            [*ft, "migrate"], env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        ports = [free_port() for _ in range(APIS)]

        def unit(name: str, ready: str, *words: str) -> Unit:
            one = Unit(name, ready, words, environment, folder / f"{name}.log")
            stack.callback(one.close)
            one.begin()
            return one

        units = [
            unit(f"api-{port}", "Serving", *ft, "serve", "--api-only", "--port", str(port))
            for port in ports
        ]
        programs = [sys.executable, "-m"]
        played = [*programs, "tests.support.programs.played_reconciler", str(home), str(SLOTS)]
        units += [
            unit(f"reconciler-{number}", "Moving jobs", *played) for number in range(RECONCILERS)
        ]
        host = unit(
            "host",
            "",
            *programs,
            "tests.support.programs.played_host",
            str(home),
            str(STEP_SECONDS),
        )
        balancer = Balancer(ports)
        stack.callback(balancer.close)
        store = open_store(url)
        stack.callback(store.close)
        try:
            wait_for(lambda: bool(units[-1].times_ready()) and balancer.all_ready, START_SECONDS)
            yield Installation(home, store, units, balancer, host)
            for one in units:
                assert one.end(signal.SIGTERM) == 0, f"{one.name} did not end in order"
        except BaseException:
            for one in [*units, host]:
                print(f"--- {one.name}", one.said(), sep="\n", file=sys.stderr)
            raise
