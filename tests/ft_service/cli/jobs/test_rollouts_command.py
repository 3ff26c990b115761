"""`ft rollouts`: conversations of an agent, and answers, with their rewards."""

from __future__ import annotations

import json
from typing import Any

from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body

WAY = {
    "turns": 2,
    "rows": 1,
    "messages": [
        {"role": "user", "content": "2 + 2 [="},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
        },
    ],
}
ANSWER: dict[str, Any] = {"text": "4", "tokens": 7, "reward": 0.5, "errors": {}, "trajectory": WAY}


def test_rollouts_are_shown_as_conversations(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert "no rollouts yet" in ft("rollouts", "last").err
    failed = {**ANSWER, "reward": None, "errors": {"agent_timeout": "late"}, "trajectory": None}
    prompts = [{"prompt": 3, "text": "2 + 2 [=", "answers": [ANSWER, failed]}]
    shared = {"mean_reward": 0.5, "prompts": prompts, "validation": []}
    server.rollouts = [{"id": str(step), "step": step, **shared} for step in (9, 8)]
    lines = [line.strip() for line in ft("rollouts", "last").out.splitlines()]
    assert lines == [
        "Step 9: mean reward 0.5",
        "",
        "Prompt 4: 2 + 2 [=",
        "answer 1: reward 0.5, 7 tokens, 2 turns in 1 rows",
        "user: 2 + 2 [=",
        "assistant: → add({})",
        "answer 2: reward none, 7 tokens, agent_timeout: late",
        "4",
    ]
    assert json.loads(ft("rollouts", "last", "--step", "8", "--json").out)["step"] == 8
    assert "step 7" in ft("rollouts", "last", "--step", "7").err
