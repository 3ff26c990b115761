from __future__ import annotations

import json

import pytest

from ft_service.jobs.reasons import Reason, reason_of
from ft_service.rundir.documents import Exit, ExitReason


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
