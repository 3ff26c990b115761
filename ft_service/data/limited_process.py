"""Work on one input in a process of its own, with limits on time and memory
(ft_service/data/tokens/limited_worker.py).

Inputs come from any user. One that hangs or uses too much memory ends only its own request and the
process, which the next request starts again. An input whose process the host killed is worked on
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program
from ft_service.shared_work.losses import persist

WALL_SECONDS = 600.0
"""Time for one input, after which the host is said to have had no processor for it."""
FIRST_PAUSE_SECONDS = 0.5
"""Pause before an input whose process was killed is worked on again."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits on the work on one input."""

    seconds: float = 10.0
    """Processor time."""
    memory_bytes: int = 512 * 1024**2
    """Memory in addition to what the process uses before."""


@dataclass(frozen=True)
class Wording:
    """Words for errors."""

    work: str
    """For the log, such as "rendering"."""
    part: str
    """What works, such as "the chat template"."""
    input: str
    """What it works on, such as "this conversation"."""


class LimitedProcess:
    """A process that works on inputs.

    It is started by the first input, and again after it ended; it ends when this is closed or
    garbage-collected. Thread-safe; one input at a time.
    """

    def __init__(
        self,
        program: Callable[[], Program],
        begin: Mapping[str, Any],
        limits: RenderLimits,
        words: Wording,
    ) -> None:
        """`program`: makes the program of each process. `begin`: what a process is told first."""
        self._program = program
        self._limits = limits
        self._words = words
        self._begin = {
            **begin,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
        }
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._process: HelperProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process. None: it is not running."""
        return self._process.pid if self._process is not None else None

    def ask(
        self, request: Mapping[str, Any], take: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> dict[str, Any]:
        """The reply to an input. `take`: called with it before the process gets the next one.

        Raises LineError if the process refuses the input, with its place, or if that exceeds a
        limit; HelperFailed if the host lets no process work on it.
        """
        with self._guard:
            ask = partial(self._ask, request)
            reply = persist(
                self._words.work, ask, first=FIRST_PAUSE_SECONDS, stop=self._closing.is_set
            )
            take(reply)
        if "limit" in reply:
            raise LineError("", f"{self._words.part} {reply['limit']} for {self._words.input}")
        if "refused" in reply:
            raise LineError(reply.get("place", ""), reply["refused"])
        return reply

    def close(self) -> None:
        """End the process. An input that it is working on fails."""
        self._closing.set()
        if (process := self._process) is not None:
            process.kill()
        with self._guard:
            self._finish()
            self._closing.clear()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if self._process is None or self._process.exit_code is not None:
                self._finish()
                self._process = HelperProcess(self._program())
                self._process.send(self._begin)
            return self._process.ask(request, WALL_SECONDS)
        except HelperFailed as error:
            self._finish()
            if error.is_lost:
                raise
            if error.failure is Failure.CPU:
                return {
                    "limit": f"took longer than {self._limits.seconds:g} seconds of a processor"
                }
            if error.failure is Failure.MEMORY:
                return {
                    "limit": f"needed more than {self._limits.memory_bytes // 2**20:,} MiB of "
                    "memory"
                }
            return {"limit": f"ended its process (exit code {error.exit_code})"}

    def _finish(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
