"""Choice of the exit record that describes the origin of a failure, among those that describe its
consequences. Pure.

When one rank fails, the others lose their connection to it, are asked to stop, or are killed
because they do not stop. Each node then has an exit record of its own, and users see the one
nearest to the origin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from ft_service.rundir.documents import Exit, ExitReason

COLLECTIVE_TIMEOUT = "collective_timeout"
"""`error.code` of a rank that waited for another rank in vain."""

_LOST_CONNECTION = (
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited"
)
_LOST_PEER = re.compile(
    rf"{_LOST_CONNECTION}|Watchdog caught collective|Timed out waiting"
    r"|Rendezvous\w*Error|DistStoreError|DistNetworkError|DistBackendError",
    re.IGNORECASE,
)
_NCCL_GAVE_UP = re.compile(
    r"Watchdog caught collective operation timeout[^\n]*|ProcessGroupNCCL's watchdog got stuck[^\n]*"
    r"|[^\n]*remote process exited[^\n]*",
    re.IGNORECASE,
)
_NO_REASON = re.compile(
    r"without saying how training ended|it printed nothing|but left no result\.json|left no exit "
    r"record"
)


class Cause(IntEnum):
    """Causes that exit records describe, nearest to the origin first: none is a consequence of one
    listed after it.
    """

    REFUSED = 0
    """The job itself cannot be trained."""
    ERROR = 1
    """A rank raised an error of its own."""
    KILLED = 2
    """A rank, or torchrun, was killed from outside, for example because of its memory."""
    STOPPED = 3
    """A node was asked to stop before it had begun."""
    LOST_PEER = 4
    """A rank lost another one, or waited for it in vain."""
    STOP_TIMEOUT = 5
    """Ranks did not stop when asked to, often because they waited for other ranks."""
    SILENT = 6
    """No process left a reason."""


def is_lost_connection(message: str) -> bool:
    """Whether an error of a rank only says that another one went away. A rank that waited in vain
    is not among them: where none went away, its error is the only one that there is."""
    return re.search(_LOST_CONNECTION, message, re.IGNORECASE) is not None


def cause_of(exit: Exit) -> Cause | None:
    """Return the cause that an exit record describes; None: nothing failed there."""
    code = exit.error.code if exit.error else None
    if exit.reason in (ExitReason.SUCCEEDED, ExitReason.CANCELLED):
        return None
    if exit.reason is ExitReason.PERMANENT_ERROR:
        return Cause.REFUSED
    if exit.reason in (ExitReason.STOP_TIMEOUT, ExitReason.STALLED):
        return Cause.STOP_TIMEOUT
    if exit.reason is ExitReason.STOPPED:
        return Cause.STOPPED
    if exit.reason is ExitReason.UNREADABLE:
        return Cause.SILENT
    if _NO_REASON.search(exit.message):
        return Cause.SILENT
    if exit.reason is ExitReason.WORKER_KILLED:
        return Cause.KILLED
    lost = code == COLLECTIVE_TIMEOUT or _LOST_PEER.search(exit.message)
    return Cause.LOST_PEER if lost else Cause.ERROR


def first_cause(exits: Sequence[Exit]) -> Exit | None:
    """Return the record nearest to the origin, the first of equal ones; None: nothing failed."""
    causes = [(cause, exit) for exit in exits if (cause := cause_of(exit)) is not None]
    return min(causes, key=lambda item: item[0])[1] if causes else None


def nccl_gave_up(log: str) -> str | None:
    """Return NCCL's message, at most 300 characters, from the log of a rank that NCCL aborted
    (SIGABRT) because another rank did not answer; None: the log has no such message.
    """
    match = _NCCL_GAVE_UP.search(log)
    return match[0].strip()[:300] if match else None
