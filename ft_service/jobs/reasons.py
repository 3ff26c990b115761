"""Reasons why a job is in its final state or its last attempt ended, and what each means to the
wire and to the user.
"""

from __future__ import annotations

from enum import StrEnum

from ft_service.rundir.attempt_outcome import CRASHED, KILLED, OUT_OF_MEMORY
from ft_service.rundir.attempt_outcome import USER_CANCELLED as BY_USER
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason


class Retry(StrEnum):
    """Whether a job gets another attempt."""

    NEVER = "never"
    UNCOUNTED = "uncounted"
    """Again as soon as slots are free: the attempt did not fail."""
    LATER = "later"
    """Again after a pause that grows, any number of times: the host, or its operator, lacks
    something for now.
    """
    LOST = "lost"
    """The same after processes that were killed from outside, or vanished: the host's doing, or
    that of others on it.
    """
    COUNTED = "counted"
    """Again while fewer than MAX_FAILURES attempts in a row ended without a new checkpoint."""


class Reason(StrEnum):
    """Why a job is in its final state, or why its last attempt ended."""

    retry: Retry
    code: str
    """`error.code` of a failed job, unless the worker gave a more precise one."""
    text: str
    """A sentence for the job's user."""

    def __new__(cls, value: str, retry: Retry, code: str, text: str) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.retry = retry
        reason.code = code
        reason.text = text
        return reason

    SUCCEEDED = "succeeded", Retry.NEVER, "none", "The job has succeeded."
    USER_CANCELLED = BY_USER, Retry.NEVER, "cancelled", "The job was cancelled."
    INVALID_FILE = (
        "invalid_file",
        Retry.NEVER,
        "invalid_training_file",
        "A data file cannot be used.",
    )
    PERMANENT_ERROR = "permanent_error", Retry.NEVER, "training_failed", "Training cannot continue."
    """The worker says that trying again cannot help."""
    WORKER_ERROR = (
        "worker_error",
        Retry.COUNTED,
        "training_failed",
        "Training stopped with an error.",
    )
    """A rank raised an error."""
    WORKER_KILLED = "worker_killed", Retry.LOST, KILLED, "A training process was killed."
    """COUNTED if its error says that the job did it itself (`retry_of`)."""
    SUPERVISOR_LOST = (
        "supervisor_lost",
        Retry.LOST,
        "worker_lost",
        "The training processes vanished; the host may have restarted.",
    )
    """The supervisor vanished without an exit record."""
    HOST_LOST = "host_lost", Retry.LOST, "worker_lost", "A host that the job ran on was lost."
    STALLED = (
        "stalled",
        Retry.COUNTED,
        "worker_stalled",
        "Training reported nothing for too long and was stopped.",
    )
    STOP_TIMEOUT = (
        "stop_timeout",
        Retry.LOST,
        "worker_stalled",
        "Training did not stop when asked and was killed.",
    )
    PREEMPTED = (
        "preempted",
        Retry.UNCOUNTED,
        "preempted",
        "The job made room for one of higher priority, at a checkpoint.",
    )
    TIME_LIMIT = (
        "time_limit",
        Retry.NEVER,
        "time_limit",
        "The job has used the time that it may take (max_seconds). Its checkpoints stay.",
    )
    SWEEP_STOPPED = (
        "sweep_stopped",
        Retry.NEVER,
        "sweep_stopped",
        "The job was stopped by its sweep. Its checkpoints stay.",
    )
    LAUNCH_FAILED = (
        "launch_failed",
        Retry.LATER,
        "launch_failed",
        "The training processes could not be started.",
    )
    DISK_FULL = "disk_full", Retry.LATER, "disk_full", "Training found no room on the disk."
    ENGINE_LOST = (
        "engine_lost",
        Retry.LOST,
        "worker_lost",
        "The engine that trained the job beside others was killed or failed.",
    )
    """No failure of this job: which of its jobs ended the engine is not known."""
    IDLE = (
        "idle",
        Retry.UNCOUNTED,
        "idle",
        "The job's client, which runs the training loop, has sent nothing for a while. It "
        "continues with the next command.",
    )
    """The service has paused it."""
    MAINTENANCE = (
        "maintenance",
        Retry.UNCOUNTED,
        "maintenance",
        "The operator pauses all jobs for a while. The job continues from its checkpoint afterwards.",
    )
    COST_LIMIT = (
        "cost_limit",
        Retry.UNCOUNTED,
        "cost_limit",
        "The job has cost as much as it may, and is paused at a checkpoint.",
    )
    """The service has paused it; whoever resumes it raises the limit."""
    UNREADABLE = (
        "unreadable",
        Retry.COUNTED,
        "worker_lost",
        "What the training processes left cannot be read, and the attempt is lost.",
    )
    """A document of the attempt cannot be read."""


OF_PAUSES = frozenset({Reason.IDLE, Reason.MAINTENANCE, Reason.COST_LIMIT})
"""Reasons for which the service itself pauses a job, until its user asks for something else."""
USERS = frozenset({Reason.INVALID_FILE, Reason.PERMANENT_ERROR, Reason.TIME_LIMIT})
"""Reasons of failed jobs that their users mend, not the operator: the alerts keep them apart."""
_BY_ITSELF = frozenset({CRASHED, OUT_OF_MEMORY, "deadline_exceeded", "evicted"})
"""`error.code` of a killed attempt that would end in the same way again: it crashed, or used more
than its host or its place gives one job.
"""


def retry_of(reason: Reason, error: ErrorInfo | None) -> Retry:
    """Whether a job gets another attempt after one that ended so."""
    by_itself = reason is Reason.WORKER_KILLED and error is not None and error.code in _BY_ITSELF
    return Retry.COUNTED if by_itself else reason.retry


def may_fail(reason: Reason) -> bool:
    """Whether a job can fail for this reason."""
    return reason.retry in (Retry.NEVER, Retry.COUNTED) or reason is Reason.WORKER_KILLED


def failure_text(reason: Reason, error: ErrorInfo | None) -> str:
    return f"{reason.text} {error.message}" if error else reason.text


def reason_of(exit: Exit | None) -> Reason | None:
    """The reason that an exit record means; None: the attempt ended on request, which is not a
    failure.
    """
    if exit is None:
        return Reason.SUPERVISOR_LOST
    return (
        None
        if exit.reason in (ExitReason.STOPPED, ExitReason.CANCELLED)
        else Reason(exit.reason.value)
    )
