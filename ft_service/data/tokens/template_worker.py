"""The process that renders conversations with one chat template, under limits
(ft_service/data/template_process.py).

`python -m ft_service.data.tokens.template_worker` reads a line of JSON with the template and its
limits, then one conversation a line, and replies to each with one line: its text, or the error. It
ends at the end of its input.
"""

from __future__ import annotations

import sys

from ft_service.host.quick_imports import begin_imports, end_imports

if __name__ == "__main__":  # transformers imports torch wherever it finds it, which takes seconds
    begin_imports()
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
from ft_service.data.tokens.sample_limits import TimeUp, held_memory, limit_memory, mebibytes


def main() -> None:
    lines = iter(sys.stdin.buffer)
    given = json.loads(next(lines))
    template = ChatTemplate(given["sources"], given["special_tokens"])
    signal.signal(signal.SIGPROF, _time_up)
    limit_memory(held_memory() + given["memory_bytes"])
    for line in lines:
        reply = _reply(template, line, given["seconds"], given["memory_bytes"])
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _reply(
    template: ChatTemplate, line: bytes, seconds: float, memory_bytes: int
) -> dict[str, Any]:
    """The reply to a request: `text`, or `refused` or `limit` with the reason."""
    try:
        request = json.loads(line)
        day = date.fromisoformat(request["day"])
        with _limited(seconds):
            text = template.write(
                request["messages"], request["tools"], day, prompt=request["prompt"]
            )
        if len(text) > MOST_CHARACTERS:
            return {"limit": f"wrote more than {MOST_CHARACTERS:,} characters"}
        return {"text": text}
    except LineError as error:
        return {"refused": error.reason[:2000]}
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


if __name__ == "__main__":
    end_imports()
    main()
