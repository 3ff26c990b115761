"""Lifetimes of the processes of an attempt: the parent-death signal, and locks that the kernel
frees.

Standard library only, so that a rank can call this before it imports anything large:

    die_with_parent()           a rank dies with torchrun, torchrun with the supervisor
    hold_rank_lock(run_dir)     `ranks.lock` of the run directory, shared by all living ranks; free
    if no rank is alive

    EndCall                     tells the main thread, from a signal handler, that the process ends

The locks are flock(2): they belong to an open file, survive fork and exec if the file is passed on,
and are freed when its last holder ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

from ft_service.errors import UnavailableError
from ft_service.host.helper_start import tie

RANKS_LOCK = "ranks.lock"
RANKS_LOCK_PATH = "FT_RANKS_LOCK"
"""Environment variable with the path of the node's lock for ranks; without it, the lock is in the
run directory.
"""
SUPERVISOR_PID = "FT_SUPERVISOR_PID"
"""Environment variable with the process id that must be the parent of a rank's parent."""

POLL_SECONDS = 0.05
_SIGNAL_SECONDS = 0.5
"""How late a signal may be seen that did not interrupt the main thread."""
_held: list[int] = []


class EndCall:
    """The call to end, made in a signal handler or a thread, which the main thread waits for.

    A SimpleQueue, since the locks of an Event may be held by the very thread that a signal
    interrupts.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[None]()

    def make(self) -> None:
        self._calls.put(None)

    def wait(self) -> None:
        """Return once the call is made.

        Python runs handlers between two steps of the main thread. A signal that comes just before
        it falls asleep, or that the kernel gives to another thread, does not wake it: so it wakes
        by itself.
        """
        while True:
            with contextlib.suppress(Empty):
                return self._calls.get(timeout=_SIGNAL_SECONDS)


def require_linux() -> None:
    """Raise UnavailableError on a system that cannot tie processes together."""
    if sys.platform != "linux":
        raise UnavailableError(
            "Training processes run on Linux only (they need prctl and /proc); this is "
            f"{sys.platform}. "
            "Run the service in a Linux container or virtual machine."
        )


def die_with_parent(parent: int | None = None, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `with_signal` to this process when its parent dies; exit at once if it
    is already dead.

    `parent`: process id that the parent must have. None: the present parent; below a supervisor
    (SUPERVISOR_PID is set), one whose own parent is that supervisor, which is never true of an
    orphan's new parent. Raises UnavailableError off Linux.
    """
    require_linux()
    before = os.getppid()
    tie(with_signal)
    if os.getppid() != (before if parent is None else parent) or (parent is None and _orphaned()):
        os.kill(os.getpid(), signal.SIGKILL)


def hold_rank_lock(run_dir: str | Path) -> None:
    """Take this rank's shared lock on `ranks.lock` and hold it until the process ends.

    Call it after `die_with_parent`.
    """
    descriptor = _open(Path(os.environ.get(RANKS_LOCK_PATH) or Path(run_dir) / RANKS_LOCK))
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held.append(descriptor)


def try_lock(path: Path) -> int | None:
    """Take a lock exclusively and return its file descriptor, which frees the lock when closed.

    None: it is held.
    """
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock while the block runs, after waiting for it without limit."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a lock is held, shared or not.

    The test holds the lock for an instant itself: a `try_lock` at that moment fails and must be
    repeated.
    """
    if not path.exists():
        return False
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def wait_unlocked(path: Path, seconds: float) -> bool:
    """Wait until a lock is free; False if it is still held after `seconds`."""
    deadline = time.monotonic() + seconds
    while is_locked(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _orphaned() -> bool:
    supervisor = os.environ.get(SUPERVISOR_PID)
    return supervisor is not None and _parent_of(os.getppid()) != int(supervisor)


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])
