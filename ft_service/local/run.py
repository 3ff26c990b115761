"""A job without a server: the next attempt in a run directory, in the foreground.

A job of several nodes is run by the same call on each of them, over one run directory that they share: node 0 begins the
attempt and concludes it, the others join it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ft_service.errors import ConflictError, SpecError, UnavailableError
from ft_service.host.environment import child_environment
from ft_service.host.lifetime import is_locked, require_linux
from ft_service.rundir.attempt import Attempt, last_attempt
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, ErrorInfo, Exit, ExitReason, Result, Start
from ft_service.rundir.events import Event, read_segments
from ft_service.spec import JobSpec
from ft_service.supervisor import command_line
from ft_service.supervisor.command_line import DEFAULT_GRACE_SECONDS
from ft_service.supervisor.node import Node
from ft_service.supervisor.torchrun import JOIN_SECONDS, tail
from ft_service.supervisor.verdict import exit_of

POLL_SECONDS = 0.1
JOIN_POLL_SECONDS = 0.5
_FOR_A_MACHINE = {"activation_checkpointing": "auto", "compile": "auto"}
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
    node: Node | None = None,
    stop_grace_seconds: float = DEFAULT_GRACE_SECONDS,
    worker_command: Sequence[str] | None = None,
) -> Exit:
    """Train a spec in a run directory, going on from its newest complete checkpoint, and return how the attempt ended.

    `on_event` gets every event of this attempt, in order, and one for each request to stop. The first SIGINT or SIGTERM (or
    `stop`) asks the ranks to checkpoint and leave, the second kills them; signals are caught only when called from the main
    thread. A directory that holds a result is done: nothing is trained. `node`: which of a job's several nodes this is. Raises
    SpecError if the directory belongs to another spec, ConflictError if somebody trains in it, UnavailableError if there is no
    attempt of node 0's to join.
    """
    require_linux()
    run = RunDir(run_dir)
    _claim_directory(run, spec)
    result = run.read("result.json", Result)
    if result is not None:
        return exit_of(
            ExitReason.SUCCEEDED, f"{run.root} is done already: attempt {result.attempt} trained {result.steps} steps."
        )
    with _Interrupts(stop) as interrupts:
        start = _joined(run, node, interrupts) if node and node.index else _next_attempt(run, spec)
        process = _spawn(run, start, node, stop_grace_seconds, worker_command)
        try:
            _follow(run, start, node, process, interrupts, on_event)
        except BaseException:  # an error of the callback's; the attempt must not go on unseen
            process.terminate()
            process.wait()
            raise
    return _ended(run, start, node, stop_grace_seconds) or _lost(run, start, node, process.returncode)


def wait_begun(run_dir: Path) -> None:
    """Wait until node 0 has written what is to be trained in the directory. Raises UnavailableError."""
    deadline = time.monotonic() + JOIN_SECONDS
    while not RunDir(run_dir).has("spec.json"):
        if time.monotonic() >= deadline:
            raise UnavailableError(f"Node 0 has begun nothing in {run_dir}. Start it there too.")
        time.sleep(JOIN_POLL_SECONDS)


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
    """What decides the outcome: not the names drawn at each call, nor the number of ranks and how they share the base, nor what
    was chosen for a machine, all of which may change on resume."""
    distributed = spec.distributed.model_copy(update={"nnodes": 1, "nproc_per_node": 1, "replicate": 1, **_FOR_A_MACHINE})
    training = spec.training.model_copy(update={"tokens_per_micro_batch": "auto"})
    names = {"job_id": "", "tuned_name": "", "chosen": {}}
    return spec.model_copy(update={**names, "training": training, "distributed": distributed}).model_dump(mode="json")


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [name for name in here if there.get(name) != here[name]]


def _next_attempt(run: RunDir, spec: JobSpec) -> Start:
    """Write the next attempt's start.json; whoever writes it first has the number. Raises ConflictError if one is running."""
    last = last_attempt(run)
    if last and any(is_locked(lock) for lock in Attempt(run, last).locks()):
        raise ConflictError(f"Attempt {last} is running in {run.root}: wait for its end, or stop it.")
    start = Start(
        job_id=spec.job_id,
        attempt=last + 1,
        world_size=spec.world_size,
        generation=1,
        checkpoint=newest_checkpoint(run),
        nodes=spec.distributed.nnodes,
    )
    if not Attempt(run, start.attempt).write_start(start):
        raise ConflictError(f"Another process has just started attempt {start.attempt} in {run.root}.")
    return start


