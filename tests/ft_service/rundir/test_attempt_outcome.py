from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from ft_service.jobs.reasons import Reason
from ft_service.rundir.attempt_outcome import (
    AttemptRecords,
    Evidence,
    FailedRank,
    Starved,
    conclude,
    decide_exit,
    exit_of,
    find_failed_rank,
    killed_exit,
)
from ft_service.rundir.documents import ErrorInfo, ExitReason, Outcome, OutcomeKind, Result
from ft_service.rundir.failure_origin import Cause, cause_of
from tests.support.exits import BY_CAUSE

RESULT = Result(attempt=1, steps=10, trained_tokens=100, train_loss=1.0, valid_loss=None)


SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED)


STOPPED = Outcome(kind=OutcomeKind.STOPPED, checkpoint="step-5-a1")


BROKEN = Outcome(
    kind=OutcomeKind.FAILED,
    error=ErrorInfo(code="training_failed", message="the loss is not a number", rank=1),
)


REFUSED = Outcome(
    kind=OutcomeKind.FAILED,
    permanent=True,
    error=ErrorInfo(code="invalid_model", message="no config.json"),
)


CASES = [
    # what the ranks wrote                 torchrun        what was done to it        reason, code
    ({"result": RESULT, "outcome": SUCCEEDED}, 0, None, "succeeded", 0),
    ({"result": RESULT, "outcome": None}, 1, None, "succeeded", 0),
    ({"result": RESULT, "outcome": SUCCEEDED}, -signal.SIGKILL, "cancelled", "succeeded", 0),
    ({"outcome": STOPPED}, 0, None, "stopped", 75),
    ({"outcome": STOPPED}, 1, None, "stopped", 75),
    ({"outcome": STOPPED}, -signal.SIGKILL, "stop_timeout", "stopped", 75),
    ({"outcome": STOPPED}, -signal.SIGKILL, "cancelled", "cancelled", 1),
    ({"outcome": None}, -signal.SIGKILL, "cancelled", "cancelled", 1),
    ({"outcome": None}, -signal.SIGKILL, "stop_timeout", "stop_timeout", 1),
    ({"outcome": BROKEN}, 1, None, "worker_error", 1),
    ({"outcome": REFUSED}, 1, None, "permanent_error", 64),
    ({"outcome": SUCCEEDED}, 0, None, "worker_error", 1),
    ({"outcome": None}, 0, None, "worker_error", 1),
    ({"outcome": None}, 1, None, "worker_error", 1),
    ({"outcome": None, "failed_rank": FailedRank(1, 1)}, 1, None, "worker_error", 1),
    ({"outcome": None, "failed_rank": FailedRank(1, -9)}, 1, None, "worker_killed", 1),
    ({"outcome": None}, -signal.SIGKILL, None, "worker_killed", 1),
    ({"outcome": None}, -signal.SIGTERM, None, "worker_killed", 1),
]


@pytest.mark.parametrize(("written", "returncode", "forced", "reason", "code"), CASES)
def test_decide_exit(
    written: dict, returncode: int, forced: str | None, reason: str, code: int
) -> None:
    evidence = {"result": None, **written, "returncode": returncode, "forced": forced}
    found = decide_exit(Evidence(**evidence))
    assert (found.reason, found.code) == (reason, code)
    assert found.message


def test_an_error_of_the_ranks_is_passed_on_whole() -> None:
    assert decide_exit(Evidence(outcome=BROKEN, result=None, returncode=1)).error == BROKEN.error


def test_an_unspoken_error_is_shown_by_the_guilty_ranks_log() -> None:
    log = "Traceback (most recent call last):\n  File …\n[rank1]: ValueError: boom\n"
    found = decide_exit(
        Evidence(
            outcome=None, result=None, returncode=1, failed_rank=FailedRank(1, 1), log_tail=log
        )
    )
    assert found.message == "Rank 1 failed: ValueError: boom"
    assert found.error is not None
    assert (found.error.message, found.error.traceback, found.error.rank) == (found.message, log, 1)


def test_a_rank_that_lacks_a_package_fails_the_job_for_good() -> None:
    log = (
        "Traceback (most recent call last):\n  File …\n[rank1]: ModuleNotFoundError: No module "
        "named 'peft'\n"
    )
    found = decide_exit(
        Evidence(
            outcome=None, result=None, returncode=1, failed_rank=FailedRank(1, 1), log_tail=log
        )
    )
    assert (found.reason, found.code) == ("permanent_error", 64)
    assert found.error == ErrorInfo(
        code="missing_package", message=found.message, traceback=log, rank=1
    )
    assert "pip install 'ft-service[workers]'" in found.message
    killed = decide_exit(
        Evidence(
            outcome=None, result=None, returncode=1, failed_rank=FailedRank(1, -9), log_tail=log
        )
    )
    assert killed.reason == "worker_killed"


