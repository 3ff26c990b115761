"""The process that carries out tasks on tenants' texts, one after the other
(ft_service/graders/text_processes.py).

`python -m ft_service.graders.text_program` prints an empty line when it is ready. Then it reads
batches. Of each task a line gives two lengths, of the task with its sample, and of its item (0:
that of the task before), whose bytes follow. An empty line ends a batch. Both are written by
marshal, which takes a tenth of the time that JSON takes for a hostile value. It replies to each
task with a line of JSON: `[seconds, result]`, `[seconds, kind of error, detail]`, or `null`, for
one that waits for the next batch. Seconds are those of a processor.
"""

from __future__ import annotations

import json
import marshal
import math
import resource
import sys
import time
from typing import Any, BinaryIO

from ft_service.graders.grades import Case, GradingError, Sample
from ft_service.graders.text_tasks import carried_out

CPU_SECONDS = 20
"""Limit of one task on the time of a processor: ten times what the slowest comparison takes."""
MEMORY_BYTES = 1024**3
TURN_SECONDS = 1.0
"""Time of a processor after which the rest of a batch waits for its next turn."""


def main(batches: BinaryIO, replies: BinaryIO) -> None:
    item = {}
    until = math.inf
    _write(replies, b"")
    while head := batches.readline():
        if head == b"\n":
            until = math.inf
            continue
        of_task, of_item = map(int, head.split())
        task, sample = marshal.loads(batches.read(of_task))
        item = marshal.loads(batches.read(of_item)) if of_item else item
        now = time.process_time()
        until = min(until, now + TURN_SECONDS)
        reply = _reply(task, Case(Sample(*sample), item)) if now < until else None
        _write(replies, json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass"))


def _reply(task: Any, case: Case) -> list[Any]:
    began = time.process_time()
    _limit_time(began + CPU_SECONDS)
    try:
        result = [carried_out(task, case)]
    except GradingError as error:
        result = [error.kind, error.detail]
    except MemoryError:
        result = [
            "other_error",
            f"the texts need more than {MEMORY_BYTES // 2**20:,} MiB of memory",
        ]
    return [time.process_time() - began, *result]


def _limit_time(seconds: float) -> None:
    """Have the kernel end this process once it has used so many seconds of a processor: most of the
    time it computes in C, where Python handles no signal.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), hard))


def _write(replies: BinaryIO, line: bytes) -> None:
    """Write at once: the task that ends this process is the one after the last reply."""
    replies.write(line + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
