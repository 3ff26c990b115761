"""The loop of a process that works on inputs under limits (ft_service/data/limited_process.py).

It reads a line of JSON with what it needs and its limits, then one input a line, and replies to
each with one line: what was made of it, `refused` with the reason, or `limit`. It ends at the end
of its input. What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.data.tokens.sample_limits import TimeUp, held_memory, limit_memory, mebibytes

_MOST_REASON = 2000

Work = Callable[[dict[str, Any]], dict[str, Any]]
"""Function of an input, as read from JSON, that returns the reply."""


def serve(begin: Callable[[dict[str, Any]], Work]) -> None:
    """Answer the inputs that arrive. `begin`: returns the work, from the first line."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lines = iter(sys.stdin.buffer)
    given = json.loads(next(lines))
    work = begin(given)
    signal.signal(signal.SIGPROF, _time_up)
    limit_memory(held_memory() + given["memory_bytes"])
    for line in lines:
        reply = _reply(work, line, given["seconds"], given["memory_bytes"])
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _reply(work: Work, line: bytes, seconds: float, memory_bytes: int) -> dict[str, Any]:
    try:
        request = json.loads(line)
        with _limited(seconds):
            return work(request)
    except LineError as error:
        return {"refused": error.reason[:_MOST_REASON], "place": error.field}
    except TimeUp:
        return {"limit": f"took longer than {seconds:g} seconds of a processor"}
    except MemoryError:
        return {"limit": f"needed more than {mebibytes(memory_bytes)} of memory"}


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit the processor time of the block.

    Raises TimeUp inside the block; during one long operation in C code, where Python does not run
    signal handlers, the kernel ends the process one or two seconds later.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _time_up(number: int, frame: FrameType | None) -> None:
    raise TimeUp
