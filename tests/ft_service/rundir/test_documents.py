"""Words of the documents: enums in the code, and on the disk what every version has written and
reads.
"""

from __future__ import annotations

import json

import pytest

from ft_service.rundir.documents import Control, Desired, ExitReason, Outcome, OutcomeKind


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


def test_every_word_is_known() -> None:
    assert len(ExitReason) == 13
    assert len(Desired) == len(OutcomeKind) == 3
