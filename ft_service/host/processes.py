"""Identities of processes, which stay unique when a process id is reused, and signals that say
whose fault an end is.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ft_service.host.lifetime import require_linux

CRASHES = (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGSYS, signal.SIGTRAP),
)
"""Signals by which a process ends for a fault of its own: the same work would end it again."""
GONE_STATES = frozenset("ZXx")
"""States in /proc/<pid>/stat of processes that have ended; a zombie only waits to be reaped."""


class ProcessIdentity(BaseModel):
    """Identity of one process, unique among all that have or will have its process id."""

    model_config = ConfigDict(frozen=True)

    boot_id: str
    pid_namespace: int
    """Inode of the process id namespace of `pid`."""
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    start_ticks: int
    """Clock ticks between boot and the start of the process."""


def of(pid: int) -> ProcessIdentity:
    """Return the identity of the process that has this id now, in this namespace.

    Raises ProcessLookupError if there is none.
    """
    require_linux()
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(
        boot_id=_boot_id(), pid_namespace=_pid_namespace(), pid=pid, start_ticks=ticks
    )


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Return whether this very process is alive; None: unknown, since it is in another pid
    namespace of the same boot.
    """
    require_linux()
    if identity.boot_id != _boot_id():
        return False
    if identity.pid_namespace != _pid_namespace():
        return None
    return _start_ticks(identity.pid) == identity.start_ticks


def kill(identity: ProcessIdentity, with_signal: int = signal.SIGKILL) -> bool:
    """Send a signal to this very process, never to another that reuses its id.

    False: it has ended, or cannot be seen.
    """
    try:
        handle = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(handle, with_signal)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def has_ended(handle: int, seconds: float = 0) -> bool:
    """Return whether the process of a pidfd has ended, after waiting for at most `seconds`.

    Uses poll: select cannot take descriptors above 1,023, which a server with many connections has.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold any character: the fields begin
    # after the last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in GONE_STATES else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
