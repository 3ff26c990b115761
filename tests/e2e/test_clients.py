"""The openai client of every major version, from a data file to an eval of the tuned model: a real
server, real jobs on the sample base.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.bases import SAMPLE
from tests.support.older_clients import older_client
from tests.support.service import Server

PROGRAM = Path(__file__).parents[1] / "support/programs/client_job.py"
DATA = SAMPLE.parents[1] / "data"
HELD = 4
OPTIONS: dict[str, Any] = {
    "precision": {"default": "nf4", "compute": "fp32"},
    "lora": {"r": 16, "lora_alpha": 32},
    "training": {"max_steps": 40, "batch_size": 32, "learning_rate": 4e-3},
    "checkpoint": {"save_steps": 20},
    "distributed": {"nproc_per_node": 1},
}
"""Of a job after which the model answers in JSON, as its data does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(SAMPLE, models / SAMPLE.name)
    server = Server(tmp_path_factory.mktemp("home"), models)
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out samples as items of an eval."""
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    lines = (DATA / "heldout.jsonl").read_text().splitlines()[:HELD]
    chats = [json.loads(line)["messages"] for line in lines]
    found = [
        {"item": {"question": chat[-2]["content"], "answer": chat[-1]["content"]}} for chat in chats
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in found))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("major", ["1", "2", "3"])
def test_from_a_file_to_an_eval_of_the_tuned_model(server: Server, items: Path, major: str) -> None:
    client = server.client()
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": str(client.base_url),
        "OPENAI_API_KEY": client.api_key,
        **({} if openai.__version__.startswith(major) else {"PYTHONPATH": older_client(major)}),
    }
    result = subprocess.run(
        [
            *(sys.executable, str(PROGRAM), str(DATA / "train.jsonl"), str(items)),
            *(SAMPLE.name, json.dumps(OPTIONS)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["version"].startswith(f"{major}.")
    assert told["status"] == "succeeded"
    assert told["model"].startswith(f"ft:{SAMPLE.name}:local:clients:")
    assert told["checkpoints"] == [40, 20]
    assert len(told["events"]) > 40
    assert told["chat"]
    assert told["streamed"] == told["chat"]
    assert told["response"].startswith(told["chat"])
    base, tuned = told["evals"]
    assert [base["status"], tuned["status"]] == ["completed"] * 2
    assert [base["model"], tuned["model"]] == [SAMPLE.name, told["model"]]
    assert base["counts"][0] == tuned["counts"][0] == len(tuned["answers"]) == HELD
    assert tuned["counts"] == [HELD, HELD, 0, 0]
    assert base["counts"][1] < HELD, "it has learnt to answer so"
