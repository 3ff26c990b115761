"""First stage of a helper process: `python -I -S helper_start.py PARENT MEMORY CPU NICENESS
EXPENDABLE COMMAND …`.

It ties the process to its parent, sets its limits, and executes COMMAND, which keeps both. Python
code between fork and exec is unsafe in a process with threads, hence this stage. It uses the
standard library only and runs as a file, so that it takes about 10 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def tie(with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `with_signal` to this process when its parent dies. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main(
    parent: int,
    memory_bytes: int,
    cpu_seconds: int,
    niceness: int,
    expendable: bool,
    command: list[str],
) -> None:
    """Execute `command`. `memory_bytes`: limit on private memory, `cpu_seconds`: on processor time,
    0 for none; `expendable`: killed first when memory runs out.
    """
    tie()
    if os.getppid() != parent:  # it has already died
        os.kill(os.getpid(), signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        least = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    if cpu_seconds:  # SIGXCPU, and SIGKILL if it goes on for half as long again
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + cpu_seconds // 2 + 1))
    os.nice(niceness)
    if expendable:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5] == "1", sys.argv[6:])  # pyright: ignore
