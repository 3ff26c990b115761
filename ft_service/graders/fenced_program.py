"""The program within the fence of a python grader (python_fence.py): a file of the standard library
only.

It reads lines of JSON: first the source with the folders of packages and the limit of memory, then
cases. It answers each with one line: `{}` or `{"reward"}`, or `{"error"}` with the end of the
traceback. What the grader prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from typing import Any

MOST_ERROR = 2000
"""Characters of a traceback."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = iter(sys.stdin.buffer)
    begin = json.loads(next(lines))
    _limit(begin["memory_bytes"])
    sys.path += begin["packages"]
    grader: dict[str, Any] = {"__name__": "grader"}
    reply = _tried(lambda: _load(begin["source"], grader))
    while True:
        replies.write(json.dumps(reply).encode() + b"\n")
        line = next(lines, None)
        if line is None:
            return
        reply = _tried(lambda line=line: _graded(grader, **json.loads(line)))


def _limit(memory_bytes: int) -> None:
    """Hard limits, which nobody within can raise again."""
    for which, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (least, least))


def _load(source: str, grader: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "grader.py", "exec"), grader)
    if not callable(grader.get("grade")):
        raise TypeError("the source defines no function grade(sample, item)")
    return {}


def _graded(grader: dict[str, Any], sample: Any, item: Any) -> dict[str, Any]:
    return {"reward": float(grader["grade"](sample, item))}


def _tried(work: Any) -> dict[str, Any]:
    try:
        return work()
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt are a grader's errors like any other
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return {
            "error": "".join(traceback.format_exception(type(error), error, frames))[-MOST_ERROR:]
        }


if __name__ == "__main__":
    main()
