"""Exit record of an attempt, decided from what it left in the run directory.

Pure, except `recorded_exit`.

torchrun returns 1 for nearly every failure, whatever its workers returned. Success, a stop and a
permanent failure are therefore what the ranks wrote; torchrun's return code only separates a killed
torchrun from a failed rank where the ranks wrote nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ft_service.host import missing_package
from ft_service.host.disk import DISK_FULL
from ft_service.host.processes import CRASHES
from ft_service.rundir.attempt import Attempt, unreadable_exit
from ft_service.rundir.directory import UnreadableDocumentError
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason, Outcome, OutcomeKind, Result
from ft_service.rundir.failure_origin import COLLECTIVE_TIMEOUT, Cause, cause_of, first_cause
from ft_service.wording import counted

USER_CANCELLED = "user_cancelled"
"""Reason of a job that its user has cancelled."""
KILLED = "worker_killed"
"""`error.code` of a process that was ended from outside."""
CRASHED = "worker_crashed"
"""`error.code` of a process that a fault of its own has ended."""
OUT_OF_MEMORY = "out_of_memory"
"""`error.code` of a process that needed more memory than there is."""

Forced = Literal["cancelled", "stop_timeout", "sealed", "unreadable"]
"""Reason for which the supervisor killed the ranks."""

EXIT_CODE: dict[ExitReason, Literal[0, 64, 75]] = {
    ExitReason.SUCCEEDED: 0,
    ExitReason.STOPPED: 75,
    ExitReason.PERMANENT_ERROR: 64,
}
"""Exit reason → exit code of the supervisor; 1 for all others."""

_REASON_OF_CODE: dict[str | None, ExitReason] = {
    UnreadableDocumentError.code: ExitReason.UNREADABLE,
    DISK_FULL: ExitReason.DISK_FULL,
}
"""`error.code` of an outcome → exit reason."""

OWN_SHARE = 0.8
"""Part of the memory from which on an attempt was too large by itself when the memory ran out: two
such cannot be at once.
"""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s*")
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_RANK_NUMBERS = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)", re.MULTILINE)
_KILLED_RANK = re.compile(r"\(local_rank: (\d+)\)\s+exitcode\s*: (-9) \(pid: (\d+)\)")
_KILLED_BY_TORCHRUN = re.compile(r"Unable to shutdown process (\d+) via")
"""What torchrun says of a rank that has not ended by SIGTERM after another one had failed."""


@dataclass(frozen=True)
class Starved:
    """Memory of a host, or of its container, that had run out while an attempt ran there."""

    held: int
    """Most bytes that the attempt's processes held together."""
    limit: int
    """Bytes that there are."""

    def __str__(self) -> str:
        held, limit = (f"{size / 2**30:.1f}" for size in (self.held, self.limit))
        return f"The memory had run out: the job's processes held up to {held} of {limit} GiB."


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything known of an attempt when all its processes have ended."""

    outcome: Outcome | None
    result: Result | None
    returncode: int
    """torchrun's return code; negative: the signal that killed it."""
    nodes: int = 1
    node: int = 0
    """Number of the node that collected this."""
    forced: Forced | None = None
    unreadable: UnreadableDocumentError | None = None
    """Error of a document that the attempt needs, or that would say how it ended."""
    room: str | None = None
    """Sentence for the user that the disk is full; None: it is not, or the attempt did not end
    because of it.
    """
    failed_rank: FailedRank | None = None
    log_tail: str = ""
    """Last lines of the failed rank's stderr, or of torchrun's output."""
    starved: Starved | None = None
    """None: the kernel has killed no process for want of memory meanwhile."""
    nccl_gave_up: str | None = None
    """NCCL's message if it aborted the failed rank; None: it did not."""


@dataclass(frozen=True)
class FailedRank:
    """Rank that failed first, as torchrun reports it."""

    rank: int
    """Number among all ranks of the attempt."""
    exitcode: int
    """Exit code; negative: the signal that killed it."""
    local: int = 0
    """Number among the ranks of its node, which names its log folder."""


