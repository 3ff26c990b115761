"""Rendering by a chat template in a process of its own, with limits on time and memory (ft_service/data/tokens/rendering.py).

A template comes from a base or from any job, and a conversation from anybody. What loops or grows without bound costs the
request that asked for it and its process, which the next request starts again, and nobody else. A short conversation takes a
tenth of a millisecond more than in one's own process, one of 10 KiB 1.5 ms; a new process about a second, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.host.environment import child_environment

COMMAND = (sys.executable, "-P", "-m", "ft_service.data.tokens.rendering")
MOST_CHARACTERS = 32 * 1024**2
"""Of the text of one conversation."""
WALL_SECONDS = 120.0
"""That one conversation may take on a host which has no processor for it, before the process is killed."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits on the rendering of one conversation."""

    seconds: float = 10.0
    """Of a processor's time."""
    memory_bytes: int = 512 * 1024**2
    """Beside what the process takes before."""


class TemplateProcess:
    """A process that renders by one chat template; started at the first conversation, and again where it was ended. For any
    thread, one conversation at a time. It ends when this is closed, or no longer used.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, Any], limits: RenderLimits | None = None
    ) -> None:
        """`sources`, `special_tokens`: a ChatTemplate's."""
        self._limits = limits or RenderLimits()
        self._begin = _as_line(
            {
                "sources": dict(sources),
                "special_tokens": dict(special_tokens),
                "seconds": self._limits.seconds,
                "memory_bytes": self._limits.memory_bytes,
            }
        )
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id. None: none runs."""
        return self._process.pid if self._process is not None else None

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, day: date, *, prompt: bool = False
    ) -> str:
        """As ChatTemplate.write. Raises LineError for what the template does not take, and where it exceeds a limit."""
        asked = {"messages": list(messages), "tools": list(tools) if tools else None, "day": str(day), "prompt": prompt}
        with self._guard:
            told = self._told(_as_line(asked))
        if (text := told.get("text")) is not None:
            return text
        if "limit" in told:
            raise LineError("", f"the chat template {told['limit']} for this conversation")
        raise LineError("", told["refused"])

    def close(self) -> None:
        """End the process. What it is asked at the time fails."""
        if (process := self._process) is not None:
            process.kill()
        with self._guard:
            self._finish()

    def _told(self, line: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        heard = bytearray()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            due = time.monotonic() + WALL_SECONDS
            readable = select.poll()
            readable.register(process.stdout, select.POLLIN)
            while not heard.endswith(b"\n"):
                if not readable.poll(max(0.0, due - time.monotonic()) * 1000):
                    self._finish()
                    return {"limit": f"took longer than {WALL_SECONDS:g} seconds"}
                part = os.read(process.stdout.fileno(), 2**20)
                if not part:
                    return self._why_ended(process)
                heard += part
        except OSError:
            return self._why_ended(process)
        return json.loads(heard)

    def _why_ended(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        code = process.wait()
        self._finish()
        if code == -signal.SIGXCPU:
            return {"limit": f"took longer than {self._limits.seconds:g} seconds of a processor"}
        return {"limit": f"ended the process that renders (exit code {code})"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._finish()
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"),
                start_new_session=True,  # a terminal's Ctrl-C is for us
            )
            self._process, self._end = process, weakref.finalize(self, _end, process)
            assert process.stdin is not None
            process.stdin.write(self._begin)
            process.stdin.flush()
        return self._process

    def _finish(self) -> None:
        if (end := self._end) is not None:
            end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet sent
                pipe.close()


def _as_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
