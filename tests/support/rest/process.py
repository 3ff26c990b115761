"""The server as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import openai

from tests.support.rest.service import wait_until

SERVE = """
import threading
from api.server import serve
from ft_service.settings import Settings

def wait(settings, store, meters, stop: threading.Event) -> None:
    stop.wait()

serve(Settings(), wait)
"""


@dataclass(frozen=True)
class Server:
    """A server process. Its log is a file: it is not read meanwhile, and a full pipe would stop the server."""

    process: subprocess.Popen[str]
    log: IO[str]

    def printed(self) -> tuple[str, str]:
        """To stdout and to stderr, until its end."""
        out, _ = self.process.communicate(timeout=60)
        self.log.seek(0)
        return out, self.log.read()


@contextmanager
def server(home: Path, program: str = SERVE, **environment: str) -> Iterator[Server]:
    """By default with nothing that reconciles. Ended at the end."""
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "FT_HOME": str(home), "FT_PORT": "0", **environment},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Server(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


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
    return openai.OpenAI(api_key=read(home / "credentials")["api_key"], base_url=f"{url}/v1", max_retries=5)


def ended(server: Server, number: int) -> tuple[str, str]:
    """What a server has printed, after it was told to end and has done so as it should."""
    server.process.send_signal(number)
    printed = server.printed()
    assert server.process.returncode == 0, printed
    return printed
