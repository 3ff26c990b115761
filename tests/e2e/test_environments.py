"""Environments through a real server: kills while an agent is trained, tools by MCP, a game by
OpenEnv, and an agent of a framework that knows nothing of training.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from mcp.server.mcpserver import MCPServer
from openai.types.fine_tuning import FineTuningJob

from ft_service.agents.hosting import hosting
from ft_service.reinforcement.step_records import SampledAnswer, read_record, recorded_steps
from tests.support.environments import game_served, seen, tools_served
from tests.support.ports import free_port
from tests.support.rollout_servers import records_are_whole, samplers, serving
from tests.support.rollouts import GRADER, save_prompts
from tests.support.service import (
    Server,
    processes_of,
    send,
    upload,
    wait_until,
    wait_until_step,
)

pytestmark = pytest.mark.slow
STEPS = 2
AGENT = """
async def rollout(client, item):
    messages = list(item["messages"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="", messages=messages, max_tokens=4)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "Again."})
    return len(messages[-2]["content"]) / 10
"""
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "[call]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("environments")) as server:
        yield server


def submit(
    client: openai.OpenAI,
    folder: Path,
    environment: dict[str, Any],
    *,
    steps: int = STEPS,
    ranks: int = 1,
    grader: dict[str, Any] | None = None,
    **options: Any,
) -> FineTuningJob:
    save_prompts(folder / "prompts.jsonl", 8)
    save_prompts(folder / "valid.jsonl", 3, first=50)
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            **({} if grader is None else {"grader": grader}),
            "environment": {"max_turns": 3, "deadline_seconds": 120, **environment},
            "hyperparameters": {"batch_size": 2, "num_generations": 2, "max_completion_length": 6},
        },
    }
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload(client, folder / "prompts.jsonl"),
        validation_file=upload(client, folder / "valid.jsonl"),
        method=method,
        seed=1,
        extra_body={
            "precision": {"default": "nf4", "compute": "fp32"},
            "lora": {"r": 4},
            "training": {"max_length": 192, "max_steps": steps, "learning_rate": 1e-2},
            "distributed": {"nproc_per_node": ranks, "replicate": 1},
            "checkpoint": {"save_steps": 2},
            **options,
        },
    )


def endpoint_of(client: openai.OpenAI) -> Any:
    body = {"name": "a", "url": "http://127.0.0.1:9", "event_types": ["fine_tuning.job.failed"]}
    return client.post("/webhook_endpoints", body=body, cast_to=object)


def answers_of(server: Server, job_id: str) -> list[SampledAnswer]:
    run = server.run(job_id)
    records_are_whole(run, STEPS)
    records = [own for step in recorded_steps(run) if (own := read_record(run, step)) is not None]
    assert [len(record.answers) for record in records] == [4, 4, 0]
    answers = [answer for record in records for answer in record.answers]
    for answer in answers:
        assert (answer.errors, answer.reward is None) == ({}, False)
        assert answer.trajectory is not None
        rows = answer.trajectory.rows
        assert [token for row in rows for token in row.answered] == list(answer.tokens)
        assert all(row.texts[-1][1] for row in rows), "a row ends with what was sampled"
    return answers


@contextmanager
def agent_process(folder: Path, secret: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of an agent, and what kills it and starts it again."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "secret").write_text(secret)
    port = free_port()
    command = [sys.executable, "-m", "ft_service.cli", "rollout", "serve"]
    command += [str(folder / "agent.py"), "--port", str(port), "--secret-file"]
    processes = [subprocess.Popen([*command, str(folder / "secret")])]

    def kill() -> None:
        processes[-1].kill()
        processes[-1].wait()
        processes.append(subprocess.Popen([*command, str(folder / "secret")]))

    try:
        yield f"http://127.0.0.1:{port}", kill
    finally:
        processes[-1].terminate()
        processes[-1].wait()


def test_kills_lose_no_step_and_repeat_none(tmp_path: Path) -> None:
    """The server, the sampler, a rank and the agent are killed, in an order of chance."""
    steps = 6
    order = random.Random(4)
    with serving(tmp_path) as server:
        client = server.client()
        created = endpoint_of(client)
        with agent_process(tmp_path, created["signing_secret"]) as (url, kill_agent):

            def kill_server() -> None:
                server.kill()
                server.start()

            kills = {
                "server": kill_server,
                "sampler": lambda: send(set(samplers(server)), signal.SIGKILL),
                "rank": lambda: send(set(processes_of(run)["rank"][:1]), signal.SIGKILL),
                "agent": kill_agent,
            }
            environment = {"type": "endpoint", "url": url, "webhook_endpoint_id": created["id"]}
            job = submit(client, tmp_path, environment, steps=steps, ranks=2)
            run = server.run(job.id)
            for step, name in enumerate(order.sample(sorted(kills), len(kills)), 1):
                wait_until_step(server.client(), job.id, step)
                time.sleep(order.random())
                kills[name]()
            # What an agent was at when it was killed has no reward; a step of such may pause.
            wait_for_end(server, job.id)
    records_are_whole(run, steps)


def wait_for_end(server: Server, job_id: str) -> None:
    client = server.client()
    for _ in range(3):
        job = wait_until(client, job_id, "succeeded", "paused")
        if job.status == "succeeded":
            return
        client.fine_tuning.jobs.resume(job_id)
    raise AssertionError("the job is paused again and again")


def test_tools_of_an_mcp_server_are_offered_and_answers_graded(
    server: Server, tmp_path: Path
) -> None:
    tools = MCPServer("tools", log_level="CRITICAL")

    @tools.tool()
    def add(a: int, b: int) -> str:
        return str(a + b)

    client = server.client()
    with tools_served(tools) as url:
        environment = {"type": "mcp", "url": url}
        given = {"chat_template": WITH_TOOLS, "grader": GRADER}
        job = submit(client, tmp_path, environment, **given)
        wait_until(client, job.id, "succeeded")
    for answer in answers_of(server, job.id):
        assert answer.trajectory is not None
        assert answer.trajectory.rows[0].texts[0][0].startswith("<|im_start|>tools\nadd<|im_end|>")


def test_a_game_of_openenv_is_played(server: Server, tmp_path: Path) -> None:
    def new() -> Any:
        said: list[str] = []

        def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
            if kind == "reset":
                return seen(f"begin {data['answer']}")
            said.append(data["message"])
            return seen("more", len(data["message"]) / 10, done=len(said) == 2)

        return answer

    client = server.client()
    with game_served(new) as url:
        environment = {"type": "openenv", "url": url, "observation_field": "text"}
        job = submit(client, tmp_path, environment)
        wait_until(client, job.id, "succeeded")
    for answer in answers_of(server, job.id):
        assert answer.trajectory is not None
        assert len(answer.trajectory.calls) == 2
        assert answer.trajectory.messages[-1]["content"] == "more"


def test_an_agent_of_a_framework_is_trained_without_a_change(
    server: Server, tmp_path: Path
) -> None:
    """pydantic-ai: all that it is told is the address of its model."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(system_prompt="Add.")

    async def rollout(rollout_client: Any, item: Any) -> float:
        model = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=rollout_client))
        first = await agent.run(item["messages"][0]["content"], model=model)
        second = await agent.run("Again.", model=model, message_history=first.all_messages())
        return len(second.output) / 10

    client = server.client()
    created = endpoint_of(client)
    with hosting(rollout, secret=created["signing_secret"]) as url:
        environment = {"type": "endpoint", "url": url, "webhook_endpoint_id": created["id"]}
        job = submit(client, tmp_path, environment)
        wait_until(client, job.id, "succeeded")
    for answer in answers_of(server, job.id):
        assert answer.trajectory is not None
        assert len(answer.trajectory.calls) == 2
