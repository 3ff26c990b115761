"""Why a job is in its final state, or why its last attempt ended, and what each reason means to the wire and to the user."""

from __future__ import annotations

from enum import StrEnum

from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason


class Reason(StrEnum):
    """Why a job is in its final state, or why its last attempt ended."""

    SUCCEEDED = "succeeded"
    USER_CANCELLED = "user_cancelled"
    INVALID_FILE = "invalid_file"
    """A data file's contents cannot be trained on."""
    PERMANENT_ERROR = "permanent_error"
    """The worker says that trying again cannot help."""
    WORKER_ERROR = "worker_error"
    """A rank raised an error."""
    WORKER_KILLED = "worker_killed"
    """A rank or torchrun was killed from outside (out of memory, by hand)."""
    SUPERVISOR_LOST = "supervisor_lost"
    """The supervisor vanished without an exit record (killed, or the host restarted)."""
    HOST_LOST = "host_lost"
    """A host that it ran on does not answer any more."""
    STALLED = "stalled"
    """The attempt lived, and said nothing for longer than allowed."""
    STOP_TIMEOUT = "stop_timeout"
    """The attempt was asked to stop and had to be killed."""
    PREEMPTED = "preempted"
    """It made room for a job of higher priority."""
    TIME_LIMIT = "time_limit"
    """It held its slots for as long as it may (`max_seconds`)."""
    SWEEP_STOPPED = "sweep_stopped"
    """Its sweep found it hopeless."""
    LAUNCH_FAILED = "launch_failed"
    """The launcher could not start the attempt."""
    DISK_FULL = "disk_full"
    """The attempt found no room on the disk."""
    UNREADABLE = "unreadable"
    """A document of the attempt cannot be read."""


class Retry(StrEnum):
    NEVER = "never"
    UNCOUNTED = "uncounted"
    """Again, as soon as there is room: it was no failure."""
    LATER = "later"
    """Again after a rest, however often: the host lacks something for now, and neither the job nor training is at fault."""
    COUNTED = "counted"
    """Again, as long as fewer than MAX_FAILURES attempts in a row ended without a new checkpoint."""


RETRY: dict[Reason, Retry] = {
    Reason.SUCCEEDED: Retry.NEVER,
    Reason.USER_CANCELLED: Retry.NEVER,
    Reason.INVALID_FILE: Retry.NEVER,
    Reason.PERMANENT_ERROR: Retry.NEVER,
    Reason.WORKER_ERROR: Retry.COUNTED,
    Reason.WORKER_KILLED: Retry.COUNTED,
    Reason.SUPERVISOR_LOST: Retry.COUNTED,
    Reason.HOST_LOST: Retry.COUNTED,
    Reason.STALLED: Retry.COUNTED,
    Reason.STOP_TIMEOUT: Retry.COUNTED,
    Reason.PREEMPTED: Retry.UNCOUNTED,
    Reason.TIME_LIMIT: Retry.NEVER,
    Reason.SWEEP_STOPPED: Retry.NEVER,
    Reason.LAUNCH_FAILED: Retry.COUNTED,
    Reason.DISK_FULL: Retry.LATER,
    Reason.UNREADABLE: Retry.COUNTED,
}

ERROR_CODE: dict[Reason, str] = {
    Reason.SUCCEEDED: "none",
    Reason.USER_CANCELLED: "cancelled",
    Reason.INVALID_FILE: "invalid_training_file",
    Reason.PERMANENT_ERROR: "training_failed",
    Reason.WORKER_ERROR: "training_failed",
    Reason.WORKER_KILLED: "worker_killed",
    Reason.SUPERVISOR_LOST: "worker_lost",
    Reason.HOST_LOST: "worker_lost",
    Reason.STALLED: "worker_stalled",
    Reason.STOP_TIMEOUT: "worker_stalled",
    Reason.PREEMPTED: "preempted",
    Reason.TIME_LIMIT: "time_limit",
    Reason.SWEEP_STOPPED: "sweep_stopped",
    Reason.LAUNCH_FAILED: "launch_failed",
    Reason.DISK_FULL: "disk_full",
    Reason.UNREADABLE: "worker_lost",
}
"""`error.code` of a failed job, unless the worker gave a more precise one."""

USER_TEXT: dict[Reason, str] = {
    Reason.SUCCEEDED: "The job has succeeded.",
    Reason.USER_CANCELLED: "The job was cancelled.",
    Reason.INVALID_FILE: "A data file cannot be used.",
    Reason.PERMANENT_ERROR: "Training cannot go on.",
    Reason.WORKER_ERROR: "Training stopped with an error.",
    Reason.WORKER_KILLED: "A training process was killed from outside; often the host ran out of memory.",
    Reason.SUPERVISOR_LOST: "The training processes vanished; the host may have restarted.",
    Reason.HOST_LOST: "A host that the job ran on was lost.",
    Reason.STALLED: "Training reported nothing for too long and was stopped.",
    Reason.STOP_TIMEOUT: "Training did not stop when asked and was killed.",
    Reason.PREEMPTED: "The job made room for one of higher priority, at a checkpoint.",
    Reason.TIME_LIMIT: "The job has used the time that it may take (max_seconds). Its checkpoints stay.",
    Reason.SWEEP_STOPPED: "The job was stopped by its sweep. Its checkpoints stay.",
    Reason.LAUNCH_FAILED: "The training processes could not be started.",
    Reason.DISK_FULL: "Training found no room on the disk.",
    Reason.UNREADABLE: "What the training processes left cannot be read, and the attempt is lost.",
}


def failure_text(reason: Reason, error: ErrorInfo | None) -> str:
    return f"{USER_TEXT[reason]} {error.message}" if error else USER_TEXT[reason]


_REASON: dict[ExitReason, Reason | None] = {
    ExitReason.SUCCEEDED: Reason.SUCCEEDED,
    ExitReason.STOPPED: None,
    ExitReason.CANCELLED: None,
    ExitReason.PERMANENT_ERROR: Reason.PERMANENT_ERROR,
    ExitReason.WORKER_ERROR: Reason.WORKER_ERROR,
    ExitReason.WORKER_KILLED: Reason.WORKER_KILLED,
    ExitReason.STOP_TIMEOUT: Reason.STOP_TIMEOUT,
    ExitReason.STALLED: Reason.STALLED,
    ExitReason.HOST_LOST: Reason.HOST_LOST,
    ExitReason.DISK_FULL: Reason.DISK_FULL,
    ExitReason.UNREADABLE: Reason.UNREADABLE,
}


def reason_of(exit: Exit | None) -> Reason | None:
    """An exit record as a reason; None: ended because somebody asked for it, which is no failure."""
    if exit is None:
        return Reason.SUPERVISOR_LOST
    return _REASON[exit.reason]
