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

from ft_service import packages
from ft_service.job import Reason
from ft_service.rundir import ErrorInfo, Exit, Outcome, Result

Forced = Literal["cancelled", "stop_timeout"]
"""Why the supervisor killed the ranks."""

EXIT_CODE: dict[str, Literal[0, 1, 64, 75]] = {
    "succeeded": 0,
    "stopped": 75,
    "cancelled": 1,
    "permanent_error": 64,
    "worker_error": 1,
    "worker_killed": 1,
    "stop_timeout": 1,
    "stalled": 1,
}
"""Exit reason → exit code of the supervisor."""

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s*")
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of an attempt when none of its processes lives."""

    outcome: Outcome | None
    result: Result | None
    returncode: int
    """torchrun's; negative: the signal that killed it."""
    nodes: int = 1
    forced: Forced | None = None
    failed_rank: FailedRank | None = None
    log_tail: str = ""
    """Last lines of the guilty rank's errors, or of torchrun's."""


@dataclass(frozen=True)
class FailedRank:
    """The rank that torchrun saw fail first."""

    rank: int
    exitcode: int
    """Negative: the signal that killed it."""


def find_failed_rank(torchrun_log: str) -> FailedRank | None:
    """The first failed rank in torchrun's own output, if it names one."""
    match = _FAILED_RANK.search(torchrun_log)
    return FailedRank(rank=int(match[2]), exitcode=int(match[1])) if match else None


def exit_of(reason: str, message: str, error: ErrorInfo | None = None) -> Exit:
    """An exit record with the code that belongs to its reason."""
    return Exit.model_validate({"code": EXIT_CODE[reason], "reason": reason, "message": message, "error": error})


def killed_exit(reason: Reason) -> Exit:
    """The exit record of an attempt that the service has ended."""
    if reason is Reason.USER_CANCELLED:
        return exit_of("cancelled", "The attempt was cancelled.")
    word = reason.value if reason in (Reason.STALLED, Reason.STOP_TIMEOUT) else "worker_killed"
    return exit_of(word, f"The service ended the attempt ({reason.value}).")


def decide_exit(seen: Evidence) -> Exit:
    """The attempt's exit record.

    The ranks' word comes first: a result means success even if they were killed afterwards. Without a word of theirs it is what
    the supervisor did to them, and then what torchrun saw.
    """
    if seen.result is not None:
        return exit_of("succeeded", f"Training has finished after {seen.result.steps} steps.")
    if seen.forced == "cancelled":
        return exit_of("cancelled", "The attempt was cancelled.")
    if seen.outcome is not None:
        return _exit_by_outcome(seen.outcome)
    if seen.forced == "stop_timeout":
        return exit_of("stop_timeout", "The ranks did not stop in time and were killed.")
    return _exit_unspoken(seen)


def conclude(nodes: int, exits: Mapping[int, Exit], outcome: Outcome | None, result: Result | None) -> Exit:
    """The exit record of an attempt on several nodes. `exits`: node → its record; one that left none is not in it.

    As for one node: the ranks' word first, then what the supervisors did, then what torchrun saw. Of what torchrun saw a killed
    rank is the cause, and errors of the ranks that lost it are not.
    """
    found = [exits[index] for index in sorted(exits)]
    if result is not None:
        return exit_of("succeeded", f"Training has finished after {result.steps} steps.")
    cancelled = next((exit for exit in found if exit.reason == "cancelled"), None)
    if cancelled is not None:
        return cancelled
    if outcome is not None:
        return _exit_by_outcome(outcome)
    for reason in ("permanent_error", "stopped", "stop_timeout", "worker_killed", "worker_error"):
        for exit in found:
            if exit.reason == reason:
                return exit
    silent = [str(index) for index in range(nodes) if index not in exits]
    if silent:
        return exit_of("worker_killed", f"Of {nodes} nodes these left no exit record: {', '.join(silent)}.")
    return _worker_error("The ranks left without saying how training ended.")


def _exit_by_outcome(outcome: Outcome) -> Exit:
    if outcome.kind == "stopped":
        where = f"at checkpoint {outcome.checkpoint}" if outcome.checkpoint else "before the first checkpoint"
        return exit_of("stopped", f"Training has stopped {where}.")
    if outcome.kind == "succeeded":
        return _worker_error("The ranks said that training succeeded, but left no result.json.")
    message = outcome.error.message if outcome.error else "A rank failed and did not say why."
    return exit_of("permanent_error" if outcome.permanent else "worker_error", message, outcome.error)


def _exit_unspoken(seen: Evidence) -> Exit:
    rank = seen.failed_rank
    if seen.returncode < 0:
        return exit_of("worker_killed", f"torchrun was killed by {_signal_name(-seen.returncode)}.")
    if rank is not None and rank.exitcode < 0:
        message = f"Rank {rank.rank} was killed by {_signal_name(-rank.exitcode)}."
        return exit_of("worker_killed", message, ErrorInfo(code="worker_killed", message=message, rank=rank.rank))
    if seen.returncode == 0 and seen.nodes > 1:  # the word is that of rank 0, whose node may be another
        return exit_of("succeeded", "The ranks of this node are done.")
    if seen.returncode == 0:
        return _worker_error("The ranks left without saying how training ended.", seen)
    last = _last_line(seen.log_tail)
    missing = packages.failed_import(last)
    if missing is not None:
        where = rank.rank if rank else None
        error = ErrorInfo(code=packages.CODE, message=missing, traceback=seen.log_tail, rank=where)
        return exit_of("permanent_error", missing, error)
    who = f"Rank {rank.rank}" if rank else "A rank"
    return _worker_error(f"{who} failed: {last}", seen)


def _worker_error(message: str, seen: Evidence | None = None) -> Exit:
    rank = seen.failed_rank.rank if seen and seen.failed_rank else None
    traceback = seen.log_tail or None if seen else None
    return exit_of("worker_error", message, ErrorInfo(code="training_failed", message=message, traceback=traceback, rank=rank))


def _last_line(text: str) -> str:
    lines = [line for raw in text.splitlines() if (line := _RANK_PREFIX.sub("", raw).strip())]
    return lines[-1][:300] if lines else "it printed nothing."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