def test_a_killed_rank_is_named_with_its_signal() -> None:
    found = decide_exit(
        Evidence(outcome=None, result=None, returncode=1, failed_rank=FailedRank(0, -9))
    )
    assert found.message == "Rank 0 was killed by SIGKILL."


CONCLUSIONS = [
    # what the ranks wrote, and the supervisors by node                                       reason
    ({"result": RESULT, "outcome": SUCCEEDED}, ["succeeded", "cancelled"], "succeeded"),
    ({"outcome": STOPPED}, ["stopped", "cancelled"], "cancelled"),
    ({"outcome": REFUSED}, ["worker_error", "worker_killed"], "permanent_error"),
    ({"outcome": BROKEN}, ["worker_error", "stop_timeout"], "worker_error"),
    ({}, ["stopped", "permanent_error"], "permanent_error"),
    ({}, ["stop_timeout", "stopped"], "stopped"),
    ({}, ["worker_killed", "stop_timeout"], "worker_killed"),
    ({}, ["worker_error", "worker_killed"], "worker_error"),
    ({}, ["succeeded", "worker_error"], "worker_error"),
    ({}, ["succeeded", None], "worker_killed"),
    ({}, [None, "succeeded"], "worker_killed"),
    ({}, ["succeeded", "succeeded"], "worker_error"),
]


@pytest.mark.parametrize(("written", "by_node", "reason"), CONCLUSIONS)
def test_an_attempt_on_two_nodes_ends_by_its_cause(
    written: dict, by_node: list[str | None], reason: str
) -> None:
    """None: the node left no record."""
    exits = {
        node: exit_of(ExitReason(ended), f"node {node}")
        for node, ended in enumerate(by_node)
        if ended is not None
    }
    assert conclude(AttemptRecords(2, exits, **written)).reason == reason


def test_nodes_without_an_exit_record_are_named() -> None:
    found = conclude(
        AttemptRecords(
            4, {1: exit_of(ExitReason.SUCCEEDED, ""), 2: exit_of(ExitReason.SUCCEEDED, "")}
        )
    )
    assert found.message == "Of 4 nodes these left no exit record: 0, 3."


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (Reason.USER_CANCELLED, "cancelled"),
        (Reason.STALLED, "stalled"),
        (Reason.STOP_TIMEOUT, "stop_timeout"),
        (Reason.SUPERVISOR_LOST, "worker_killed"),
        (Reason.LAUNCH_FAILED, "launch_failed"),
    ],
)
def test_an_attempt_that_the_service_ended_says_why(reason: Reason, word: str) -> None:
    assert killed_exit(reason).reason == word


def test_the_first_failed_rank_in_torchruns_log() -> None:
    log = (
        "E0101 00:00:00.1 11 torch/distributed/elastic/multiprocessing/api.py:9] "
        "failed (exitcode: -9) local_rank: 1 (pid: 42) of binary: /usr/bin/python\n"
        "failed (exitcode: 1) local_rank: 0 (pid: 41) of binary: /usr/bin/python\n"
    )
    assert find_failed_rank(log) == FailedRank(rank=1, exitcode=-9, local=1)
    assert find_failed_rank(log, first_rank=4) == FailedRank(rank=5, exitcode=-9, local=1)
    told = (
        "Root Cause (first observed failure):\n[0]:\n  rank      : 7 (local_rank: 1)\n  "
        "exitcode  : -9 (pid: 42)\n"
    )
    assert find_failed_rank(log + told, first_rank=4) == FailedRank(rank=7, exitcode=-9, local=1), (
        "torchrun knows better"
    )
    assert find_failed_rank("all is well") is None


def test_of_two_failed_ranks_the_killed_one_is_told_not_the_one_that_lost_it() -> None:
    log = (
        "failed (exitcode: 1) local_rank: 0 (pid: 41) of binary: /usr/bin/python\n"
        "Failures:\n[1]:\n  time      : 2026\n  host      : a\n  rank      : 5 (local_rank: 1)\n  "
        "exitcode  : -9 (pid: 42)\n"
        "Root Cause:\n[0]:\n  time      : 2026\n  host      : a\n  rank      : 4 (local_rank: "
        "0)\n  exitcode  : 1 (pid: 41)\n"
    )
    assert find_failed_rank(log) == FailedRank(rank=5, exitcode=-9, local=1)


def test_a_rank_that_torchrun_itself_had_to_kill_is_not_what_failed() -> None:
    """It was stuck, as in a collective, when another rank's error ended the attempt."""
    log = (
        "Sending process 41 closing signal SIGTERM\n"
        "Unable to shutdown process 41 via 15, forcefully exiting via 9\n"
        "failed (exitcode: 1) local_rank: 1 (pid: 42) of binary: /usr/bin/python\n"
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 41)  (SIGKILL)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  "
        ": 1 (pid: 42)\n"
    )
    assert find_failed_rank(log) == FailedRank(rank=1, exitcode=1, local=1)


GIB = 2**30


