"""The process that renders conversations by one chat template, for whoever has no limits of their own around it.

`python -m ft_service.data.tokens.rendering` reads a line of JSON that holds the template and its limits, then one conversation
a line, and answers each with one line: its text, or why there is none. It ends when its input ends.
ft_service/data/template_process.py is the other end.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # transformers imports torch wherever it finds it, which takes seconds
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]

import contextlib
import json
import math
import resource
import signal
import time
from collections.abc import Iterator
from datetime import date
from types import FrameType
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.data.template_process import MOST_CHARACTERS
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.limits import TimeUp, go_first, held_memory, limit_memory, mebibytes


def main() -> None:
    lines = iter(sys.stdin.buffer)
    given = json.loads(next(lines))
    template = ChatTemplate(given["sources"], given["special_tokens"])
    go_first()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _time_up)
    limit_memory(held_memory() + given["memory_bytes"])
    for line in lines:
        sys.stdout.buffer.write(_answer(template, line, given["seconds"], given["memory_bytes"]) + b"\n")
        sys.stdout.buffer.flush()


def _answer(template: ChatTemplate, line: bytes, seconds: float, memory_bytes: int) -> bytes:
    told: dict[str, Any]
    try:
        asked = json.loads(line)
        day = date.fromisoformat(asked["day"])
        with _limited(seconds):
            text = template.write(asked["messages"], asked["tools"], day, prompt=asked["prompt"])
        if len(text) > MOST_CHARACTERS:
            return _as_line({"limit": f"wrote more than {MOST_CHARACTERS:,} characters"})
        return _as_line({"text": text})
    except LineError as error:
        told = {"refused": error.reason[:2000]}
    except TimeUp:
        told = {"limit": f"took longer than {seconds:g} seconds of a processor"}
    except MemoryError:
        told = {"limit": f"needed more than {mebibytes(memory_bytes)} of memory"}
    return _as_line(told)


def _as_line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit the processor time of the block. Raises TimeUp inside of it; where that finds no ear, in one long operation of
    Python's own, the kernel ends the process a second or two later.
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


if __name__ == "__main__":
    main()
