"""Job without a server: runs the next attempt in a run directory, in the foreground.

A job of several nodes needs the same call on each of them, over a run directory that they share:
node 0 starts and concludes the attempt, and the others join it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ft_service.errors import ConflictError, SpecError, UnavailableError
from ft_service.host.environment import child_environment
from ft_service.host.lifetime import is_locked, require_linux
from ft_service.rundir.attempt import Attempt, AttemptNode, last_attempt
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, ErrorInfo, Exit, ExitReason, Result, Start
from ft_service.rundir.events import Event, read_segments
from ft_service.spec import JobSpec
from ft_service.supervisor.command_line import DEFAULT_GRACE_SECONDS, SupervisorOptions, program
from ft_service.supervisor.torchrun import JOIN_SECONDS, Node, tail
from ft_service.wording import counted

POLL_SECONDS = 0.1
JOIN_POLL_SECONDS = 0.5
_MACHINE_OPTIONS = {"activation_checkpointing": "auto", "compile": "auto"}
STOPPING = {
    1: "Stopping after a checkpoint. Interrupt again to stop at once.",
    2: "Stopping at once, without a checkpoint.",
}
"""Message for the caller after the first and the second request to stop."""


def run_local(
    spec: JobSpec,
    run_dir: Path,
    on_event: Callable[[Event], None],
    stop: threading.Event | None = None,
    *,
    node: Node | None = None,
    options: SupervisorOptions | None = None,
) -> Exit:
    """Train a spec in a run directory from its newest complete checkpoint, and return how the
    attempt ended.

    `on_event` gets every event of this attempt, in order, and one for each request to stop. The
    first SIGINT or SIGTERM (or `stop`) asks the ranks to write a checkpoint and exit, the second
    kills them; signals are caught only when called from the main thread. A directory with a result
    is done: nothing is trained. `node`: which of a job's several nodes this is. `options`: grace
    and worker command of the supervisor. Raises SpecError if the directory belongs to another spec,
    ConflictError if another process trains in it, UnavailableError if node 0 has started no attempt
    to join.
    """
    require_linux()
    run = RunDir(run_dir)
    node = node or Node()
    options = options or SupervisorOptions(grace_seconds=DEFAULT_GRACE_SECONDS)
    _claim_directory(run, spec)
    result = run.read("result.json", Result)
    if result is not None:
        return exit_of(
            ExitReason.SUCCEEDED,
            f"{run.root} is done already: attempt {result.attempt} trained "
            f"{counted(result.steps, 'step')}.",
        )
    with _Interrupts(stop) as interrupts:
        start = _joined(run, node, interrupts) if node.index else _next_attempt(run, spec)
        attempt = Attempt(run, start.attempt)
        files = node.files(run, start)
        process = _spawn(attempt, files, node, options)
        try:
            _follow(attempt, files, process, interrupts, on_event)
        except BaseException:  # an error of the callback; the attempt must not continue unobserved
            process.terminate()
            process.wait()
            raise
    deadline = time.monotonic() + options.grace_seconds
    while (
        node.index and not attempt.has_exit() and time.monotonic() < deadline
    ):  # node 0 writes the attempt's exit record
        time.sleep(JOIN_POLL_SECONDS)
    return attempt.read_exit() or files.read_exit() or _lost(files, process.returncode)


def wait_begun(run_dir: Path) -> None:
    """Wait until node 0 has written the spec to the directory. Raises UnavailableError."""
    deadline = time.monotonic() + JOIN_SECONDS
    while not RunDir(run_dir).has("spec.json"):
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"Node 0 has started no run in {run_dir}. Start node 0 with the same directory."
            )
        time.sleep(JOIN_POLL_SECONDS)


def _claim_directory(run: RunDir, spec: JobSpec) -> None:
    if run.write_if_absent("spec.json", spec):
        return
    there = run.read("spec.json", JobSpec)
    differing = (
        ["spec.json"] if there is None else _differences(_substance(there), _substance(spec))
    )
    if differing:
        raise SpecError(
            f"run_dir = {str(run.root)!r}: it contains a run of another spec, which differs in "
            f"{', '.join(differing)}. "
            "Choose an empty directory, or use the spec that the run was started with.",
            param="run_dir",
        )


def _substance(spec: JobSpec) -> dict[str, Any]:
    """Return the options that decide the outcome, without those that may change on resume:
    generated names, the number of ranks and how they share the base, and options that were chosen
    for the machine.
    """
    distributed = spec.distributed.model_copy(
        update={"nnodes": 1, "nproc_per_node": 1, "replicate": 1, **_MACHINE_OPTIONS}
    )
    training = spec.training.model_copy(update={"tokens_per_micro_batch": "auto"})
    names = {"job_id": "", "tuned_name": "", "chosen": {}}
    return spec.model_copy(
        update={**names, "training": training, "distributed": distributed}
    ).model_dump(mode="json")


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Dotted names of the options that differ."""
    differing: list[str] = []
    for name, value in here.items():
        old = there.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            differing += [f"{name}.{inner}" for inner in _differences(old, value)]
        elif old != value:
            differing.append(name)
    return differing


