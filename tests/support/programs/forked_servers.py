"""Runs programs of the server in processes that have imported it: `forked_servers.py DESCRIPTOR`,
until the socket is closed.

Each message of the socket has a program with its environment, and the descriptors of its stdout,
its stderr, and of a pipe. The process id goes to the pipe, and in the end the exit code, negative
for a signal, each as a line.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

import api.server  # noqa: F401
import ft_service.cli.root_command
import ft_service.cli.serve_command  # noqa: F401

MOST_BYTES = 2**20


def next_program(listener: socket.socket) -> dict[str, Any]:
    """What this process, which is a new one, is to run.

    Raises SystemExit in the first one when there is no more to run.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(listener, MOST_BYTES, 3)
        if not message:
            raise SystemExit(0)
        out, err, pipe = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            if (pid := os.fork()) != 0:
                _tell_its_life(pid, pipe, (out, err))
            for descriptor, place in ((out, 1), (err, 2)):
                os.dup2(descriptor, place)
            for descriptor in descriptors:
                os.close(descriptor)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)


def _tell_its_life(pid: int, pipe: int, others: tuple[int, int]) -> None:
    for descriptor in (*others, 1, 2):
        os.close(descriptor)
    os.write(pipe, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes between
    with socket.socket(fileno=int(sys.argv[1])) as given:
        asked = next_program(given)
    # Those of the first process may be files, which are written otherwise than pipes.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["environment"])
    exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})
