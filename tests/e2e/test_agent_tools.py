"""A scripted agent with the official SDK's client: from a CSV file to a tuned model that is proved
to answer, by the tools of a real server, with a real job on the sample base.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client

from tests.support.bases import SAMPLE
from tests.support.mcp_clients import used_tools
from tests.support.service import Server

DATA = SAMPLE.parents[1] / "data"
MOST_CALLS = 12
MOST_WAITS = 3
"""Calls of `wait` that are counted: on a slow machine there are more."""
SYSTEM = "Turn the message into one line of JSON."


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    models = tmp_path / "models"
    shutil.copytree(SAMPLE, models / SAMPLE.name)
    server = Server(tmp_path / "home", models, FT_MCP="on")
    server.home.mkdir()
    server.start()
    yield server
    assert server.stop() == 0


def table() -> str:
    """The sample's questions and answers as a person would keep them."""
    written = io.StringIO()
    rows = csv.writer(written)
    rows.writerow(["instruction", "input", "output"])
    for line in (DATA / "train.jsonl").read_text().splitlines():
        system, question, answer = json.loads(line)["messages"]
        rows.writerow([system["content"], question["content"], answer["content"]])
    return written.getvalue()


class Agent:
    """Calls tools, and notes which."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.called: list[str] = []
        self.told: list[str] = []

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        self.called.append(tool)
        result: Any = await self._client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        self.told.append(result.content[0].text.partition("\n")[0])
        return result.structured_content

    @property
    def counted(self) -> int:
        waits = self.called.count("wait")
        return len(self.called) - waits + min(waits, MOST_WAITS)


async def tune(client: Client) -> tuple[Agent, dict[str, Any]]:
    """What an agent does that has read the skill, and goes by what each tool says."""
    agent = Agent(client)
    bases = await agent.call("models")
    base = next(one["id"] for one in bases["data"] if (one.get("base") or {}).get("trainable"))
    file = await agent.call("upload_data", name="orders.csv", content=table())
    checked = await agent.call("check_data", file_id=file["id"])
    assert checked["ok"] is True
    samples = await agent.call("show_samples", file_id=file["id"], model=base, limit=1)
    question = "I am Maria from Rome. Where is my cotton clock, order number 26508?"
    asked = [{"role": "user", "content": f"{SYSTEM}\n\n{question}"}]
    body = {
        "model": base,
        "training_file": file["id"],
        "suffix": "orders",
        "validation_split": 0.1,
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": 16, "lora_alpha": 32},
        "training": {"max_steps": 40, "batch_size": 32, "learning_rate": 4e-3},
        "distributed": {"nproc_per_node": 1},
        "evaluation": {"prompts": [{"messages": asked}], "max_new_tokens": 40},
    }
    planned = await agent.call("plan", request=body)
    job = await agent.call("submit", request=body, plan_id=planned["plan_id"])
    while job["status"] not in ("succeeded", "failed", "cancelled"):
        job = await agent.call("wait", job_id=job["id"], seconds=50)
    answers = await agent.call("evaluation", job_id=job["id"])
    said = await agent.call("chat", model=job["fine_tuned_model"], messages=asked, max_tokens=40)
    status = await agent.call("status", job_id=job["id"])
    return agent, {
        "job": job,
        "samples": samples["data"],
        "answers": answers["data"][0]["samples"][0],
        "said": said["choices"][0]["message"]["content"],
        "events": [event["message"] for event in status["newest_events"]],
    }


@pytest.mark.slow
def test_an_agent_gets_from_a_table_to_a_verified_adapter_in_twelve_calls(server: Server) -> None:
    client = server.client()
    url = str(client.base_url).removesuffix("/v1/")
    agent, found = used_tools(url, client.api_key, tune)
    assert agent.counted <= MOST_CALLS, agent.called
    assert found["job"]["status"] == "succeeded"
    assert f"The tuned model is {found['job']['fine_tuned_model']}" in "".join(agent.told)
    assert len(found["samples"]) == 1
    assert found["said"] == found["answers"]["tuned"] != found["answers"]["base"]
    assert found["said"].startswith("{")
    verified = [event for event in found["events"] if "served, verified" in event]
    assert verified, found["events"]
