"""`ft doctor` as it is called."""

from __future__ import annotations

import json

import pytest

from ft_service.control.checkup import Finding, Verdict
from tests.support.command_line import Ft


def test_the_exit_code_is_that_of_faults(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = ft("doctor", "--json")
    assert fine.code == 0
    told = json.loads(fine.out)
    assert (told["orphans"], told["checks"][-1]["what"]) == ([], "database")
    fault = Finding("gpu", Verdict.FAULT, "an old driver", "Update it.")
    monkeypatch.setattr("ft_service.control.checkup.checkup", lambda settings: iter([fault]))
    ended = ft("doctor")
    assert ended.code == 1
    assert "Update it." in ended.out


def test_a_database_that_cannot_be_opened_is_a_finding_among_the_others(
    ft: Ft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    ended = ft("doctor", "--json")
    assert ended.code == 1
    checks = json.loads(ended.out)["checks"]
    assert (checks[-1]["what"], checks[-1]["verdict"]) == ("database", "fault")
