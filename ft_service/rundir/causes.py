"""Which of several exit records tells the origin, and which only what followed from it. Pure.

When one rank of an attempt fails, the others lose it, are told to stop, or are killed because they cannot: each node then has a
record of its own, and the nearest to the origin is the one to show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from ft_service.rundir.documents import Exit, ExitReason

COLLECTIVE_TIMEOUT = "collective_timeout"
"""`error.code` of a rank that waited for another one in vain."""

_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited|Watchdog caught collective"
    r"|Timed out waiting|Rendezvous\w*Error|DistStoreError|DistNetworkError|DistBackendError",
    re.IGNORECASE,
)
_NCCL_GAVE_UP = re.compile(
    r"Watchdog caught collective operation timeout[^\n]*|ProcessGroupNCCL's watchdog got stuck[^\n]*"
    r"|[^\n]*remote process exited[^\n]*",
    re.IGNORECASE,
)
_UNSAID = re.compile(r"without saying how training ended|it printed nothing|but left no result\.json|left no exit record")


class Cause(IntEnum):
    """What an exit record tells, the nearest to the origin first: none of them follows from one below it."""

    REFUSED = 0
    """The job itself cannot be trained."""
    ERROR = 1
    """A rank raised an error of its own."""
    KILLED = 2
    """A rank, or torchrun, was killed from outside, for what memory it used among others."""
    STOPPED = 3
    """A node was told to go before it had begun."""
    LOST_PEER = 4
    """A rank lost another one, or waited for it in vain."""
    STOP_TIMEOUT = 5
    """Ranks that were told to stop could not, often for want of the others."""
    SILENT = 6
    """Nobody said anything."""


def cause_of(exit: Exit) -> Cause | None:
    """What an exit record tells; None: nothing went wrong there."""
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
    if _UNSAID.search(exit.message):
        return Cause.SILENT
    if exit.reason is ExitReason.WORKER_KILLED:
        return Cause.KILLED
    lost = code == COLLECTIVE_TIMEOUT or _LOST_PEER.search(exit.message)
    return Cause.LOST_PEER if lost else Cause.ERROR


def first_cause(exits: Sequence[Exit]) -> Exit | None:
    """The record nearest to the origin, the first of equal ones; None: nothing went wrong anywhere."""
    found = [(cause, place, exit) for place, exit in enumerate(exits) if (cause := cause_of(exit)) is not None]
    return min(found, key=lambda item: item[:2])[2] if found else None


def nccl_gave_up(log: str) -> str | None:
    """Why NCCL ended a rank, as it does by SIGABRT where another one did not answer: the words of the rank's log, at most 300
    characters. None: it did not.
    """
    found = _NCCL_GAVE_UP.search(log)
    return found[0].strip()[:300] if found else None