@pytest.mark.parametrize(
    ("ended", "starved", "code"),
    [
        ({"failed_rank": FailedRank(0, -9)}, None, "worker_killed"),
        ({"failed_rank": FailedRank(0, -9)}, Starved(5 * GIB, 16 * GIB), "worker_killed"),
        ({"failed_rank": FailedRank(0, -9)}, Starved(15 * GIB, 16 * GIB), "out_of_memory"),
        ({"failed_rank": FailedRank(0, -15)}, Starved(15 * GIB, 16 * GIB), "worker_killed"),
        ({"failed_rank": FailedRank(0, -11)}, None, "worker_crashed"),
        ({"failed_rank": FailedRank(0, -6)}, Starved(15 * GIB, 16 * GIB), "worker_crashed"),
        ({"returncode": -9}, None, "worker_killed"),
        ({"returncode": -11}, None, "worker_crashed"),
    ],
)
def test_a_process_is_killed_from_outside_or_ends_by_itself(
    ended: dict[str, Any], starved: Starved | None, code: str
) -> None:
    found = decide_exit(
        Evidence(**{"outcome": None, "result": None, "returncode": 1, "starved": starved, **ended})
    )
    assert (found.reason, found.error and found.error.code) == ("worker_killed", code)


@pytest.mark.parametrize(
    ("failed", "log", "message"),
    [
        (FailedRank(5, 1, 1), "ValueError: boom", "Rank 5 (node 2) failed: ValueError: boom"),
        (FailedRank(5, -9, 1), "", "Rank 5 (node 2) was killed by SIGKILL."),
        (None, "it broke", "A rank of node 2 failed: it broke"),
    ],
)
def test_of_several_nodes_the_one_is_named(
    failed: FailedRank | None, log: str, message: str
) -> None:
    seen = Evidence(
        outcome=None, result=None, returncode=1, nodes=3, node=2, failed_rank=failed, log_tail=log
    )
    found = decide_exit(seen)
    assert found.message == message
    assert found.error is not None
    assert found.error.rank == (5 if failed else None)


def test_what_was_there_before_the_ranks_were_killed_is_the_cause() -> None:
    seen = Evidence(outcome=None, result=None, returncode=-9, forced="stop_timeout")
    raised = replace(seen, failed_rank=FailedRank(0, 1), log_tail="ValueError: boom")
    assert decide_exit(raised).message == "Rank 0 failed: ValueError: boom"
    lost = replace(
        seen, failed_rank=FailedRank(0, 1), log_tail="RuntimeError: Connection closed by peer"
    )
    assert decide_exit(lost).message == "Rank 0 failed: RuntimeError: Connection closed by peer"
    waited = Outcome(
        kind=OutcomeKind.FAILED,
        error=ErrorInfo(code="collective_timeout", message="a rank is stuck"),
    )
    killed = Evidence(outcome=waited, result=None, returncode=1, failed_rank=FailedRank(1, -9))
    assert decide_exit(killed).reason == "worker_killed"
    assert decide_exit(replace(killed, failed_rank=FailedRank(1, 1))).message == "a rank is stuck"


def test_a_rank_that_nccl_ended_for_want_of_another_was_not_killed_from_outside() -> None:
    aborted = Evidence(
        outcome=None,
        result=None,
        returncode=1,
        failed_rank=FailedRank(0, -6),
        log_tail="frame #9: clone",
    )
    found = decide_exit(
        replace(
            aborted, nccl_gave_up="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
        )
    )
    assert (found.reason, cause_of(found)) == ("worker_error", Cause.LOST_PEER)
    assert decide_exit(aborted).reason == "worker_killed"


@pytest.mark.parametrize("first", Cause)
@pytest.mark.parametrize("second", Cause)
def test_of_two_nodes_the_origin_is_told(first: Cause, second: Cause) -> None:
    found = conclude(AttemptRecords(2, {0: BY_CAUSE[first], 1: BY_CAUSE[second]}))
    assert found == BY_CAUSE[min(first, second)]


@pytest.mark.parametrize("code", ["training_failed", "collective_timeout"])
def test_what_the_ranks_said_is_a_cause_among_others_unless_they_agreed(code: str) -> None:
    outcome = Outcome(
        kind=OutcomeKind.FAILED, error=ErrorInfo(code=code, message="what they said", rank=2)
    )
    killed = BY_CAUSE[Cause.KILLED]
    found = conclude(AttemptRecords(2, {0: BY_CAUSE[Cause.STOP_TIMEOUT], 1: killed}, outcome))
    assert found.message == (killed.message if code == "collective_timeout" else "what they said")
    assert conclude(AttemptRecords(2, {0: BY_CAUSE[Cause.ERROR]}, STOPPED)).reason == "stopped"


def test_every_reason_has_its_exit_code() -> None:
    codes = {ExitReason.SUCCEEDED: 0, ExitReason.STOPPED: 75, ExitReason.PERMANENT_ERROR: 64}
    assert [exit_of(reason, "").code for reason in ExitReason] == [
        codes.get(reason, 1) for reason in ExitReason
    ]
