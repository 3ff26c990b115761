"""How an attempt ended: decided from what it left in the run directory, never from torchrun's return code alone. Pure.

torchrun returns 1 for nearly everything, whatever its workers returned, so success, a stop and a permanent failure are what the
ranks wrote down; its return code only tells a killed torchrun from a failed rank where they wrote nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ft_service.host import missing_package
from ft_service.host.disk import DISK_FULL
from ft_service.jobs.reasons import Reason
from ft_service.rundir.attempt import unreadable_exit
from ft_service.rundir.causes import COLLECTIVE_TIMEOUT, first_cause
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason, Outcome, OutcomeKind, Result

Forced = Literal["cancelled", "stop_timeout", "sealed", "unreadable"]
"""Why the supervisor killed the ranks."""

EXIT_CODE: dict[ExitReason, Literal[0, 1, 64, 75]] = {
    ExitReason.SUCCEEDED: 0,
    ExitReason.STOPPED: 75,
    ExitReason.CANCELLED: 1,
    ExitReason.PERMANENT_ERROR: 64,
    ExitReason.WORKER_ERROR: 1,
    ExitReason.WORKER_KILLED: 1,
    ExitReason.STOP_TIMEOUT: 1,
    ExitReason.STALLED: 1,
    ExitReason.HOST_LOST: 1,
    ExitReason.DISK_FULL: 1,
    ExitReason.UNREADABLE: 1,
}
"""Exit reason → exit code of the supervisor."""

_REASON_OF_CODE: dict[str | None, ExitReason] = {
    UnreadableDocumentError.code: ExitReason.UNREADABLE,
    DISK_FULL: ExitReason.DISK_FULL,
}
"""`error.code` of an outcome → reason."""

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s*")
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_RANK_NUMBERS = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of an attempt when none of its processes lives."""

    outcome: Outcome | None
    result: Result | None
    returncode: int
    """torchrun's; negative: the signal that killed it."""
    nodes: int = 1
    node: int = 0
    """Number of the node that this is known on."""
    forced: Forced | None = None
    unreadable: UnreadableDocumentError | None = None
    """A document without which the attempt could not go on, or of which nobody knows how it ended."""
    room: str | None = None
    """That the disk has no room, in words for the user; None: it has, or the attempt did not end for want of it."""
    failed_rank: FailedRank | None = None
    log_tail: str = ""
    """Last lines of the guilty rank's errors, or of torchrun's."""
    nccl_gave_up: str | None = None
    """Why NCCL ended the failed rank, in its words. None: it did not."""


@dataclass(frozen=True)
class FailedRank:
    """The rank that torchrun saw fail first."""

    rank: int
    """Among all ranks of the attempt."""
    exitcode: int
    """Negative: the signal that killed it."""
    local: int = 0
    """Among the ranks of its node: the name of its log."""


def find_failed_rank(torchrun_log: str, first_rank: int = 0) -> FailedRank | None:
    """The first failed rank in torchrun's own output, if it names one.

    `first_rank`: of the node, where torchrun did not come to say the rank's number among all: it gives out the numbers of nodes
    as they meet, so that it knows better than we do.
    """
    match = _FAILED_RANK.search(torchrun_log)
    if match is None:
        return None
    local = int(match[2])
    numbers = {int(found[2]): int(found[1]) for found in _RANK_NUMBERS.finditer(torchrun_log)}
    return FailedRank(rank=numbers.get(local, first_rank + local), exitcode=int(match[1]), local=local)


def exit_of(reason: ExitReason, message: str, error: ErrorInfo | None = None) -> Exit:
    """An exit record with the code that belongs to its reason."""
    return Exit(code=EXIT_CODE[reason], reason=reason, message=message, error=error)


def killed_exit(reason: Reason) -> Exit:
    """The exit record of an attempt that the service has ended."""
    if reason is Reason.USER_CANCELLED:
        return exit_of(ExitReason.CANCELLED, "The attempt was cancelled.")
    said = {Reason.STALLED: ExitReason.STALLED, Reason.STOP_TIMEOUT: ExitReason.STOP_TIMEOUT}
    return exit_of(said.get(reason, ExitReason.WORKER_KILLED), f"The service ended the attempt ({reason.value}).")


def decide_exit(seen: Evidence) -> Exit:
    """The attempt's exit record; of several nodes: this one's.

    A result means success even if the ranks were killed afterwards. Then come the wish to cancel, the ranks' agreement to stop,
    and of all that went wrong what was first (causes.py).
    """
    if seen.result is not None:
        return exit_of(ExitReason.SUCCEEDED, f"Training has finished after {seen.result.steps} steps.")
    if seen.forced == "cancelled":
        return exit_of(ExitReason.CANCELLED, "The attempt was cancelled.")
    said = _exit_by_outcome(seen.outcome) if seen.outcome is not None else None
    if said is not None and said.reason is ExitReason.STOPPED:
        return said
    if seen.forced == "sealed":
        return said or exit_of(ExitReason.WORKER_KILLED, "The attempt was over already, and what was left of it was ended.")
    if seen.unreadable is not None:
        return unreadable_exit(seen.unreadable)
    found = [said] if said is not None else []
    if seen.forced is not None:
        found += [_exit_of_rank(seen, seen.failed_rank)] if seen.failed_rank is not None else []
        found.append(_exit_unstopped(seen))
    elif said is None or (seen.failed_rank is not None and seen.failed_rank.exitcode < 0):
        found.append(_exit_unspoken(seen))
    ended = first_cause(found) or found[0]
    return without_room(ended, seen.room) if seen.room is not None and seen.outcome is None else ended


