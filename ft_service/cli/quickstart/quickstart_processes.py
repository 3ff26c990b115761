"""The processes that the quickstart starts: a server and evaluations.

Each ends with the quickstart, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx2

from ft_service import installation
from ft_service.client.connection import Connection, find_connection
from ft_service.errors import FtError
from ft_service.host.home import create_home

READY_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
EVALUATE = installation.ROOT / "examples" / "evaluate.py"
RUN_BOUND = (
    "import runpy, sys; from ft_service.host.lifetime import die_with_parent; die_with_parent(); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
"""Python code that runs the script in its first argument, and dies with the process that started
it.
"""


class ProcessError(FtError):
    """A process did not do what it was started for; the message says how, and where its output
    is.
    """


class QuickstartServer:
    """`ft serve` on a free port, used in a `with`: ready at its start, gone after its end."""

    def __init__(self, home: Path, models: Path) -> None:
        self.home = home
        self.log = home / "quickstart-server.log"
        self._models = models

    def __enter__(self) -> Self:
        create_home(self.home)
        settings = {"FT_HOME": str(self.home), "FT_MODELS": str(self._models)}
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("FT_")
        }
        with self.log.open("wb") as log:
            command = ["-m", "ft_service.cli", "serve", "--port", "0", "--die-with-parent"]
            self._process = _start(command, {**inherited, **settings}, log, log)
        try:
            self.connection = self._wait_ready()
        except BaseException:
            _stop(self._process)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stop(self._process)

    def _wait_ready(self) -> Connection:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ProcessError(
                    f"The server did not start: {_last_line(self.log)} Its log: {self.log}"
                )
            with contextlib.suppress(OSError, ValueError, KeyError, httpx2.TransportError):
                started = json.loads((self.home / "server.json").read_text(encoding="utf-8"))
                if started["pid"] == self._process.pid and _is_ready(started["url"]):
                    return find_connection({}, self.home, base_url=started["url"])
            time.sleep(POLL_SECONDS)
        raise ProcessError(
            f"The server was not ready after {READY_SECONDS:.0f} seconds. Its log: {self.log}"
        )


class EvaluationProcess:
    """`evaluate.py` in a process of its own, used in a `with`; `accuracy` and `answers` wait for
    it.
    """

    def __init__(self, model: Path, data: Path, adapter: Path | None = None) -> None:
        self._arguments = ["--model", str(model), "--data", str(data), "--json"]
        if adapter is not None:
            self._arguments += ["--adapter", str(adapter)]

    def __enter__(self) -> Self:
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._process = _start(
            ["-c", RUN_BOUND, str(EVALUATE), *self._arguments],
            dict(os.environ),
            self._output,
            self._errors,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stop(self._process)
        self._output.close()
        self._errors.close()

    def accuracy(self) -> tuple[int, int]:
        """(right answers, all of them). Raises ProcessError if the evaluation failed."""
        score = self._score()
        return score["correct"], score["total"]

    def answers(self) -> list[tuple[str, str]]:
        """(message, the model's answer) of the first few samples.

        Raises ProcessError if the evaluation failed.
        """
        return [(sample["prompt"], sample["answer"]) for sample in self._score()["begin"]]

    def _score(self) -> dict[str, Any]:
        self._process.wait()
        if self._process.returncode:
            self._errors.seek(0)
            raise ProcessError(
                f"The evaluation failed:\n{self._errors.read().decode(errors='replace')}"
            )
        self._output.seek(0)
        return json.loads(self._output.read())


def _start(
    command: list[str], env: dict[str, str], output: IO[bytes], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """A Python process in a session of its own, so that Ctrl-C in the terminal reaches the
    quickstart alone.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    return httpx2.get(f"{url}/readyz", timeout=5.0, trust_env=False).is_success


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing."
