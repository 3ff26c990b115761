"""Rendering with a chat template in a separate process, with limits on time and memory
(ft_service/data/tokens/template_worker.py).

Templates come from bases and jobs, and conversations from any user. One that hangs or uses too much
memory ends only its own request and the process, which the next request starts again. A
conversation whose process the host killed is rendered again. Compared with rendering in this
process, a short conversation takes 0.1 ms longer and one of 10 KiB 1.5 ms; starting the process
takes about a second.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.host.helper_process import Failure, HelperFailed, HelperProcess, Program
from ft_service.shared_work.losses import persist

RENDERING = Program(
    command=(sys.executable, "-P", "-m", "ft_service.data.tokens.template_worker"),
    expendable=True,
    limits_itself=True,
    variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
)
MOST_CHARACTERS = 32 * 1024**2
"""Length of a conversation's text, at most."""
WALL_SECONDS = 600.0
"""Time for one conversation, after which the host is said to have had no processor for it."""
FIRST_PAUSE_SECONDS = 0.5
"""Pause before a conversation whose process was killed is rendered again."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits on the rendering of one conversation."""

    seconds: float = 10.0
    """Processor time."""
    memory_bytes: int = 512 * 1024**2
    """Memory in addition to what the process uses before."""


class TemplateProcess:
    """A process that renders with one chat template.

    It is started by the first conversation, and again after it ended; it ends when this is closed
    or garbage-collected. Thread-safe; one conversation at a time.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        limits: RenderLimits | None = None,
    ) -> None:
        """`sources`, `special_tokens`: those of a ChatTemplate."""
        self._limits = limits or RenderLimits()
        self._begin = {
            "sources": dict(sources),
            "special_tokens": dict(special_tokens),
            "seconds": self._limits.seconds,
            "memory_bytes": self._limits.memory_bytes,
        }
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._process: HelperProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process. None: it is not running."""
        return self._process.pid if self._process is not None else None

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        day: date,
        *,
        prompt: bool = False,
    ) -> str:
        """The text of ChatTemplate.write.

        Raises LineError if the template refuses the conversation or exceeds a limit, HelperFailed
        if the host lets no process render it.
        """
        request = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "day": str(day),
            "prompt": prompt,
        }
        with self._guard:
            ask = partial(self._ask, request)
            reply = persist("rendering", ask, first=FIRST_PAUSE_SECONDS, stop=self._closing.is_set)
        if (text := reply.get("text")) is not None:
            return text
        if "limit" in reply:
            raise LineError("", f"the chat template {reply['limit']} for this conversation")
        raise LineError("", reply["refused"])

    def close(self) -> None:
        """End the process. A conversation that it is rendering fails."""
        self._closing.set()
        if (process := self._process) is not None:
            process.kill()
        with self._guard:
            self._finish()
            self._closing.clear()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._process is None or self._process.exit_code is not None:
                self._finish()
                self._process = HelperProcess(RENDERING)
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
            return {"limit": f"ended the process that renders (exit code {error.exit_code})"}

    def _finish(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
