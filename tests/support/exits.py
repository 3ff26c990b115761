"""How attempts end, by cause."""

from __future__ import annotations

from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason
from ft_service.rundir.failure_origin import Cause


def failed_by(text: str) -> Exit:
    return exit_of(
        ExitReason.WORKER_ERROR, text, ErrorInfo(code="training_failed", message=text, rank=0)
    )


BY_CAUSE = {
    Cause.REFUSED: exit_of(ExitReason.PERMANENT_ERROR, "no config.json"),
    Cause.ERROR: failed_by("Rank 1 (node 1) failed: ValueError: boom"),
    Cause.KILLED: exit_of(ExitReason.WORKER_KILLED, "Rank 1 (node 1) was killed by SIGKILL."),
    Cause.STOPPED: exit_of(ExitReason.STOPPED, "The attempt was stopped before it started."),
    Cause.LOST_PEER: failed_by(
        "Rank 0 (node 0) failed: RuntimeError: Connection closed by peer [10.0.0.1]:1"
    ),
    Cause.STOP_TIMEOUT: exit_of(
        ExitReason.STOP_TIMEOUT, "The ranks of node 0 did not stop in time and were killed."
    ),
    Cause.SILENT: failed_by("The ranks left without saying how training ended."),
}