def find_failed_rank(torchrun_log: str, first_rank: int = 0) -> FailedRank | None:
    """Return the first failed rank that torchrun's output names, one that was killed before those
    that lost it; None: it names none.

    `first_rank`: number of the node's first rank, used where torchrun did not print the rank's
    global number. torchrun numbers nodes in the order in which they meet, so its own number comes
    first.
    """
    match = _FAILED_RANK.search(torchrun_log)
    if match is None:
        return None
    own = set(_KILLED_BY_TORCHRUN.findall(torchrun_log))
    killed = next(
        (found for found in _KILLED_RANK.finditer(torchrun_log) if found[3] not in own), None
    )
    exitcode, local = (
        (int(match[1]), int(match[2])) if killed is None else (int(killed[2]), int(killed[1]))
    )
    numbers = {int(match[2]): int(match[1]) for match in _RANK_NUMBERS.finditer(torchrun_log)}
    return FailedRank(rank=numbers.get(local, first_rank + local), exitcode=exitcode, local=local)


def exit_of(reason: ExitReason, message: str, error: ErrorInfo | None = None) -> Exit:
    """Return an exit record with the code of its reason."""
    return Exit(code=EXIT_CODE.get(reason, 1), reason=reason, message=message, error=error)


def succeeded_exit(result: Result) -> Exit:
    """Return the exit record of an attempt that left a result."""
    return exit_of(
        ExitReason.SUCCEEDED, f"Training has finished after {counted(result.steps, 'step')}."
    )


def killed_exit(reason: str) -> Exit:
    """Return the exit record of an attempt that the service has killed. `reason`: the job's
    (`Reason` in ft_service/jobs/reasons.py)."""
    if reason == USER_CANCELLED:
        return exit_of(ExitReason.CANCELLED, "The attempt was cancelled.")
    of_its_own = (ExitReason.STALLED, ExitReason.STOP_TIMEOUT, ExitReason.LAUNCH_FAILED)
    same = next((own for own in of_its_own if own == reason), ExitReason.WORKER_KILLED)
    return exit_of(same, f"The service ended the attempt ({reason}).")


def decide_exit(seen: Evidence) -> Exit:
    """Return the attempt's exit record; with several nodes, this node's.

    A result means success even if the ranks were killed afterwards. Then come a cancellation, the
    ranks' agreement to stop, and of several failures the one that happened first
    (failure_origin.py).
    """
    if seen.result is not None:
        return succeeded_exit(seen.result)
    if seen.forced == "cancelled":
        return killed_exit(USER_CANCELLED)
    reported = _exit_by_outcome(seen.outcome) if seen.outcome is not None else None
    if reported is not None and reported.reason is ExitReason.STOPPED:
        return reported
    if seen.forced == "sealed":
        return reported or exit_of(
            ExitReason.WORKER_KILLED,
            "The attempt was already over; its last processes were killed.",
        )
    if seen.unreadable is not None:
        return unreadable_exit(seen.unreadable)
    exits = [reported] if reported is not None else []
    if seen.forced is not None:
        exits += [_exit_of_rank(seen, seen.failed_rank)] if seen.failed_rank is not None else []
        message = f"The ranks{_node(seen)} did not stop in time and were killed."
        exits.append(exit_of(ExitReason.STOP_TIMEOUT, message))
    elif reported is None or (seen.failed_rank is not None and seen.failed_rank.exitcode < 0):
        exits.append(_exit_unreported(seen))
    ended = first_cause(exits) or exits[0]
    return (
        without_room(ended, seen.room) if seen.room is not None and seen.outcome is None else ended
    )


