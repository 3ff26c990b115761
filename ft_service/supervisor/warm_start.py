"""A supervisor with preloaded workers that waits for an attempt, so that its start need not wait for Python and PyTorch.

    server: Standby ──socketpair──▶ supervisor (waiting, detached) ──pipes──▶ workers.agent (has imported torch, forks ranks)

Whoever waits is used for one attempt and is then what any supervisor is: parent of what runs the ranks, holder of the attempt's
lock, writer of its exit record. While it waits it holds nothing of any job, and ends when the server's end of the socket is
closed, however the server ends. The lock travels as an open file in the same message as the attempt, so that there is no moment
in which the attempt looks free.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_service.host.environment import child_environment
from ft_service.host.lifetime import die_with_parent
from ft_service.rundir.directory import RunDir
from ft_service.supervisor import command_line, torchrun

log = logging.getLogger(__name__)

PRELOAD_SECONDS = 300.0
"""How long preloading may take before it is given up."""
ACCEPT_SECONDS = 5.0
"""How long a waiting supervisor may take to take an attempt."""
REFILL_SECONDS = 20.0
"""After one was used: until the next is preloaded, which would only slow the start of the job."""
MAX_FAILURES = 3
"""Preloads in a row that failed, after which no more are tried."""
_MESSAGE_BYTES = 64 * 1024
_READY = "ready"


@dataclass(frozen=True)
class Assignment:
    """What a waiting supervisor was given."""

    run: RunDir
    attempt: int
    grace_seconds: float
    lock: int
    """Descriptor that holds supervisor.lock."""
    agent: subprocess.Popen[bytes]


class Standby:
    """The server's side: keeps one supervisor waiting. `hand_over` belongs to one thread; preloading has its own."""

    def __init__(self, grace_seconds: float, refill_seconds: float = REFILL_SECONDS) -> None:
        self._grace = grace_seconds
        self._refill_seconds = refill_seconds
        self._guard = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer: threading.Timer | None = None
        self._failures = 0
        self._closed = False
        self._refill_after(0.0)

    def is_ready(self) -> bool:
        """Whether an attempt would start warm now."""
        with self._guard:
            return self._socket is not None

    def hand_over(self, run: RunDir, attempt: int, lock: int) -> bool:
        """Give an attempt, and the lock that holds it, to the waiting supervisor. False: none waits, or it did not take it."""
        with self._guard:
            waiting, self._socket = self._socket, None
        if waiting is None:
            return False
        message = {"run_dir": str(run.root), "attempt": attempt, "grace": self._grace}
        with waiting:
            try:
                socket.send_fds(waiting, [json.dumps(message).encode()], [lock])
                waiting.settimeout(ACCEPT_SECONDS)
                taken = bool(waiting.recv(1))
            except OSError:
                taken = False
        self._refill_after(self._refill_seconds)
        return taken

    def close(self) -> None:
        """Let the waiting supervisor go."""
        with self._guard:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _refill_after(self, seconds: float) -> None:
        with self._guard:
            if self._closed or self._failures >= MAX_FAILURES:
                return
            self._timer = threading.Timer(seconds, self._refill)
            self._timer.daemon = True
            self._timer.start()

    def _refill(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*command_line.program(), *command_line.standby_arguments(theirs.fileno())]
            silent = subprocess.DEVNULL
            fds = [theirs.fileno()]
            environment = child_environment(os.environ)
            code = subprocess.run(
                command, env=environment, stdin=silent, stdout=silent, stderr=silent, pass_fds=fds, check=False
            ).returncode
        said = _said(ours, PRELOAD_SECONDS) if code == 0 else f"exit code {code}"
        if said != _READY:
            self._failures += 1
            log.warning("the workers could not be preloaded, so attempts start cold: %s", said or "it was killed")
            ours.close()
            self._refill_after(self._refill_seconds)
            return
        with self._guard:
            if self._closed:
                ours.close()
                return
            self._failures = 0
            self._socket = ours


def wait_for_assignment(descriptor: int) -> Assignment | None:
    """The supervisor's side: preload, say so, and wait. None: the server is gone, or the workers cannot be preloaded."""
    with socket.socket(fileno=descriptor) as server:
        agent = _start_agent()
        assert agent.stdout is not None
        with contextlib.suppress(OSError):
            ready, _, _ = select.select([agent.stdout, server], [], [])
            said = agent.stdout.readline().decode(errors="replace").strip() if agent.stdout in ready else ""
            server.sendall(said.encode()[:1000] or b"the preloading process ended")
            if said == _READY:
                return _receive(server, agent)
        agent.kill()
        agent.wait()
    return None


def go(agent: subprocess.Popen[bytes], arguments: Mapping[str, object]) -> None:
    """Let a preloaded agent run ranks. Raises OSError if it is gone."""
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(arguments).encode() + b"\n")
    agent.stdin.close()


def _receive(server: socket.socket, agent: subprocess.Popen[bytes]) -> Assignment | None:
    body, descriptors, _, _ = socket.recv_fds(server, _MESSAGE_BYTES, 1)
    if not body:
        agent.kill()
        agent.wait()
        return None
    given = json.loads(body)
    os.set_inheritable(descriptors[0], False)
    server.sendall(b"1")
    return Assignment(RunDir(Path(given["run_dir"])), given["attempt"], given["grace"], descriptors[0], agent)


def _start_agent() -> subprocess.Popen[bytes]:
    parent = os.getpid()
    environment = {
        **torchrun.allocator_settings(os.environ),
        **child_environment(os.environ),
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's would start threads at import, and what forks must have none
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without a CUDA context, which no fork survives
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.agent"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # This process has one thread, so that running Python between fork and exec is safe.
        preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
    )


def _said(waiting: socket.socket, seconds: float) -> str:
    waiting.settimeout(seconds)
    try:
        return waiting.recv(_MESSAGE_BYTES).decode(errors="replace")
    except OSError as error:
        return str(error)
