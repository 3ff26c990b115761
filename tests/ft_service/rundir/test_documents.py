"""Words of the documents: enums in the code, and on the disk what every version has written and reads."""

from __future__ import annotations

import json

import pytest

from ft_service.jobs.reasons import Reason, reason_of
from ft_service.rundir.documents import Control, Desired, Exit, ExitReason, Outcome, OutcomeKind


@pytest.mark.parametrize("word", ["run", "pause", "cancel"])
def test_wishes(word: str) -> None:
    written = json.dumps({"generation": 2, "desired": word})
    control = Control.model_validate_json(written)
    assert control.desired is Desired(word)
    assert json.loads(control.model_dump_json()) == json.loads(written)


@pytest.mark.parametrize("word", ["succeeded", "stopped", "failed"])
def test_outcomes(word: str) -> None:
    outcome = Outcome.model_validate_json(json.dumps({"kind": word}))
    assert outcome.kind is OutcomeKind(word)
    assert json.loads(outcome.model_dump_json())["kind"] == word


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
    assert json.loads(json.dumps(found.model_dump()))["reason"] == word, "as `ft run --json` prints it"


def test_every_word_is_known() -> None:
    assert len(ExitReason) == 11
    assert len(Desired) == len(OutcomeKind) == 3