def without_room(ended: Exit, room: str) -> Exit:
    """Return a DISK_FULL record in place of one that only says that a worker failed or was killed.

    `room`: sentence for the user.
    """
    if ended.reason not in (
        ExitReason.WORKER_ERROR,
        ExitReason.WORKER_KILLED,
        ExitReason.LAUNCH_FAILED,
    ):
        return ended
    traceback, rank = (ended.error.traceback, ended.error.rank) if ended.error else (None, None)
    return exit_of(
        ExitReason.DISK_FULL,
        room,
        ErrorInfo(code=DISK_FULL, message=room, traceback=traceback, rank=rank),
    )


@dataclass(frozen=True)
class AttemptRecords:
    """Documents that the nodes of an attempt have left about its end."""

    nodes: int
    """Number of nodes of the attempt."""
    exits: Mapping[int, Exit]
    """Node → its exit record; nodes without one are left out."""
    outcome: Outcome | None = None
    result: Result | None = None
    trained: bool = False
    """Whether rank 0 has written an event, so that all nodes had met."""

    @property
    def is_empty(self) -> bool:
        return not self.exits and self.outcome is None and self.result is None


def conclude(records: AttemptRecords) -> Exit:
    """Return the exit record of an attempt on several nodes.

    The order of causes is that of `decide_exit`. Of equal causes on two nodes, the node with the
    lower number counts: the clocks of two hosts are never compared.
    """
    if records.result is not None:
        return succeeded_exit(records.result)
    exits = [records.exits[index] for index in sorted(records.exits)]
    cancelled = next((exit for exit in exits if exit.reason is ExitReason.CANCELLED), None)
    if cancelled is not None:
        return cancelled
    reported = _exit_by_outcome(records.outcome) if records.outcome is not None else None
    if reported is not None and reported.reason is ExitReason.STOPPED:
        return reported
    missing = ", ".join(str(index) for index in range(records.nodes) if index not in records.exits)
    if reported is not None:
        exits = [reported, *exits]
    elif missing:
        exits.append(
            exit_of(
                ExitReason.WORKER_KILLED,
                f"Of {records.nodes} nodes these left no exit record: {missing}.",
            )
        )
    return first_cause(exits) or _worker_error("The ranks left without saying how training ended.")


def is_conclusive(ended: Exit, records: AttemptRecords) -> bool:
    """Return whether what `conclude` made of the records comes before any evidence of the cluster:
    the ranks agreed on it, or a rank raised an error of its own. Other errors often follow from a
    cause that ranks cannot see.
    """
    if ended.reason is ExitReason.STOPPED:
        return records.outcome is not None
    return ended.reason in (ExitReason.SUCCEEDED, ExitReason.CANCELLED) or cause_of(ended) in (
        Cause.REFUSED,
        Cause.ERROR,
    )


def recorded_exit(attempt: Attempt, judge: Callable[[AttemptRecords], Exit | None]) -> Exit | None:
    """Return how an attempt ended whose processes are gone: by its exit record, else by `judge`
    from what its nodes left.
    """
    try:
        start = attempt.read_start()
    except UnreadableDocumentError as error:
        return attempt.read_exit() or unreadable_exit(error)
    ended = attempt.read_exit()
    result = attempt.read_result()
    if start is None or (ended is not None and result is None):
        return ended
    exits = attempt.read_node_exits(start.nodes)
    trained = attempt.has_segment(0)
    return judge(AttemptRecords(start.nodes, exits, attempt.read_outcome(), result, trained))


def _exit_by_outcome(outcome: Outcome) -> Exit:
    if outcome.kind is OutcomeKind.STOPPED:
        where = (
            f"at checkpoint {outcome.checkpoint}"
            if outcome.checkpoint
            else "before the first checkpoint"
        )
        return exit_of(ExitReason.STOPPED, f"Training has stopped {where}.")
    if outcome.kind is OutcomeKind.SUCCEEDED:
        return _worker_error("The ranks said that training succeeded, but left no result.json.")
    message = outcome.error.message if outcome.error else "A rank failed and did not say why."
    code = outcome.error.code if outcome.error else None
    reason = (
        ExitReason.PERMANENT_ERROR
        if outcome.permanent
        else _REASON_OF_CODE.get(code, ExitReason.WORKER_ERROR)
    )
    return exit_of(reason, message, outcome.error)


