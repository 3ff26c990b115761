"""The hand-off to vLLM itself, and samples by it (tests/support/vllm_server.py says how it is
found).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ft_service.ids import new_id
from ft_service.jobs.states import Job, State
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.serving.handoff import Handoff
from ft_service.serving.inference_server import InferenceServer
from ft_service.serving.preview import PreviewModel
from ft_service.serving.server_samples import PREFIX, ServerSampler
from ft_service.settings import Settings
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.tinker.sample_calls import Sampled, parse_sample_request
from tests.support.bases import SAMPLE
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, new_store, spec_of
from tests.support.records import new_job
from tests.support.training.adapters import save_adapter
from tests.support.vllm_server import ABSENT, VLLM, vllm_serving

PROBED = [
    [5, 70, 9, 200, 31, 8, 6, 77, 12],
    [90, 4, 310, 22, 15, 61],
    [44, 45, 46, 300, 301, 17],
    [8, 260, 131, 9, 99],
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason=ABSENT),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_serving(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def handoff(store: Store, tmp_path: Path, url: str) -> Iterator[Handoff]:
    settings = Settings.model_validate(
        {"home": tmp_path, "inference_url": url, "adapters": tmp_path / "served"}
    )
    handoff = Handoff(settings, store, tmp_path / "served")
    yield handoff
    handoff.close()


def succeeded(store: Store, home: Path, measured: Path | None = None, **options: Any) -> Job:
    """A job with an adapter, and the probes of the one at `measured`. None: its own."""
    job_id = new_id("ftjob-")
    job = create_job(
        store,
        new_job(
            id=job_id,
            project_id=PROJECT,
            state=State.SUCCEEDED,
            stored_spec=StoredSpec.of(spec_of(job_id)),
        ),
    )
    run = Places(home).run(job.id)
    adapter = save_adapter(SAMPLE, run.path("adapter"), **options)
    run.put(PROBES, Probes(step=1, probes=probes(measured or adapter)).model_dump_json().encode())
    return job


def probes(adapter: Path) -> list[Probe]:
    base: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter)).eval()
    found = []
    for tokens in PROBED:
        tuned = logprobs(model, tokens)
        with model.disable_adapter():
            found.append(Probe(tokens=tokens, tuned=tuned, base=logprobs(model, tokens)))
    return found


def logprobs(model: Any, tokens: list[int]) -> list[float]:
    ids = torch.tensor(tokens)
    with torch.no_grad():
        return (
            model(input_ids=ids[None])
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, ids[1:, None])[:, 0]
            .tolist()
        )


def told(store: Store, job: Job) -> list[str]:
    events = store.jobs.list_events(PROJECT, job.id, limit=50).data
    return [
        event.message for event in events if "erved" in event.message or "server" in event.message
    ]


def test_vllm_answers_as_the_trainer_and_it_is_said_with_both_distances(
    store: Store, tmp_path: Path, handoff: Handoff, url: str
) -> None:
    plain = succeeded(store, tmp_path, r=4, lora_alpha=32)
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 8, "down_proj": 2},
        "alpha_pattern": {"down_proj": 64},
    }
    with_patterns = succeeded(store, tmp_path, r=4, lora_alpha=32, **patterns)
    another = succeeded(
        store, tmp_path, tmp_path / "runs" / plain.id / "adapter", r=4, lora_alpha=32, **patterns
    )
    too_large = succeeded(store, tmp_path, r=32)
    handoff.look()
    for job in (plain, with_patterns):
        (message,) = told(store, job)
        assert message.startswith(
            "Served, verified: 4 prompts' log-probabilities lie 0.000 nats"
        ), message
    (message,) = told(store, another)
    assert "not the trained model's" in message
    (message,) = told(store, too_large)
    assert "rank" in message

    server = InferenceServer(url, None)
    name = str(plain.tuned_name)
    server.unload(name)  # as after a restart
    handoff.look()
    assert name in server.models()
    assert len(told(store, plain)) == 1
    ours = {str(job.tuned_name) for job in (plain, with_patterns, another)}
    for name in ours:
        store.models.delete_model(PROJECT, name)
    handoff.look()
    assert not ours & server.models()
    server.close()


def test_tinkers_samples_are_the_weights_own(tmp_path: Path, url: str) -> None:
    """Log-probabilities of the prompt, and of what was drawn, are those that plain PEFT computes of
    the same tokens.
    """
    settings = Settings.model_validate(
        {"home": tmp_path, "inference_url": url, "adapters": tmp_path / "served"}
    )
    sampler = ServerSampler(settings)
    stop = threading.Event()
    adapter = save_adapter(SAMPLE, tmp_path / "weights", r=4, lora_alpha=32)
    base: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter)).eval()

    def ask(params: dict[str, Any], **request: Any) -> Sampled:
        body = {
            "prompt": {"chunks": [{"tokens": PROBED[0]}]},
            "sampling_params": {"max_tokens": 6, **params},
            **request,
        }
        sampled = Sampled(parse_sample_request(body))
        parts = queue.SimpleQueue[dict[str, Any]]()
        sampler.submit(
            PreviewModel(str(SAMPLE), name=SAMPLE.name),
            sampled.request.order(str(adapter)),
            parts.put,
        )
        while not sampled.done:
            part = parts.get(timeout=120)
            assert part["kind"] != "error", part["error"].message
            sampled.take(part)
        return sampled

    given = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "num_samples": 2,
    }
    drawn = ask({"seed": 5, "temperature": 0.8, "top_p": 0.9, "stop": []}, **given)
    prompt = [drawn.prompt[place][0] for place in range(1, len(PROBED[0]))]
    assert prompt == pytest.approx(logprobs(model, PROBED[0]), abs=1e-3)
    for tokens, own, top in zip(drawn.tokens, drawn.logprobs, drawn.top, strict=True):
        assert len(tokens) == 6
        assert own == pytest.approx(logprobs(model, [*PROBED[0], *tokens])[-6:], abs=1e-3), (
            "at temperature 1, nothing left out"
        )
        assert all(len(pairs) == 2 and pairs[0][1] >= pairs[1][1] for pairs in top)
    assert drawn.tokens[0] != drawn.tokens[1]
    assert (
        ask({"seed": 5, "temperature": 0.8, "top_p": 0.9, "stop": []}, **given).tokens
        == drawn.tokens
    )
    likeliest = ask({"temperature": 0.0, "stop": []}, num_samples=2).tokens
    assert likeliest[0] == likeliest[1]
    ended = ask({"temperature": 0.0, "stop": [likeliest[0][2]]})
    assert (ended.tokens[0], ended.reasons) == (
        likeliest[0][: likeliest[0].index(likeliest[0][2]) + 1],
        ["stop"],
    )
    stop.set()
    for folder in (tmp_path / "served").glob(f"{PREFIX}*"):
        os.utime(folder, (0, 0))
    sampler.unload_unused()
    server = InferenceServer(url, None)
    assert not [name for name in server.models() if name.startswith(PREFIX)]
    server.close()
    sampler.run(stop)
