"""Requests for samples of Tinker's clients, answered by inference servers, which get each version
of weights by a new name.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.control.tinker import tinker_samples
from ft_service.control.tinker.tinker_samples import SampleLoop
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.rundir.evaluations import Probe
from ft_service.serving.preview_process import ProjectFullError
from ft_service.serving.server_samples import PREFIX, ServerSampler
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.names import WeightsPath, job_id_of
from ft_service.tinker.saved_weights import PROBES, SamplerProbes, delete_sampler, sampler_key
from tests.support.attempts import HANG_SECONDS, wait_for
from tests.support.bases import SAMPLE
from tests.support.reconciling import PROJECT, add_job, new_store
from tests.support.rest.fake_vllm import FakeVllm, fake_vllm

MODEL = "session-1:train:0"
TOKENS = [1, 2, 3, 4]
TUNED = [-0.1, -0.2, -0.1]
BASE = [-2.0, -3.0, -2.5]
numbers = count()


@dataclass
class Place:
    """A service with inference servers."""

    store: Store
    servers: list[FakeVllm]
    sampler: ServerSampler
    loop: SampleLoop
    adapters: Path
    job: Job

    def save(self, name: str, r: int = 8) -> str:
        """Save weights to sample from; the sampler of them."""
        run = self.loop.places.run(self.job.id)
        run.put(f"{sampler_key(name)}/adapter_config.json", json.dumps({"r": r}).encode())
        run.put(f"{sampler_key(name)}/adapter_model.safetensors", name.encode())
        probes = SamplerProbes(command=1, probes=[Probe(tokens=TOKENS, tuned=TUNED, base=BASE)] * 2)
        run.put(f"{sampler_key(name)}/{PROBES}", probes.model_dump_json().encode())
        return self.sampler_of(str(WeightsPath(MODEL, "sampler_weights", name)))

    def sampler_of(self, path: str | None, project: str = PROJECT) -> str:
        own = f"session-1:sample:{next(numbers)}"
        sampler = TinkerSampler(
            id=own, project_id=project, session_id="session-1", base=SAMPLE.name, model_path=path
        )
        return self.store.tinker.put_sampler(sampler).id

    def put(
        self, sampler: str, params: dict[str, Any], project: str = PROJECT, **request: Any
    ) -> str:
        """Store a request. Returns its id."""
        own = f"{sampler}#{next(numbers)}"
        body = {"prompt": {"chunks": [{"tokens": [2, 3]}]}, "sampling_params": params, **request}
        self.store.tinker.put_sample(
            TinkerSample(id=own, project_id=project, sampler_id=sampler, request=body)
        )
        return own

    def ask(self, sampler: str, params: dict[str, Any], **request: Any) -> Any:
        """The answer to a request: a message, or what it says is wrong."""
        own = self.put(sampler, params, **request)
        wait_for(lambda: own in self.store.tinker.answered([own]))
        sample = self.store.tinker.get_sample(PROJECT, own)
        return pb.SampleResponse.FromString(sample.answer) if sample.answer else sample.error

    def warnings(self) -> list[str]:
        return [
            event.message
            for event in self.store.jobs.list_events(PROJECT, self.job.id).data
            if event.level == "warn"
        ]

    def gap(self, sampler: str) -> float | None:
        return self.store.tinker.get_sampler(PROJECT, sampler).logprob_gap


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = new_store(tmp_path)
    store.tinker.create_session("session-1", PROJECT, None, None)
    with fake_vllm() as one, fake_vllm() as other:
        for vllm in (one, other):
            vllm.base, vllm.logprobs = (
                SAMPLE.name,
                lambda name, tokens: TUNED if name.startswith(PREFIX) else BASE,
            )
        urls = f"{one.url},{other.url}"
        settings = Settings.model_validate(
            {"home": tmp_path, "inference_url": urls, "adapters": tmp_path / "served"}
        )
        sampler = ServerSampler(settings)
        stop = threading.Event()
        loop = SampleLoop(store, sampler, Places(tmp_path), Catalogue([SAMPLE.parent]), Meters())
        place = Place(
            store,
            [one, other],
            sampler,
            loop,
            tmp_path / "served",
            add_job(store, job_id_of(MODEL)),
        )
        threads = [threading.Thread(target=work, args=(stop,)) for work in (loop.run, sampler.run)]
        for thread in threads:
            thread.start()
        yield place
        stop.set()
        for thread in threads:
            thread.join()
    store.close()


def told(message: Any) -> list[tuple[list[int], bool]]:
    """Tokens of each answer, and whether it has ended by itself."""
    stopped = pb.STOP_REASON_STOP
    return [
        (np.frombuffer(s.tokens, "<i4").tolist(), s.stop_reason == stopped)
        for s in message.sequences
    ]


def test_what_is_drawn_and_where_it_ends(place: Place) -> None:
    base = place.sampler_of(None)
    drawn = place.ask(
        base,
        {"max_tokens": 3, "seed": 5, "top_k": 4, "top_p": 0.5, "temperature": 0.5},
        num_samples=2,
    )
    assert told(drawn) == [([4, 5, 6], False), ([5, 7, 9], True)], "token 9 ends the base's answers"
    sent = next(body for vllm in place.servers for body in vllm.bodies)
    asked = {
        "model": SAMPLE.name,
        "prompt": [2, 3],
        "seed": 5,
        "top_k": 4,
        "top_p": 0.5,
        "temperature": 0.5,
        "n": 2,
    }
    assert {name: sent[name] for name in asked} == asked
    assert told(place.ask(base, {"max_tokens": 9, "stop": [6]})) == [([4, 5, 6], True)]
    assert told(place.ask(base, {"max_tokens": 9, "stop": " 7"})) == [([4, 5, 6, 7], True)]
    assert told(place.ask(base, {"max_tokens": 9, "stop": []})) == [(list(range(4, 13)), False)], (
        "not even the base's end"
    )
    assert (
        told(place.ask(base, {"temperature": 0.0}, num_samples=3))
        == [([4, 5, 6, 7, 8, 9], True)] * 3
    )
    assert place.ask(base, {"max_tokens": 99})["category"] == "user"


@pytest.mark.parametrize("answers", [1, 2])
def test_log_probabilities(place: Place, answers: int) -> None:
    wanted = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 3,
        "num_samples": answers,
    }
    message = place.ask(place.save("one"), {"max_tokens": 2}, **wanted)
    assert len(message.sequences) == answers
    nothing, known = np.frombuffer(message.prompt_logprobs, "<f4")
    assert (np.isnan(nothing), float(known)) == (True, pytest.approx(TUNED[0]))
    assert np.frombuffer(message.sequences[0].logprobs, "<f4").tolist() == [-0.5, -0.5]
    top = message.sequences[0].topk_sampled_logprobs
    assert np.frombuffer(top.token_ids, "<i4").reshape(2, 3).tolist() == [[0, 4, 1], [0, 5, 1]]
    assert np.frombuffer(message.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 0, 3]


def test_each_version_has_a_name_and_goes_when_it_is_not_used(place: Place) -> None:
    first = place.save("one")
    second = place.save("two")
    for sampler in (first, second):
        assert told(place.ask(sampler, {"max_tokens": 1})) == [([4], False)]
    loaded = {name: folder for vllm in place.servers for name, folder in vllm.loaded.items()}
    assert sorted(
        (folder / "adapter_model.safetensors").read_bytes() for folder in loaded.values()
    ) == [b"one", b"two"]
    assert wait_for(lambda: [place.gap(own) for own in (first, second)] == [pytest.approx(0.0)] * 2)
    assert place.warnings() == []

    [old] = [
        name
        for name, folder in loaded.items()
        if (folder / "adapter_model.safetensors").read_bytes() == b"one"
    ]
    os.utime(place.adapters / old, (0, 0))
    place.sampler.unload_unused()
    left = {name for vllm in place.servers for name in vllm.loaded}
    assert left == loaded.keys() - {old}
    assert not (place.adapters / old).exists()
    assert told(place.ask(first, {"max_tokens": 1})) == [([4], False)], "it comes back"
    for vllm in place.servers:
        vllm.loaded.clear()  # they have restarted
    assert told(place.ask(first, {"max_tokens": 1})) == [([4], False)]

    delete_sampler(place.loop.places.run(place.job.id), "one")
    assert "no saved weights" in place.ask(first, {"max_tokens": 1})["error"]
    again = place.save("one")  # other weights of the same name
    assert told(place.ask(again, {"max_tokens": 1})) == [([4], False)]


def test_a_server_that_ignores_the_weights_is_found_out(place: Place) -> None:
    for vllm in place.servers:
        vllm.logprobs = lambda name, tokens: BASE
    sampler = place.save("one")
    place.ask(sampler, {"max_tokens": 1})
    wait_for(lambda: place.gap(sampler) is not None)
    assert place.gap(sampler) == pytest.approx(np.mean(np.subtract(TUNED, BASE)))
    [text] = place.warnings()
    assert "the server answers with the base, not with the adapter" in text


def test_a_refusal_is_the_answer_in_the_servers_words(place: Place) -> None:
    assert (
        "LoRA rank 64 is greater than max_lora_rank 16"
        in place.ask(place.save("large", r=64), {"max_tokens": 1})["error"]
    )


def test_requests_wait_for_a_server(place: Place) -> None:
    for vllm in place.servers:
        vllm.status = 503
    base = place.sampler_of(None)
    answers = list[Any]()
    thread = threading.Thread(target=lambda: answers.append(place.ask(base, {"max_tokens": 1})))
    thread.start()
    wait_for(lambda: any(vllm.bodies for vllm in place.servers))
    for vllm in place.servers:
        vllm.status = None
    thread.join()
    assert told(answers[0]) == [([4], False)]


def test_probes_are_asked_one_by_one_and_before_samples(place: Place) -> None:
    """vLLM 0.32 on processors ends when it scores a prompt by an adapter beside other requests."""
    guard = threading.Condition()
    under_way = list[list[int]]()
    beside = list[list[int]]()
    ended = list[list[int]]()

    def logprobs(name: str, tokens: list[int]) -> list[float]:
        with guard:
            under_way.append(tokens)
            guard.notify_all()
            if tokens == TOKENS and guard.wait_for(
                lambda: len(under_way) > 1, 0.3
            ):  # gives others time to come
                beside.extend(under_way)
            under_way.remove(tokens)
            ended.append(tokens)
        return TUNED

    for vllm in place.servers:
        vllm.logprobs = logprobs
    sampler = place.save("one")
    asked = [place.put(sampler, {"max_tokens": 1}) for _ in range(3)]
    wait_for(lambda: place.store.tinker.answered(asked) == set(asked))
    assert beside == []
    assert ended == [TOKENS, TOKENS, *[[2, 3]] * 3]


def test_comparisons_of_a_project_hold_up_no_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are compared at once wait for their project's places, which its chats have."""
    monkeypatch.setattr(tinker_samples, "MEASURED_OF_PROJECT", 1)
    go = threading.Event()
    measured = list[str]()
    measure = SampleLoop._measure

    def slow(self: SampleLoop, sampler: TinkerSampler, *given: Any) -> None:
        measured.append(sampler.id)
        go.wait(HANG_SECONDS)
        measure(self, sampler, *given)

    monkeypatch.setattr(SampleLoop, "_measure", slow)
    many = [place.put(place.save(name), {"max_tokens": 1}) for name in ("one", "two", "three")]
    other = place.store.projects.create_project(name="other", organization="local").id
    one = place.put(place.sampler_of(None, other), {"max_tokens": 1}, other)
    wait_for(lambda: one in place.store.tinker.answered([one]))
    # By a thread, which may begin later than the other project has its answer.
    wait_for(lambda: measured)
    assert len(measured) == 1
    go.set()
    wait_for(lambda: place.store.tinker.answered(many) == set(many))


