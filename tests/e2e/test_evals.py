"""A run of an eval on a real server that is killed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import wait_for
from tests.support.rest.receiver import Receiver, receiving
from tests.support.service import SECONDS, Server

ITEMS = 40
JSON = {"content-type": "application/json"}
CRITERION: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.text }}",
    "operation": "eq",
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An inference server that says what it is told."""

    def echo(arrived: Any) -> Any:
        said = json.loads(arrived.body)["messages"][0]["content"]
        choice = {"index": 0, "finish_reason": "stop", "message": {"content": said}}
        return (200, JSON, iter([json.dumps({"choices": [choice]}).encode()]))

    with receiving() as receiver:
        receiver.answer = echo
        yield receiver


@pytest.mark.slow
def test_a_run_goes_on_after_its_server_was_killed(
    models: Path, tmp_path: Path, receiver: Receiver
) -> None:
    server = Server(tmp_path, models, FT_INFERENCE_URL=f"{receiver.url}/v1")
    server.start()
    client = server.client()
    made = client.evals.create(
        data_source_config={
            "type": "custom",
            "item_schema": {"type": "object"},
            "include_sample_schema": True,
        },
        testing_criteria=[CRITERION],
    )
    content: Any = [{"item": {"text": f"text {number}"}} for number in range(ITEMS)]
    data: Any = {
        "type": "completions",
        "model": "served",
        "source": {"type": "file_content", "content": content},
        "input_messages": {
            "type": "template",
            "template": [{"role": "user", "content": "{{ item.text }}"}],
        },
    }
    usual = receiver.answer

    def one_at_a_time(arrived: Any) -> Any:
        wait_for(lambda: receiver.arrived.qsize() < 20 or killed, SECONDS)
        return usual(arrived)

    killed: list[bool] = []
    receiver.answer = one_at_a_time
    run = client.evals.runs.create(made.id, data_source=data)

    def now() -> Any:
        return client.evals.runs.retrieve(run.id, eval_id=made.id)

    wait_for(lambda: receiver.arrived.qsize() >= 20, SECONDS)
    stored = now().result_counts.passed
    assert 0 < stored < ITEMS
    server.kill()
    killed.append(True)
    server.start()
    client = server.client()
    wait_for(lambda: now().status == "completed", SECONDS)
    assert now().result_counts.passed == ITEMS
    assert receiver.arrived.qsize() < ITEMS + 20, "what was stored is not asked again"
    items = list(client.evals.runs.output_items.list(run.id, eval_id=made.id, limit=100))
    assert sorted(item.datasource_item_id for item in items) == list(range(ITEMS))
    assert server.stop() == 0
