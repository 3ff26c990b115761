"""Reinforcement learning whose answers vLLM itself samples, with every step's weights as an adapter of a name of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ft_service.reinforcement.step_records import read_record, recorded_steps
from ft_service.serving.server_samples import PREFIX
from tests.support.bases import SAMPLE
from tests.support.rollouts import save_prompts
from tests.support.service import Server, upload, wait_until
from tests.support.vllm_server import ABSENT, VLLM, vllm_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(not VLLM, reason=ABSENT)]
STEPS = 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_serving(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture
def server(url: str, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "home").mkdir()
    server = Server(tmp_path / "home", SAMPLE.parent, FT_INFERENCE_URL=url, FT_ADAPTERS=str(tmp_path / "served"))
    server.start()
    yield server
    server.stop()


def test_answers_of_vllm_are_trained_on(server: Server, url: str, tmp_path: Path) -> None:
    client = server.client()
    save_prompts(tmp_path / "prompts.jsonl", 8)
    grader = {
        "type": "text_similarity",
        "name": "close",
        "input": "{{ sample.output_text }}",
        "reference": "{{ item.answer }}",
        "evaluation_metric": "fuzzy_match",
    }
    hyperparameters = {"batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    body: dict[str, Any] = {
        "model": SAMPLE.name,
        "training_file": upload(client, tmp_path / "prompts.jsonl"),
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}},
        "precision": {"default": "bf16", "compute": "fp32"},
        "training": {"max_length": 64, "max_steps": STEPS, "learning_rate": 1e-3},
        "seed": 1,
    }
    created: Any = client.post("/fine_tuning/jobs", body=body, cast_to=object)
    wait_until(client, created["id"], "succeeded")
    run = server.run(created["id"])
    assert recorded_steps(run) == list(range(1, STEPS + 2))
    record = read_record(run, 2)
    assert record is not None
    assert all(answer.text or len(answer.tokens) == 1 for answer in record.answers), "texts come with the tokens"
    events: list[Any] = list(client.fine_tuning.jobs.list_events(created["id"], limit=100))
    measured = {event.data["step"]: event.data for event in reversed(events) if event.type == "metrics"}
    assert measured.keys() == set(range(1, STEPS + 1))
    trained = [metrics for metrics in measured.values() if metrics["completions/trained"]]
    assert trained
    assert max(metrics["sampler/logprob_gap"] for metrics in trained) < 0.02, "vLLM samples from the weights that are trained"
    loaded = {card["id"] for card in httpx2.get(f"{url}/models", trust_env=False).json()["data"]}
    assert len([name for name in loaded if name.startswith(PREFIX)]) == STEPS, "each step's under a name of its own"
