from __future__ import annotations

import pytest

from ft_service.rundir.attempt_outcome import (
    AttemptRecords,
    conclude,
    exit_of,
)
from ft_service.rundir.documents import ExitReason
from ft_service.rundir.failure_origin import Cause, cause_of, nccl_gave_up
from tests.support.exits import BY_CAUSE, failed_by


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "[rank0]:[E x] [Rank 0] Watchdog caught collective operation timeout: Work(7)\nframe",
            "Watchdog caught collective",
        ),
        (
            "  what():  [PG ID 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds",
            "ProcessGroupNCCL's watchdog got stuck",
        ),
        (
            "NCCL error: remote process exited or there was a network error",
            "NCCL error: remote process exited",
        ),
        (
            "Process group watchdog thread terminated with exception: CUDA error: an illegal "
            "memory access",
            None,
        ),
        ("", None),
    ],
)
def test_what_nccl_says_when_it_ends_a_rank(log: str, words: str | None) -> None:
    found = nccl_gave_up(log)
    assert found is None if words is None else (found or "").startswith(words)


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
        "DistNetworkError: The client socket has timed out after 600000ms while trying to connect "
        "to (10.0.0.1, 29400).",
        "RendezvousConnectionError: The connection to the C10d store has failed.",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for "
        "recv operation to complete",
        "RuntimeError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_words_of_those_who_lost_another(text: str) -> None:
    assert cause_of(failed_by(f"Rank 0 failed: {text}")) is Cause.LOST_PEER
