"""An agent of the user's own through a real server: the unmodified openai client calls the model
for two turns, and the ranks learn the tokens that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.fine_tuning import FineTuningJob

from ft_service.agents.hosting import hosting
from ft_service.agents.rollout_handler import RolloutFunction
from ft_service.reinforcement.step_records import StepRecord, read_record, recorded_steps
from tests.support.rollout_servers import records_are_whole, serving
from tests.support.rollouts import save_prompts
from tests.support.service import Server, upload, wait_until

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("agents")) as server:
        yield server


async def rollout(client: Any, item: Mapping[str, Any]) -> float:
    """Two turns: the second one goes on with the first."""
    messages: list[Any] = list(item["messages"])
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="any", messages=messages, max_tokens=6, temperature=1.0
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "Again."},
        ]
    return len(messages[-2]["content"]) / 10


async def rollout_by_tokens(client: Any, item: Mapping[str, Any]) -> float:
    """An agent that renders its own prompts: the second one is made of the tokens of the first."""
    prompt: Any = item["messages"][0]["content"]
    for more in (5, 6):
        answer = await client.completions.create(
            model="any", prompt=prompt, max_tokens=6, extra_body={"return_token_ids": True}
        )
        choice = answer.choices[0]
        prompt = [*choice.prompt_token_ids, *choice.token_ids, more]
    return len(choice.text) / 10


def submit(server: Server, folder: Path, url: str, secret_of: str) -> FineTuningJob:
    client = server.client()
    save_prompts(folder / "prompts.jsonl", 8)
    environment = {"type": "endpoint", "url": url, "webhook_endpoint_id": secret_of}
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            "environment": {**environment, "max_turns": 3, "deadline_seconds": 120},
            "hyperparameters": {"batch_size": 2, "num_generations": 2},
        },
    }
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload(client, folder / "prompts.jsonl"),
        method=method,
        seed=1,
        extra_body={
            "precision": {"default": "nf4", "compute": "fp32"},
            "lora": {"r": 4},
            "training": {"max_length": 192, "max_steps": STEPS, "learning_rate": 1e-2},
            "distributed": {"nproc_per_node": 1, "replicate": 1},
        },
    )


@pytest.mark.parametrize("agent", [rollout, rollout_by_tokens])
def test_an_agent_is_trained_on_what_was_sampled_for_it(
    server: Server, tmp_path: Path, agent: RolloutFunction
) -> None:
    client = server.client()
    created: Any = client.post(
        "/webhook_endpoints",
        body={
            "name": "agent",
            "url": "http://127.0.0.1:9",
            "event_types": ["fine_tuning.job.succeeded"],
        },
        cast_to=object,
    )
    with hosting(agent, secret=created["signing_secret"]) as url:
        job = submit(server, tmp_path, url, created["id"])
        wait_until(client, job.id, "succeeded")
    run = server.run(job.id)
    records_are_whole(run, STEPS)
    records = [own for step in recorded_steps(run) if (own := read_record(run, step)) is not None]
    assert [len(record.answers) for record in records] == [4, 4, 0]
    for record in records[:-1]:
        require_sampled(record)
        if agent is rollout_by_tokens:
            require_one_row(record)
    events: list[Any] = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    measured = {event.data["step"]: event.data for event in events if event.type == "metrics"}
    assert {step: data["environment/turns"] for step, data in measured.items()} == {1: 2.0, 2: 2.0}


def require_sampled(record: StepRecord) -> None:
    for answer in record.answers:
        assert answer.errors == {}
        assert answer.reward is not None
        way = answer.trajectory
        assert way is not None
        assert len(way.calls) == 2
        assert sum(call["completion_tokens"] for call in way.calls) == len(answer.tokens)
        assert [token for row in way.rows for token in row.answered] == list(answer.tokens)
        assert len(answer.logprobs) == len(answer.tokens)
        assert json.loads(json.dumps(way.messages))[-1]["role"] == "assistant"


def require_one_row(record: StepRecord) -> None:
    """What the agent adds to each answer is one token."""
    for answer in record.answers:
        assert answer.trajectory is not None
        [row] = answer.trajectory.rows
        (_, first_end), (second, _) = row.sampled
        assert (second - first_end, row.tokens[first_end]) == (1, 5)