def _node(seen: Evidence) -> str:
    return f" of node {seen.node}" if seen.nodes > 1 else ""


def _exit_unreported(seen: Evidence) -> Exit:
    """Return the exit record of an attempt whose ranks left no outcome."""
    if seen.returncode < 0:
        return _killed(seen, f"torchrun{_node(seen)}", -seen.returncode)
    if seen.failed_rank is not None:
        return _exit_of_rank(seen, seen.failed_rank)
    if (
        seen.returncode == 0 and seen.nodes > 1
    ):  # rank 0 writes the outcome, perhaps on another node
        return exit_of(ExitReason.SUCCEEDED, "The ranks of this node are done.")
    if seen.returncode == 0:
        return _worker_error("The ranks left without saying how training ended.", seen)
    return _exit_by_log(seen, f"A rank{_node(seen)}", None)


def _exit_of_rank(seen: Evidence, failed: FailedRank) -> Exit:
    who = f"Rank {failed.rank}" + (f" (node {seen.node})" if seen.nodes > 1 else "")
    if failed.exitcode >= 0:
        return _exit_by_log(seen, who, failed.rank)
    if failed.exitcode == -signal.SIGABRT and seen.nccl_gave_up is not None:
        name = signal_name(-failed.exitcode)
        message = (
            f"{who} waited for another rank in vain, and NCCL aborted it ({name}): "
            f"{seen.nccl_gave_up}"
        )
        error = ErrorInfo(
            code=COLLECTIVE_TIMEOUT, message=message, traceback=seen.log_tail, rank=failed.rank
        )
        return exit_of(ExitReason.WORKER_ERROR, message, error)
    return _killed(seen, who, -failed.exitcode, failed.rank)


def _killed(seen: Evidence, who: str, number: int, rank: int | None = None) -> Exit:
    """Return the exit record of an attempt of which a process was ended by a signal: from outside,
    or because it crashed, or took all the memory that there is.
    """
    code = KILLED
    starved = seen.starved
    message = f"{who} was killed by {signal_name(number)}."
    if number in CRASHES:
        code = CRASHED
    elif number == signal.SIGKILL and starved is not None:
        message += f" {starved}"
        if starved.held >= OWN_SHARE * starved.limit:
            code = OUT_OF_MEMORY
            message += (
                " It needs fewer ranks on this host, or smaller micro-batches: `ft plan` "
                "shows what it takes."
            )
    return exit_of(
        ExitReason.WORKER_KILLED, message, ErrorInfo(code=code, message=message, rank=rank)
    )


def _exit_by_log(seen: Evidence, who: str, rank: int | None) -> Exit:
    """Return the exit record of a rank that failed and left only its log.

    `rank`: None: not known.
    """
    last = _last_line(seen.log_tail)
    missing = missing_package.failed_import(last)
    if missing is not None:
        error = ErrorInfo(
            code=missing_package.CODE, message=missing, traceback=seen.log_tail, rank=rank
        )
        return exit_of(ExitReason.PERMANENT_ERROR, missing, error)
    return _worker_error(f"{who} failed: {last}", seen)


def _worker_error(message: str, seen: Evidence | None = None) -> Exit:
    rank = seen.failed_rank.rank if seen and seen.failed_rank else None
    traceback = seen.log_tail or None if seen else None
    return exit_of(
        ExitReason.WORKER_ERROR,
        message,
        ErrorInfo(code="training_failed", message=message, traceback=traceback, rank=rank),
    )


def _last_line(text: str) -> str:
    lines = [line for raw in text.splitlines() if (line := _RANK_PREFIX.sub("", raw).strip())]
    return lines[-1][:300] if lines else "it printed nothing."


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