def _next_attempt(run: RunDir, spec: JobSpec) -> Start:
    """Write the next attempt's start.json, which also reserves its number.

    Raises ConflictError if another attempt is running.
    """
    last = last_attempt(run)
    if last and any(is_locked(lock) for lock in Attempt(run, last).locks()):
        raise ConflictError(
            f"Attempt {last} is running in {run.root}. Wait for its end, or stop it."
        )
    start = Start(
        job_id=spec.job_id,
        attempt=last + 1,
        world_size=spec.world_size,
        generation=1,
        checkpoint=newest_checkpoint(run),
        nodes=spec.distributed.nnodes,
    )
    if not Attempt(run, start.attempt).write_start(start):
        raise ConflictError(
            f"Another process has just started attempt {start.attempt} in {run.root}."
        )
    return start


def _joined(run: RunDir, node: Node, interrupts: _Interrupts) -> Start:
    """Wait for the attempt that node 0 has started and this node has not joined yet.

    Raises UnavailableError.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline and not interrupts.count:
        last = Attempt(run, last_attempt(run))
        start = last.readable_start() if last.number else None
        over = last.has_exit() or (start and last.node(0, start.nodes).has_exit())
        if start is not None and not over and not node.files(run, start).has_supervisor():
            return start
        time.sleep(JOIN_POLL_SECONDS)
    raise UnavailableError(
        f"Node 0 has started no attempt in {run.root} for node {node.index} to join. Start node 0 "
        "too."
    )


class _Interrupts:
    """Count of requests to stop: SIGINT and SIGTERM while it is entered in the main thread, and the
    caller's event.
    """

    def __init__(self, stop: threading.Event | None) -> None:
        self._stop = stop
        self._signals = 0
        self._before: dict[int, Any] = {}

    @property
    def count(self) -> int:
        return max(self._signals, int(self._stop is not None and self._stop.is_set()))

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._caught)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _spawn(
    attempt: Attempt, files: AttemptNode, node: Node, options: SupervisorOptions
) -> subprocess.Popen[bytes]:
    options = replace(
        options,
        parent=os.getpid(),
        node_rank=node.index,
        rdzv_endpoint=node.endpoint,
        address=node.address,
        conclude=node.index == 0,
    )
    files.supervisor_log.parent.mkdir(parents=True, exist_ok=True)
    with files.supervisor_log.open("ab") as output:
        return subprocess.Popen(
            [*program(), *options.arguments(attempt.run.root, attempt.number)],
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # a terminal's Ctrl-C reaches only this process, which passes the request on
            start_new_session=True,
        )


def _follow(
    attempt: Attempt,
    files: AttemptNode,
    process: subprocess.Popen[bytes],
    interrupts: _Interrupts,
    on_event: Callable[[Event], None],
) -> None:
    """Pass on events and requests to stop until the supervisor has ended."""
    last_seq = -1
    requests = 0
    while True:
        ended = process.poll() is not None
        for segment in read_segments(attempt.run, attempt.number, last_seq):
            last_seq = segment.seq
            for event in segment.events:
                on_event(event)
            if segment.fault is not None:
                on_event(Event(time=time.time(), level="warn", message=segment.fault))
        if ended:
            return
        # Before it has written its identity, the supervisor has no signal handlers and would die of
        # a signal.
        if interrupts.count > requests and files.has_supervisor():
            requests = min(interrupts.count, 2)
            if requests == 1:
                process.send_signal(signal.SIGTERM)
            else:
                attempt.write_control(Control(generation=2, desired=Desired.CANCEL))
            on_event(Event(time=time.time(), message=STOPPING[requests]))
        time.sleep(POLL_SECONDS)


def _lost(files: AttemptNode, returncode: int) -> Exit:
    message = f"The supervisor ended with code {returncode} and left no exit record."
    log = tail(files.supervisor_log, 30)
    return exit_of(
        ExitReason.WORKER_KILLED,
        message,
        ErrorInfo(code="worker_lost", message=message, traceback=log or None),
    )
