from __future__ import annotations

import json

import pytest

from ft_service.jobs.reasons import Reason, Retry, may_fail, reason_of, retry_of
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("succeeded", Reason.SUCCEEDED),
        ("stopped", None),
        ("cancelled", None),
        ("permanent_error", Reason.PERMANENT_ERROR),
        ("worker_error", Reason.WORKER_ERROR),
        ("worker_killed", Reason.WORKER_KILLED),
        ("stop_timeout", Reason.STOP_TIMEOUT),
        ("stalled", Reason.STALLED),
    ],
)
def test_reasons_of_exits_and_what_they_mean_for_the_job(word: str, reason: Reason | None) -> None:
    found = Exit.model_validate_json(json.dumps({"code": 1, "reason": word, "message": "m"}))
    assert found.reason is ExitReason(word)
    assert reason_of(found) is reason
    assert json.loads(found.model_dump_json())["reason"] == word
    assert json.loads(json.dumps(found.model_dump()))["reason"] == word, (
        "as `ft run --json` prints it"
    )


def test_every_exit_that_nobody_asked_for_has_a_reason() -> None:
    for word in set(ExitReason) - {ExitReason.STOPPED, ExitReason.CANCELLED}:
        assert reason_of(Exit(code=1, reason=word, message="m")) == word.value
    assert reason_of(None) is Reason.SUPERVISOR_LOST


@pytest.mark.parametrize(
    ("reason", "code", "retry"),
    [
        (Reason.WORKER_KILLED, None, Reason.WORKER_KILLED.retry),
        (Reason.WORKER_KILLED, "node_lost", Reason.WORKER_KILLED.retry),
        (Reason.WORKER_KILLED, "evicted", Retry.COUNTED),
        (Reason.SUPERVISOR_LOST, "evicted", Reason.SUPERVISOR_LOST.retry),
        (Reason.PERMANENT_ERROR, "evicted", Retry.NEVER),
    ],
)
def test_only_a_kill_that_the_job_brought_on_itself_counts(
    reason: Reason, code: str | None, retry: Retry
) -> None:
    assert Reason.WORKER_KILLED.retry is not Retry.COUNTED
    error = None if code is None else ErrorInfo(code=code, message="m")
    assert retry_of(reason, error) is retry


@pytest.mark.parametrize(
    ("reason", "may"),
    [
        (Reason.WORKER_KILLED, True),
        (Reason.PERMANENT_ERROR, True),
        (Reason.WORKER_ERROR, True),
        (Reason.SUPERVISOR_LOST, False),
    ],
)
def test_which_reasons_a_job_can_fail_for(reason: Reason, may: bool) -> None:
    assert may_fail(reason) is may
