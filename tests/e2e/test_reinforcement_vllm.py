"""Reinforcement learning whose answers vLLM itself samples, with every step's weights as an adapter
of a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx2
import pytest

from benchmarks.reinforcement import trained
from ft_service.reinforcement.step_records import read_record, recorded_steps
from ft_service.serving.server_samples import PREFIX
from tests.support.bases import SAMPLE
from tests.support.service import Server
from tests.support.vllm_server import ABSENT, VLLM, vllm_serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM, reason=ABSENT),
]
STEPS = 80
LIMIT = 1800.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_serving(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture
def server(url: str, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "home").mkdir()
    server = Server(
        tmp_path / "home", SAMPLE.parent, FT_INFERENCE_URL=url, FT_ADAPTERS=str(tmp_path / "served")
    )
    server.start()
    yield server
    server.stop()


def test_sums_are_learnt_from_the_rewards_of_vllms_answers(server: Server, url: str) -> None:
    """The examples, as benchmarks/reinforcement.py runs them with the built-in sampler."""
    client = server.client()
    precision = {"default": "bf16", "compute": "fp32"}
    shown = trained(client, "sums-shown.yaml", seed=1, precision=precision)
    job = trained(
        client, "reinforcement.yaml", seed=0, model=shown["model"], precision=precision, limit=LIMIT
    )
    rewards = list(job["train_mean_reward"].values())
    print(f"rewards {rewards[::10]}, {rewards[-1]}; {job['seconds']} s")
    assert len(rewards) == STEPS
    assert fmean(rewards[:2]) < 0.4
    assert fmean(rewards[-5:]) > 0.9

    run = server.run(job["id"])
    assert recorded_steps(run) == list(range(1, STEPS + 2))
    record = read_record(run, STEPS)
    assert record is not None
    assert all(answer.text or len(answer.tokens) == 1 for answer in record.answers), (
        "texts come with the tokens"
    )
    events: list[Any] = list(client.fine_tuning.jobs.list_events(job["id"], limit=100))
    gaps = [
        event.data["sampler/logprob_gap"]
        for event in events
        if event.data and "sampler/logprob_gap" in event.data
    ]
    print(f"trainer and vLLM at most {max(gaps):.2g} nats a token apart")
    assert max(gaps) < 0.02, "vLLM samples from the weights that are trained"
    assert not [
        event.message for event in events if event.level == "warn" and "weights" in event.message
    ]
    loaded = {card["id"] for card in httpx2.get(f"{url}/models", trust_env=False).json()["data"]}
    assert len([name for name in loaded if name.startswith(PREFIX)]) > 1, (
        "each step's under a name of its own"
    )
