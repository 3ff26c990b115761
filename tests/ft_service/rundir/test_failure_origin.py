from __future__ import annotations

import pytest

from ft_service.rundir.attempt_outcome import (
    AttemptRecords,
    conclude,
    exit_of,
)
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason
from ft_service.rundir.failure_origin import Cause, cause_of, nccl_gave_up


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("[rank0]:[E x] [Rank 0] Watchdog caught collective operation timeout: Work(7)\nframe", "Watchdog caught collective"),
        ("  what():  [PG ID 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds", "ProcessGroupNCCL's watchdog got stuck"),
        ("NCCL error: remote process exited or there was a network error", "NCCL error: remote process exited"),
        ("Process group watchdog thread terminated with exception: CUDA error: an illegal memory access", None),
        ("", None),
    ],
)
def test_what_nccl_says_when_it_ends_a_rank(log: str, words: str | None) -> None:
    found = nccl_gave_up(log)
    assert found is None if words is None else (found or "").startswith(words)


def failed_by(text: str) -> Exit:
    return exit_of(ExitReason.WORKER_ERROR, text, ErrorInfo(code="training_failed", message=text, rank=0))


BY_CAUSE = {
    Cause.REFUSED: exit_of(ExitReason.PERMANENT_ERROR, "no config.json"),
    Cause.ERROR: failed_by("Rank 1 (node 1) failed: ValueError: boom"),
    Cause.KILLED: exit_of(ExitReason.WORKER_KILLED, "Rank 1 (node 1) was killed by SIGKILL."),
    Cause.STOPPED: exit_of(ExitReason.STOPPED, "The attempt was stopped before it started."),
    Cause.LOST_PEER: failed_by("Rank 0 (node 0) failed: RuntimeError: Connection closed by peer [10.0.0.1]:1"),
    Cause.STOP_TIMEOUT: exit_of(ExitReason.STOP_TIMEOUT, "The ranks of node 0 did not stop in time and were killed."),
    Cause.SILENT: failed_by("The ranks left without saying how training ended."),
}


@pytest.mark.parametrize("cause", Cause)
def test_silence_is_the_last_of_causes(cause: Cause) -> None:
    assert cause_of(BY_CAUSE[cause]) is cause
    found = conclude(AttemptRecords(2, {0: BY_CAUSE[cause]}))
    assert found == BY_CAUSE[cause]
    done = exit_of(ExitReason.SUCCEEDED, "The ranks of this node are done.")
    assert conclude(AttemptRecords(2, {0: done, 1: BY_CAUSE[cause]})) == BY_CAUSE[cause]


@pytest.mark.parametrize(
    "text",
    [
        "DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29400).",
        "RendezvousConnectionError: The connection to the C10d store has failed.",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete",
        "RuntimeError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_words_of_those_who_lost_another(text: str) -> None:
    assert cause_of(failed_by(f"Rank 0 failed: {text}")) is Cause.LOST_PEER
