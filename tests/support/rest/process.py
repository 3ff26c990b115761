"""The server as a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import openai

from tests.support.rest.service import wait_until

ROOT = Path(__file__).parents[3]
SERVE = """
import threading
from api.server import serve
from ft_service.settings import Settings

def wait(settings, store, meters, stop: threading.Event) -> None:
    stop.wait()

serve(Settings(), wait)
"""


class ForkedProcess:
    """A process of `forked_servers.py`, with what `subprocess.Popen` offers of it."""

    def __init__(self, program: str, environment: dict[str, str], log: IO[str]) -> None:
        out, its_out = os.pipe()
        told, its_told = os.pipe()
        self.stdout = os.fdopen(out)
        self._told = os.fdopen(told)
        try:
            message = json.dumps({"program": program, "environment": environment}).encode()
            socket.send_fds(forker(), [message], [its_out, log.fileno(), its_told])
        finally:
            os.close(its_out)
            os.close(its_told)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code, once it has ended."""
        if self.returncode is None and select.select([self._told], [], [], seconds)[0]:
            self.returncode = int(self._told.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, seconds: float = 60.0) -> str:
        """What else it prints to stdout, until its end."""
        assert self.poll(seconds) is not None, f"it has not ended within {seconds:g} seconds"
        return self.stdout.read()

    def close(self) -> None:
        self.stdout.close()
        self._told.close()


@cache
def forker() -> socket.socket:
    """Where programs are sent that are to be run: the server's imports take longer than what most
    tests do with it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [
            sys.executable,
            "-m",
            "tests.support.programs.forked_servers",
            str(theirs.fileno()),
        ]
        _FORKER.append(
            subprocess.Popen(
                command, cwd=ROOT, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        )
    return ours


def end_forker() -> None:
    """At the end of the tests, if it was begun."""
    while _FORKER:
        forker().close()
        _FORKER.pop().wait(10)
    forker.cache_clear()


_FORKER: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Server:
    """A server process. Its log is a file: it is not read meanwhile, and a full pipe would stop the
    server.
    """

    process: ForkedProcess
    log: IO[str]

    def printed(self) -> tuple[str, str]:
        """To stdout and to stderr, until its end."""
        out = self.process.communicate()
        self.log.seek(0)
        return out, self.log.read()


@contextmanager
def server(home: Path, program: str = SERVE, **environment: str) -> Iterator[Server]:
    """By default with nothing that reconciles. Ended at the end."""
    with TemporaryFile("w+") as log:
        process = ForkedProcess(
            program, {**os.environ, "FT_HOME": str(home), "FT_PORT": "0", **environment}, log
        )
        try:
            yield Server(process, log)
        finally:
            process.kill()
            process.poll(60)
            process.close()


def read(path: Path) -> dict[str, str]:
    return json.loads(path.read_text())


def started(home: Path, server: Server) -> openai.OpenAI:
    """A client with what the server has left for the local command line."""

    def is_up() -> bool:
        assert server.process.poll() is None, server.printed()
        path = home / "server.json"
        return path.exists() and read(path)["pid"] == server.process.pid

    wait_until(is_up)
    url = read(home / "server.json")["url"]
    return openai.OpenAI(
        api_key=read(home / "credentials")["api_key"], base_url=f"{url}/v1", max_retries=5
    )


def ended(server: Server, number: int) -> tuple[str, str]:
    """What a server has printed, after it was told to end and has done so as it should."""
    server.process.send_signal(number)
    printed = server.printed()
    assert server.process.returncode == 0, printed
    return printed
