"""OpenAI's quickstart of fine-tuning to its last line, on the sample base: by the tuned name
answers what was evaluated.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.bases import SAMPLE
from tests.support.service import Server, upload, wait_until

DATA = SAMPLE.parents[1] / "data"
ASKED = 12
LIMIT = 40


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    shutil.copytree(SAMPLE, folder / SAMPLE.name)
    return folder


def previews(server: Server) -> Iterator[int]:
    """Processes of the server that answer."""
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if b"workers.serving" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield int(pid)


@pytest.mark.slow
def test_the_accuracy_through_the_api_is_that_of_the_evaluation(server: Server) -> None:
    client = server.client()
    chats = [
        json.loads(line)["messages"]
        for line in (DATA / "heldout.jsonl").read_text().splitlines()[:ASKED]
    ]
    prompts = [{"messages": chat[:-1], "reference": chat[-1]["content"]} for chat in chats]
    options: dict[str, Any] = {
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": 16, "lora_alpha": 32},
        "training": {"max_steps": 40, "batch_size": 32, "learning_rate": 4e-3},
        "distributed": {"nproc_per_node": 1},
        "evaluation": {
            "prompts": prompts,
            "max_new_tokens": LIMIT,
            "metrics": ["exact_match", "rouge_l"],
        },
    }
    file = upload(client, DATA / "train.jsonl")
    job = client.fine_tuning.jobs.create(model=SAMPLE.name, training_file=file, extra_body=options)
    job = wait_until(client, job.id, "succeeded")
    tuned = job.fine_tuned_model
    assert tuned is not None

    def ask(messages: Any) -> str:
        answer = client.chat.completions.create(
            model=tuned, messages=messages, temperature=0, max_tokens=LIMIT
        )
        return answer.choices[0].message.content or ""

    def streamed(messages: Any) -> str:
        chunks = client.chat.completions.create(
            model=tuned, messages=messages, temperature=0, max_tokens=LIMIT, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    told = client.get(f"/fine_tuning/jobs/{job.id}/evaluation", cast_to=httpx2.Response).json()
    newest = told["data"][0]
    assert newest["step"] == 40
    answers = [(streamed if number % 2 else ask)(chat[:-1]) for number, chat in enumerate(chats)]
    assert answers == [sample["tuned"] for sample in newest["samples"]]
    right = sum(answer == chat[-1]["content"] for answer, chat in zip(answers, chats, strict=True))
    assert right / ASKED == pytest.approx(newest["metrics"]["exact_match"])
    assert answers != [sample["base"] for sample in newest["samples"]], "it has learnt something"
    events = client.fine_tuning.jobs.list_events(job.id, limit=5).data
    assert any(event.message.startswith("In the preview: served, verified") for event in events)

    (pid,) = previews(server)
    os.kill(pid, signal.SIGKILL)
    assert ask(chats[0][:-1]) == answers[0]
    (other,) = previews(server)
    assert other != pid