def without_room(ended: Exit, room: str) -> Exit:
    """The record of an attempt that found no room on the disk, if it does not say something else that is as good a cause.
    `room`: the sentence for the user."""
    if ended.reason not in (ExitReason.WORKER_ERROR, ExitReason.WORKER_KILLED):
        return ended
    traceback, rank = (ended.error.traceback, ended.error.rank) if ended.error else (None, None)
    return exit_of(ExitReason.DISK_FULL, room, ErrorInfo(code=DISK_FULL, message=room, traceback=traceback, rank=rank))


def conclude(nodes: int, exits: Mapping[int, Exit], outcome: Outcome | None, result: Result | None) -> Exit:
    """The exit record of an attempt on several nodes. `exits`: node → its record; one that left none is not in it.

    As for one node. Where two nodes tell of equal causes, it is the one with the lower number: clocks of two hosts are never
    compared.
    """
    if result is not None:
        return exit_of(ExitReason.SUCCEEDED, f"Training has finished after {result.steps} steps.")
    found = [exits[index] for index in sorted(exits)]
    cancelled = next((exit for exit in found if exit.reason is ExitReason.CANCELLED), None)
    if cancelled is not None:
        return cancelled
    said = _exit_by_outcome(outcome) if outcome is not None else None
    if said is not None and said.reason is ExitReason.STOPPED:
        return said
    silent = [str(index) for index in range(nodes) if index not in exits]
    if said is not None:
        found = [said, *found]
    elif silent:
        found.append(exit_of(ExitReason.WORKER_KILLED, f"Of {nodes} nodes these left no exit record: {', '.join(silent)}."))
    return first_cause(found) or _worker_error("The ranks left without saying how training ended.")


def _exit_by_outcome(outcome: Outcome) -> Exit:
    if outcome.kind is OutcomeKind.STOPPED:
        where = f"at checkpoint {outcome.checkpoint}" if outcome.checkpoint else "before the first checkpoint"
        return exit_of(ExitReason.STOPPED, f"Training has stopped {where}.")
    if outcome.kind is OutcomeKind.SUCCEEDED:
        return _worker_error("The ranks said that training succeeded, but left no result.json.")
    message = outcome.error.message if outcome.error else "A rank failed and did not say why."
    code = outcome.error.code if outcome.error else None
    reason = ExitReason.PERMANENT_ERROR if outcome.permanent else _REASON_OF_CODE.get(code, ExitReason.WORKER_ERROR)
    return exit_of(reason, message, outcome.error)


def _exit_unstopped(seen: Evidence) -> Exit:
    where = f" of node {seen.node}" if seen.nodes > 1 else ""
    return exit_of(ExitReason.STOP_TIMEOUT, f"The ranks{where} did not stop in time and were killed.")


def _exit_unspoken(seen: Evidence) -> Exit:
    if seen.returncode < 0:
        where = f" of node {seen.node}" if seen.nodes > 1 else ""
        return exit_of(ExitReason.WORKER_KILLED, f"torchrun{where} was killed by {_signal_name(-seen.returncode)}.")
    if seen.failed_rank is not None:
        return _exit_of_rank(seen, seen.failed_rank)
    if seen.returncode == 0 and seen.nodes > 1:  # the word is that of rank 0, whose node may be another
        return exit_of(ExitReason.SUCCEEDED, "The ranks of this node are done.")
    if seen.returncode == 0:
        return _worker_error("The ranks left without saying how training ended.", seen)
    where = f" of node {seen.node}" if seen.nodes > 1 else ""
    return _exit_by_log(seen, f"A rank{where}", None)


def _exit_of_rank(seen: Evidence, failed: FailedRank) -> Exit:
    who = f"Rank {failed.rank}" + (f" (node {seen.node})" if seen.nodes > 1 else "")
    if failed.exitcode >= 0:
        return _exit_by_log(seen, who, failed.rank)
    name = _signal_name(-failed.exitcode)
    if failed.exitcode == -signal.SIGABRT and seen.nccl_gave_up is not None:
        message = f"{who} waited for another rank in vain, and NCCL ended it by {name}: {seen.nccl_gave_up}"
        error = ErrorInfo(code=COLLECTIVE_TIMEOUT, message=message, traceback=seen.log_tail, rank=failed.rank)
        return exit_of(ExitReason.WORKER_ERROR, message, error)
    message = f"{who} was killed by {name}."
    return exit_of(ExitReason.WORKER_KILLED, message, ErrorInfo(code="worker_killed", message=message, rank=failed.rank))


def _exit_by_log(seen: Evidence, who: str, rank: int | None) -> Exit:
    """Of a rank that raised an error and did not come to say it. `rank`: None: nobody knows which."""
    last = _last_line(seen.log_tail)
    missing = missing_package.failed_import(last)
    if missing is not None:
        error = ErrorInfo(code=missing_package.CODE, message=missing, traceback=seen.log_tail, rank=rank)
        return exit_of(ExitReason.PERMANENT_ERROR, missing, error)
    return _worker_error(f"{who} failed: {last}", seen)


def _worker_error(message: str, seen: Evidence | None = None) -> Exit:
    rank = seen.failed_rank.rank if seen and seen.failed_rank else None
    traceback = seen.log_tail or None if seen else None
    return exit_of(
        ExitReason.WORKER_ERROR, message, ErrorInfo(code="training_failed", message=message, traceback=traceback, rank=rank)
    )


def _last_line(text: str) -> str:
    lines = [line for raw in text.splitlines() if (line := _RANK_PREFIX.sub("", raw).strip())]
    return lines[-1][:300] if lines else "it printed nothing."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
