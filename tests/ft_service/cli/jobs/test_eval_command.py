from __future__ import annotations

import json
import re

from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body


def test_answers_are_shown_side_by_side_in_eighty_columns(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(evaluation={"prompts": 2})
    assert "prompts: 8" in ft("eval", "last").err
    sample = {
        "prompt": "user\nsay [0]",
        "reference": "it is 0",
        "base": "no " * 40,
        "base_scores": {"exact_match": 0.0},
    }
    after = {**sample, "tuned": "it is [bold]0", "scores": {"exact_match": 1.0}}
    server.evaluations = [
        {
            "id": "30",
            "step": 30,
            "metrics": {"exact_match": 0.5},
            "base_metrics": {"exact_match": 0.0},
            "samples": [after] * 2,
        },
        {
            "id": "0",
            "step": 0,
            "metrics": {"exact_match": 0.0},
            "samples": [{**sample, "tuned": None, "scores": {}}] * 2,
        },
    ]
    for own in server.evaluations:
        own["created_at"] = 0
    said = ft("eval", "last", "-n", "1").out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[:3]] == [
        ["STEP", "exact_match"],
        ["before", "0.000"],
        ["30", "0.500"],
    ]
    assert "say [0]" in said
    assert "it is [bold]0" in said, "an answer is no markup"
    assert said.count("expected") == 1, "one prompt was asked for"
    row = next(line for line in lines if "[bold]" in line)
    assert row.index("no no") < row.index("it is"), "side by side"
    assert "After" not in ft("eval", "last", "--step", "0").out
    assert "it was at: 0, 30" in ft("eval", "last", "--step", "7").err
    assert [own["step"] for own in json.loads(ft("eval", "last", "--json").out)] == [30, 0]
    assert [own["step"] for own in json.loads(ft("eval", "last", "--step", "0", "--json").out)] == [
        0
    ]
    assert "it was at: 0, 30" in ft("eval", "last", "--step", "7", "--json").err
    assert "exact_match 0.00 → 0.50, at step 30; the answers: ft eval" in ft("get", "last").out
    said = [
        {"role": "system", "content": "Sort."},
        {"role": "user", "content": "say [1]"},
        {"role": "assistant", "tool_calls": []},
    ]
    server.evaluations[0]["samples"] = [{**after, "messages": said, "tuned": ""}]
    shown = ft("eval", "last").out
    assert ["system", "Sort."] in [line.split() for line in shown.splitlines()]
    assert "say [1]" in shown
    assert "say [0]" not in shown, "the prompt holds what the template writes"
    assert "(nothing)" in shown


def test_answers_without_scores_are_shown_without_tables_of_them(
    ft: Ft, server: StubServer
) -> None:
    server.jobs["ftjob-1"] = job_body(evaluation={"prompts": 1})
    sample = {"prompt": "user\nsay", "base": "no", "tuned": "yes", "base_scores": {}, "scores": {}}
    server.evaluations = [{"id": "6", "step": 6, "created_at": 0, "samples": [sample]}]
    said = ft("eval", "last").out
    assert "STEP" not in said
    assert "├" not in said, "no row of scores"
    assert "evaluation   at step 6; the answers: ft eval" in re.sub(
        "  +", "   ", ft("get", "last").out
    )
