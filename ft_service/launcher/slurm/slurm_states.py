"""Slurm's states of a batch job, and what they mean for an attempt. Pure."""

from __future__ import annotations

from typing import Literal

from ft_service.rundir.attempt_outcome import AttemptRecords, conclude, exit_of, is_conclusive
from ft_service.rundir.documents import Control, Desired, ErrorInfo, Exit, ExitReason

Standing = Literal["waiting", "alive", "over", "unknown"]

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_HELD_STILL = ("SUSPENDED", "STOPPED")
_ALIVE = (
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    *_HELD_STILL,
    "SIGNALING",
    "RESIZING",
    "STAGE_OUT",
    "POWER_UP_NODE",
)
REQUEUED = "REQUEUED"
"""State to judge an attempt by whose batch job Slurm would run a second time."""
_TAKEN = {
    "CANCELLED": "The attempt's batch job was cancelled in Slurm.",
    "PREEMPTED": "Slurm has preempted the attempt's batch job for one with a higher priority.",
    "REVOKED": "Another cluster of the federation runs the attempt's batch job.",
}
_PUT_BACK = {
    REQUEUED: "The attempt's batch job was put back into Slurm's queue; the service makes a new "
    "one."
}
_STOPS = _TAKEN | _PUT_BACK
_HOST_LOST = {
    "NODE_FAIL": "A node of the attempt has failed.",
    "BOOT_FAIL": "A node of the attempt did not boot.",
    "LAUNCH_FAILED": "Slurm could not start the batch job on its nodes.",
    "RECONFIG_FAIL": "A node of the attempt could not be configured.",
}
_KILLED = {
    "TIMEOUT": (
        "deadline_exceeded",
        "The attempt reached Slurm's time limit before it had stopped at a checkpoint.",
    ),
    "DEADLINE": ("deadline_exceeded", "The attempt's batch job reached its deadline in Slurm."),
    "OUT_OF_MEMORY": (
        "out_of_memory",
        "The attempt used more memory than Slurm gives it: raise its memory in the Slurm "
        "profile, or make the job "
        "smaller.",
    ),
}
_OVER = ("COMPLETED", "FAILED", *_TAKEN, *_HOST_LOST, *_KILLED)
_LASTING = (
    *(
        "BadConstraints",
        "JobHeldAdmin",
        "JobHeldUser",
        "DependencyNeverSatisfied",
        "Invalid",
        "NodeDown",
        "PartitionDown",
    ),
    *(
        "PartitionInactive",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "AccountNotAllowed",
        "QOSNotAllowed",
    ),
)
"""Slurm's reasons for a wait that only an operator can end, or their beginnings."""
_TOO_LARGE = "PerJob"
"""Part of Slurm's reasons for a wait of a job that is larger than one job may be, such as
`QOSMaxCpuPerJobLimit`.
"""


def standing(state: str) -> Standing:
    """Return what a batch job's state says about its processes; "unknown": a state that this
    version does not know.
    """
    if state in _WAITING:
        return "waiting"
    if state in _ALIVE:
        return "alive"
    return "over" if state in _OVER else "unknown"


def waiting_text(reason: str) -> str:
    """Return the reason for a wait, for the job's user."""
    return (
        "The attempt waits in Slurm's queue."
        if reason in ("", "None")
        else f"The attempt waits in Slurm's queue: {reason}."
    )


def is_lasting(reason: str) -> bool:
    """Return whether only an operator can end the wait."""
    return reason.startswith(_LASTING) or _TOO_LARGE in reason


def is_held_still(state: str) -> bool:
    """Return whether Slurm has stopped the batch job's processes, which it will let go on."""
    return state in _HELD_STILL


def judge_exit(state: str | None, records: AttemptRecords) -> Exit | None:
    """Return the exit record of an attempt whose batch job is over; None: there is no evidence.

    `state`: None: unknown.

    What `is_conclusive` comes first; then causes that ranks cannot see; then errors of ranks that
    only lost their peers or could not stop.
    """
    reported = None if records.is_empty else conclude(records)
    if reported is not None and is_conclusive(reported, records):
        return reported
    if state in _KILLED:
        code, message = _KILLED[state]
        return exit_of(ExitReason.WORKER_KILLED, message, ErrorInfo(code=code, message=message))
    if state in _HOST_LOST:
        return exit_of(
            ExitReason.HOST_LOST,
            _HOST_LOST[state],
            ErrorInfo(code="worker_lost", message=_HOST_LOST[state]),
        )
    if state in _STOPS:
        return exit_of(ExitReason.STOPPED, _STOPS[state])
    return reported


def with_cause(state: str | None, ended: Exit, asked: Control | None) -> Exit:
    """Return the exit record of an attempt that stopped at a checkpoint with what Slurm did to its
    batch job, if that is why: ranks see only that they are to stop.

    `state`: as `judge_exit`. `asked`: the last request to the attempt; None: none. What the service
    itself asked to stop is not Slurm's doing.
    """
    why = (_STOPS | _HOST_LOST).get(state or "")
    by_service = asked is not None and asked.desired is not Desired.RUN
    if ended.reason is not ExitReason.STOPPED or why is None or by_service or why in ended.message:
        return ended
    return ended.model_copy(update={"message": f"{why} {ended.message}"})
