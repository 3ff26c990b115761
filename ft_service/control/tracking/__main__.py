"""The process that sends the metrics of one run: `python -m ft_service.control.tracking`.

It reads requests as lines of JSON and answers each with a line: {"do": "open", "account": …, "run":
…}, answered with `url` and `next_step`; {"do": "log", "points": [[step, numbers], …]}; {"do":
"confirm", "step": …}; {"do": "rest"}; {"do": "finish", "exit_code": …}. If the tracker fails, the
answer is {"failed": why}, without the key, and the process ends. When its input ends it leaves the
run open for the next process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ft_service.control.tracking.metric_points import Run, RunDescription, RunError


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # so that output of packages is not read as a reply
    run: Run | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if request["do"] == "open":
                run = _open(request["account"], RunDescription(**request["run"]))
                reply = {"url": run.url, "next_step": run.next_step}
            else:
                assert run is not None, "it is opened first"
                _do(run, request)
        except RunError as error:
            reply = {"failed": str(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        if "failed" in reply:
            break


def _open(account: dict[str, Any], run: RunDescription) -> Run:
    """Open a run at its tracker. Raises RunError."""
    if run.kind == "mlflow":
        from ft_service.control.tracking.mlflow_run import MlflowAccount, MlflowRun

        server = MlflowAccount(**account)
        server.enter()
        return MlflowRun(server, run)
    if run.kind == "trackio":
        from ft_service.control.tracking.trackio_run import TrackioAccount, TrackioRun

        place = TrackioAccount(**account)
        place.enter()
        return TrackioRun(place, run)
    # The SDK and its process leave temporary folders, and folders by the run's path. The name is
    # relative, since the path of a socket, which is in one of them, has at most 107 bytes.
    os.chdir(account["folder"])
    os.environ["TMPDIR"] = "."
    from ft_service.control.tracking.wandb_run import Account, WandbRun

    return WandbRun(Account(**account), run)


def _do(run: Run, request: dict[str, Any]) -> None:
    match request["do"]:
        case "log":
            for step, numbers in request["points"]:
                run.log(step, numbers)
        case "confirm":
            run.confirm(request["step"])
        case "rest":
            run.rest()
        case "finish":
            run.finish(request["exit_code"])


def _end_children() -> None:
    """Kill child processes: W&B's own would otherwise end as an orphan, which a container may not
    reap.
    """
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text(encoding="utf-8").split()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    # os._exit skips the interpreter's exit handlers, in which W&B's SDK would wait for its runs and
    # end them.
    code = 1
    try:
        main()
        code = 0
    except Exception:
        import traceback

        traceback.print_exc()
    finally:
        _end_children()
        os._exit(code)