def test_a_project_with_many_requests_leaves_places_to_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_samples, "AT_ONCE", 3)
    monkeypatch.setattr(tinker_samples, "AT_ONCE_OF_PROJECT", 2)
    other = place.store.projects.create_project(name="other", organization="local").id
    go = threading.Event()
    waiting = [2, 3]
    for vllm in place.servers:
        vllm.logprobs = lambda name, tokens: (
            [0.0] if tokens != waiting or go.wait(HANG_SECONDS) else []
        )
    many = [place.put(place.sampler_of(None), {"max_tokens": 1}) for _ in range(9)]
    prompt = {"chunks": [{"tokens": [5, 6]}]}
    one = place.put(place.sampler_of(None, other), {"max_tokens": 1}, other, prompt=prompt)
    try:
        wait_for(lambda: one in place.store.tinker.answered([one]))
        assert not place.store.tinker.answered(many)
    finally:
        go.set()
    wait_for(lambda: place.store.tinker.answered(many) == set(many))


def test_a_project_without_a_place_holds_up_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are older, and more than are looked at together.

    They are refused, since its chats have its places.
    """
    monkeypatch.setattr(tinker_samples, "AT_ONCE", 3)
    other = place.store.projects.create_project(name="other", organization="local").id
    submit = place.sampler.submit
    is_full = threading.Event()
    is_full.set()

    def submit_unless_full(*order: Any, project_id: str, **more: Any) -> None:
        if project_id == PROJECT and is_full.is_set():
            raise ProjectFullError("64 requests of this project are under way.")
        submit(*order, project_id=project_id, **more)

    monkeypatch.setattr(place.sampler, "submit", submit_unless_full)
    many = [place.put(place.sampler_of(None), {"max_tokens": 1}) for _ in range(9)]
    for _ in range(2):
        one = place.put(place.sampler_of(None, other), {"max_tokens": 1}, other)
        wait_for(lambda one=one: one in place.store.tinker.answered([one]))
        assert not place.store.tinker.answered(many)
    is_full.clear()
    wait_for(lambda: place.store.tinker.answered(many) == set(many))
