"""A job without a server: the next attempt in a run directory, in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ft_service.errors import ConflictError, SpecError
from ft_service.events import Event, read_segments
from ft_service.exits import exit_of
from ft_service.lifetime import is_locked, require_linux
from ft_service.rundir import Control, ErrorInfo, Exit, Result, RunDir, Start, last_attempt, newest_checkpoint
from ft_service.spec import JobSpec
from ft_service.supervisor import DEFAULT_GRACE_SECONDS, attempt_key
from ft_service.torchrun import tail

POLL_SECONDS = 0.1
STOPPING = {
    1: "Stopping: a checkpoint is written first. Interrupt once more to stop at once.",
    2: "Stopping at once, without a checkpoint.",
}
"""What the caller is told when a request to stop was passed on: the first and the second."""


def run_local(
    spec: JobSpec,
    run_dir: Path,
    on_event: Callable[[Event], None],
    stop: threading.Event | None = None,
    *,
    stop_grace_seconds: float = DEFAULT_GRACE_SECONDS,
    worker_command: Sequence[str] | None = None,
) -> Exit:
    """Train a spec in a run directory, going on from its newest complete checkpoint, and return how the attempt ended.

    `on_event` gets every event of this attempt, in order, and one for each request to stop. The first SIGINT or SIGTERM (or
    `stop`) asks the ranks to checkpoint and leave, the second kills them; signals are caught only when called from the main
    thread. A directory that holds a result is done: nothing is trained. Raises SpecError if the directory belongs to another
    spec, ConflictError if somebody trains in it.
    """
    require_linux()
    run = RunDir(run_dir)
    _claim_directory(run, spec)
    result = run.read("result.json", Result)
    if result is not None:
        return exit_of("succeeded", f"{run.root} is done already: attempt {result.attempt} trained {result.steps} steps.")
    attempt = _next_attempt(run, spec)
    with _Interrupts(stop) as interrupts:
        process = _spawn(run, attempt, stop_grace_seconds, worker_command)
        try:
            _follow(run, attempt, process, interrupts, on_event)
        except BaseException:  # an error of the callback's; the attempt must not go on unseen
            process.terminate()
            process.wait()
            raise
    return run.read(attempt_key(attempt, "exit.json"), Exit) or _lost(run, attempt, process.returncode)


def _claim_directory(run: RunDir, spec: JobSpec) -> None:
    if run.write_if_absent("spec.json", spec):
        return
    there = run.read("spec.json", JobSpec)
    differing = ["spec.json"] if there is None else _differences(_substance(there), _substance(spec))
    if differing:
        raise SpecError(
            f"run_dir = {str(run.root)!r}: it holds a run of another spec ({', '.join(differing)} differ). "
            "Choose an empty directory, or the spec that it was begun with.",
            param="run_dir",
        )


def _substance(spec: JobSpec) -> dict[str, Any]:
    """What decides the outcome: not the names drawn at each call, nor the number of ranks, which may change on resume."""
    distributed = spec.distributed.model_copy(update={"nproc_per_node": 1})
    return spec.model_copy(update={"job_id": "", "tuned_name": "", "distributed": distributed}).model_dump(mode="json")


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [name for name in here if there.get(name) != here[name]]


def _next_attempt(run: RunDir, spec: JobSpec) -> int:
    """Write the next attempt's start.json; whoever writes it first has the number. Raises ConflictError if one is running."""
    last = last_attempt(run)
    if last and is_locked(run.path(attempt_key(last, "supervisor.lock"))):
        raise ConflictError(f"Attempt {last} is running in {run.root}: wait for its end, or stop it.")
    start = Start(
        job_id=spec.job_id,
        attempt=last + 1,
        world_size=spec.world_size,
        generation=1,
        checkpoint=newest_checkpoint(run),
    )
    if not run.write_if_absent(attempt_key(start.attempt, "start.json"), start):
        raise ConflictError(f"Another process has just started attempt {start.attempt} in {run.root}.")
    return start.attempt


class _Interrupts:
    """Counts requests to stop: SIGINT and SIGTERM while it is entered in the main thread, and the caller's event."""

    def __init__(self, stop: threading.Event | None) -> None:
        self._stop = stop
        self._signals = 0
        self._before: dict[int, Any] = {}

    @property
    def count(self) -> int:
        return max(self._signals, int(self._stop is not None and self._stop.is_set()))

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _spawn(run: RunDir, attempt: int, grace: float, worker_command: Sequence[str] | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "ft_service.supervisor", str(run.root), str(attempt), "--grace", str(grace)]
    command += ["--parent", str(os.getpid())]
    if worker_command:
        command += ["--command", *worker_command]
    output = run.path(attempt_key(attempt, "logs/supervisor.log"))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        # In a session of its own: a terminal's Ctrl-C reaches us alone, and we pass on what it means.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def _follow(
    run: RunDir,
    attempt: int,
    process: subprocess.Popen[bytes],
    interrupts: _Interrupts,
    on_event: Callable[[Event], None],
) -> None:
    seen, asked = -1, 0
    while True:
        ended = process.poll() is not None
        for seq, events in read_segments(run, attempt, seen):
            seen = seq
            for event in events:
                on_event(event)
        if ended:
            return
        # Before it has named itself, the supervisor does not yet listen to signals and would die of one.
        listening = run.path(attempt_key(attempt, "supervisor.json")).exists()
        if interrupts.count > asked and listening:
            asked = min(interrupts.count, 2)
            _pass_on(run, attempt, process, asked)
            on_event(Event(time=time.time(), message=STOPPING[asked]))
        time.sleep(POLL_SECONDS)


def _pass_on(run: RunDir, attempt: int, process: subprocess.Popen[bytes], asked: int) -> None:
    if asked == 1:
        process.send_signal(signal.SIGTERM)
    else:
        run.write(attempt_key(attempt, "control.json"), Control(generation=2, desired="cancel"))


def _lost(run: RunDir, attempt: int, returncode: int) -> Exit:
    message = f"The supervisor ended with code {returncode} and left no exit record."
    log = tail(run.path(attempt_key(attempt, "logs/supervisor.log")), 30)
    return exit_of("worker_killed", message, ErrorInfo(code="worker_lost", message=message, traceback=log or None))