def _joined(run: RunDir, node: Node, interrupts: _Interrupts) -> Start:
    """The attempt that node 0 has begun and that this node is not in yet, waited for. Raises UnavailableError."""
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline and not interrupts.count:
        last = Attempt(run, last_attempt(run))
        start = last.readable_start() if last.number else None
        over = last.has_exit() or (start and last.node(0, start.nodes).has_exit())
        if start is not None and not over and not node.files(run, start).has_supervisor():
            return start
        time.sleep(JOIN_POLL_SECONDS)
    raise UnavailableError(f"Node 0 has begun no attempt in {run.root} that node {node.index} could join. Start it there too.")


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


def _spawn(
    run: RunDir, start: Start, node: Node | None, grace: float, worker_command: Sequence[str] | None
) -> subprocess.Popen[bytes]:
    words = command_line.arguments(
        run.root,
        start.attempt,
        grace_seconds=grace,
        parent=os.getpid(),
        node_rank=node.index if node else None,
        rdzv_endpoint=node.endpoint if node else "",
        address=node.address if node else "",
        conclude=node is not None and node.index == 0,
        worker_command=worker_command or (),
    )
    output = (node or Node()).files(run, start).supervisor_log
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        # In a session of its own: a terminal's Ctrl-C reaches us alone, and we pass on what it means.
        command = [*command_line.program(), *words]
        environment = child_environment(os.environ)
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _follow(
    run: RunDir,
    start: Start,
    node: Node | None,
    process: subprocess.Popen[bytes],
    interrupts: _Interrupts,
    on_event: Callable[[Event], None],
) -> None:
    seen, asked = -1, 0
    files = (node or Node()).files(run, start)
    while True:
        ended = process.poll() is not None
        for segment in read_segments(run, start.attempt, seen):
            seen = segment.seq
            for event in segment.events:
                on_event(event)
            if segment.fault is not None:
                on_event(Event(time=time.time(), level="warn", message=segment.fault))
        if ended:
            return
        # Before it has named itself, the supervisor does not yet listen to signals and would die of one.
        listening = files.has_supervisor()
        if interrupts.count > asked and listening:
            asked = min(interrupts.count, 2)
            _pass_on(Attempt(run, start.attempt), process, asked)
            on_event(Event(time=time.time(), message=STOPPING[asked]))
        time.sleep(POLL_SECONDS)


def _pass_on(attempt: Attempt, process: subprocess.Popen[bytes], asked: int) -> None:
    if asked == 1:
        process.send_signal(signal.SIGTERM)
    else:
        attempt.write_control(Control(generation=2, desired=Desired.CANCEL))


def _ended(run: RunDir, start: Start, node: Node | None, grace: float) -> Exit | None:
    """The attempt's exit record; another node than the first waits for it, and makes do with its own if it does not come."""
    attempt = Attempt(run, start.attempt)
    deadline = time.monotonic() + grace
    while node is not None and node.index and not attempt.has_exit() and time.monotonic() < deadline:
        time.sleep(JOIN_POLL_SECONDS)
    return attempt.read_exit() or (node.files(run, start).read_exit() if node else None)


def _lost(run: RunDir, start: Start, node: Node | None, returncode: int) -> Exit:
    message = f"The supervisor ended with code {returncode} and left no exit record."
    log = tail((node or Node()).files(run, start).supervisor_log, 30)
    return exit_of(ExitReason.WORKER_KILLED, message, ErrorInfo(code="worker_lost", message=message, traceback=log or None))
