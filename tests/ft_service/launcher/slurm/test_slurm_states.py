from __future__ import annotations

import pytest

from ft_service.jobs.reasons import Reason, Retry, reason_of, retry_of
from ft_service.launcher.slurm.slurm_states import (
    is_lasting,
    judge_exit,
    standing,
    waiting_text,
    with_cause,
)
from ft_service.rundir.attempt_outcome import AttemptRecords, exit_of
from ft_service.rundir.documents import (
    Control,
    Desired,
    ErrorInfo,
    Exit,
    ExitReason,
    Outcome,
    OutcomeKind,
    Result,
)
from ft_service.rundir.failure_origin import COLLECTIVE_TIMEOUT

STATES = {
    "waiting": [
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ],
    "alive": [
        *(
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
            "SUSPENDED",
            "STOPPED",
            "SIGNALING",
            "RESIZING",
            "STAGE_OUT",
        ),
        "POWER_UP_NODE",
    ],
    "over": [
        *(
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "PREEMPTED",
            "REVOKED",
            "NODE_FAIL",
            "BOOT_FAIL",
            "LAUNCH_FAILED",
        ),
        *("RECONFIG_FAIL", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
    ],
    "unknown": ["", "RUNNING+", "running", "NEW_IN_SOME_VERSION"],
}


@pytest.mark.parametrize(
    ("state", "said"), [(state, said) for said, states in STATES.items() for state in states]
)
def test_every_state_is_waiting_alive_over_or_not_known(state: str, said: str) -> None:
    assert standing(state) == said


@pytest.mark.parametrize(
    ("state", "reason", "retry"),
    [
        ("COMPLETED", Reason.SUPERVISOR_LOST, Retry.LOST),
        ("FAILED", Reason.SUPERVISOR_LOST, Retry.LOST),
        (None, Reason.SUPERVISOR_LOST, Retry.LOST),
        ("TIMEOUT", Reason.WORKER_KILLED, Retry.COUNTED),
        ("DEADLINE", Reason.WORKER_KILLED, Retry.COUNTED),
        ("OUT_OF_MEMORY", Reason.WORKER_KILLED, Retry.COUNTED),
        ("NODE_FAIL", Reason.HOST_LOST, Retry.LOST),
        ("BOOT_FAIL", Reason.HOST_LOST, Retry.LOST),
        ("LAUNCH_FAILED", Reason.HOST_LOST, Retry.LOST),
        ("RECONFIG_FAIL", Reason.HOST_LOST, Retry.LOST),
        ("CANCELLED", None, None),
        ("PREEMPTED", None, None),
        ("REVOKED", None, None),
        ("REQUEUED", None, None),
    ],
)
def test_how_an_attempt_ended_that_left_no_word(
    state: str | None, reason: Reason | None, retry: Retry | None
) -> None:
    """None: it was stopped, which is no failure."""
    ended = judge_exit(state, AttemptRecords(2, {}))
    found = reason_of(ended)
    assert found is reason
    assert (found and retry_of(found, ended and ended.error)) is retry


STOPPED = Outcome(kind=OutcomeKind.STOPPED, checkpoint="step-4-a1")
LOST_PEER = exit_of(
    ExitReason.WORKER_ERROR, "", ErrorInfo(code=COLLECTIVE_TIMEOUT, message="It waited in vain.")
)
REFUSED = exit_of(
    ExitReason.PERMANENT_ERROR, "No.", ErrorInfo(code="training_failed", message="No.")
)
CANCELLED = exit_of(ExitReason.CANCELLED, "")


@pytest.mark.parametrize(
    ("state", "exits", "outcome", "result", "reason"),
    [
        ("TIMEOUT", {}, STOPPED, None, ExitReason.STOPPED),
        ("NODE_FAIL", {}, STOPPED, None, ExitReason.STOPPED),
        ("CANCELLED", {0: CANCELLED}, None, None, ExitReason.CANCELLED),
        ("OUT_OF_MEMORY", {0: LOST_PEER}, None, None, ExitReason.WORKER_KILLED),
        ("NODE_FAIL", {0: REFUSED, 1: REFUSED}, None, None, ExitReason.PERMANENT_ERROR),
        (
            "NODE_FAIL",
            {},
            None,
            Result(attempt=1, steps=4, trained_tokens=1, train_loss=1.0, valid_loss=None),
            ExitReason.SUCCEEDED,
        ),
        ("FAILED", {0: REFUSED}, None, None, ExitReason.PERMANENT_ERROR),
        (None, {0: CANCELLED, 1: CANCELLED}, None, None, ExitReason.CANCELLED),
    ],
)
def test_what_the_ranks_said_comes_before_what_slurm_says(
    state: str | None,
    exits: dict[int, Exit],
    outcome: Outcome | None,
    result: Result | None,
    reason: ExitReason,
) -> None:
    ended = judge_exit(state, AttemptRecords(2, exits, outcome, result))
    assert ended is not None
    assert ended.reason is reason


def test_a_waiting_job_says_why() -> None:
    assert waiting_text("None") == waiting_text("") == "The attempt waits in Slurm's queue."
    assert waiting_text("Priority") == "The attempt waits in Slurm's queue: Priority."
    assert is_lasting("JobHeldAdmin")
    assert is_lasting("InvalidQOS")
    assert is_lasting("QOSMaxCpuPerJobLimit")
    assert is_lasting("PartitionTimeLimit")
    assert not is_lasting("Resources")
    assert not is_lasting("QOSMaxJobsPerUserLimit")


@pytest.mark.parametrize(
    ("state", "asked", "who"),
    [
        ("CANCELLED", None, "cancelled in Slurm"),
        ("CANCELLED", Desired.RUN, "cancelled in Slurm"),
        ("PREEMPTED", None, "preempted"),
        ("NODE_FAIL", None, "node"),
        ("REQUEUED", None, "queue"),
        ("CANCELLED", Desired.PAUSE, ""),
        ("COMPLETED", None, ""),
        (None, None, ""),
    ],
)
def test_a_stop_says_who_in_slurm_wanted_it_and_where_training_goes_on(
    state: str | None, asked: Desired | None, who: str
) -> None:
    stopped = exit_of(ExitReason.STOPPED, "Training has stopped at checkpoint step-4-a1.")
    control = None if asked is None else Control(generation=2, desired=asked)
    ended = with_cause(state, stopped, control)
    assert (ended.reason, ended.code) == (stopped.reason, stopped.code)
    assert ended.message.endswith(stopped.message)
    assert (ended == stopped) is not bool(who)
    assert who in ended.message
    assert with_cause(state, ended, control) == ended
    failed = exit_of(ExitReason.WORKER_ERROR, "It failed.")
    assert with_cause(state, failed, control) == failed
