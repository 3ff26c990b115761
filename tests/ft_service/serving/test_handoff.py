"""Tuned models come to every replica, are verified once, and go when they are deleted, whichever
side was away.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import text

from ft_service.control.cleanup.erasing import erase
from ft_service.errors import FtError, NotFoundError, SpecError, UnavailableError
from ft_service.jobs.states import Job, State
from ft_service.meters import Meters
from ft_service.rundir.evaluations import PROBES, Probe, Probes
from ft_service.serving import handoff as handoff_module
from ft_service.serving.handoff import Handoff, ends_of_handed_over
from ft_service.serving.inference_server import InferenceServer
from ft_service.settings import Settings
from ft_service.spec import BaseModelRef, LoraOptions
from ft_service.storage.locations import Places
from ft_service.store.sql import Store
from tests.support.reconciling import PROJECT, add_job, new_store
from tests.support.rest.fake_vllm import FakeVllm, fake_vllm

TUNED = [-0.1, -0.2, -0.1]
BASE = [-2.0, -3.0, -2.5]
TOKENS = [1, 2, 3, 4]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path)
    yield store
    store.close()


@pytest.fixture
def replicas() -> Iterator[list[FakeVllm]]:
    with fake_vllm() as one, fake_vllm() as other:
        for vllm in (one, other):
            vllm.key = "inside"
            vllm.logprobs = lambda name, tokens: TUNED
        yield [one, other]


@pytest.fixture
def settings(tmp_path: Path, replicas: list[FakeVllm]) -> Settings:
    urls = ",".join(vllm.url for vllm in replicas)
    return Settings.model_validate(
        {
            "home": tmp_path,
            "inference_url": urls,
            "inference_api_key": "inside",
            "adapters": tmp_path / "served",
        }
    )


def succeeded(
    store: Store,
    home: Path,
    *,
    job_id: str = "ftjob-1",
    r: int = 8,
    probes: bool = True,
    lora: LoraOptions | None = None,
    base: Path = Path("/models/tiny"),
    **config: object,
) -> Job:
    """`config`: more of the adapter's."""
    job = add_job(
        store, job_id, lora=lora or LoraOptions(), model=BaseModelRef(name="tiny", path=str(base))
    )
    store_state(store, job)
    run = Places(home).run(job.id)
    run.put("adapter/adapter_config.json", json.dumps({"r": r, **config}).encode())
    run.put("adapter/adapter_model.safetensors", b"weights")
    if probes:
        document = Probes(step=1, probes=[Probe(tokens=TOKENS, tuned=TUNED, base=BASE)] * 4)
        run.put(PROBES, document.model_dump_json().encode())
    return store.jobs.get_job(PROJECT, job.id)


def store_state(store: Store, job: Job) -> None:
    with store.writing() as connection:
        connection.execute(
            text("UPDATE jobs SET state = :s WHERE id = :j"),
            {"s": State.SUCCEEDED.value, "j": job.id},
        )


def told(store: Store, job: Job) -> list[str]:
    events = store.jobs.list_events(PROJECT, job.id, limit=50).data
    return [
        event.message
        for event in reversed(events)
        if "erved" in event.message or "server" in event.message
    ]


def test_the_folder_is_there_before_any_model_is(
    tmp_path: Path, store: Store, settings: Settings
) -> None:
    """A kubelet that mounts a part of a volume for the server creates a missing one as root's,
    which the service cannot use.
    """
    stop = threading.Event()
    stop.set()
    handoff_module.run(
        settings.model_copy(update={"adapters": tmp_path / "shared/adapters"}),
        store,
        Meters(),
        stop,
    )
    assert (tmp_path / "shared/adapters").is_dir()


def test_a_tuned_model_is_published_loaded_by_all_and_verified_once(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    assert not any(vllm.loaded for vllm in replicas)
    job = succeeded(store, tmp_path)
    name = str(job.tuned_name)
    handoff.look()
    assert [vllm.loaded for vllm in replicas] == [{name: tmp_path / "served" / name}] * 2
    assert (tmp_path / "served" / name / "adapter_model.safetensors").read_bytes() == b"weights"
    [message] = told(store, job)
    assert message.startswith("Served, verified: 4 prompts' log-probabilities lie 0.000 nats")

    replicas[0].loaded.clear()  # it has restarted, and so has the service
    Handoff(settings, store, tmp_path / "served").look()
    assert name in replicas[0].loaded
    assert len(told(store, job)) == 1

    store.models.delete_model(PROJECT, name)
    handoff.look()
    assert not any(vllm.loaded for vllm in replicas)
    assert not (tmp_path / "served" / name).exists()


def test_the_model_of_a_deleted_job_goes_too_also_if_the_replica_or_the_service_was_away(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    job = succeeded(store, tmp_path, job_id="ftjob-1")
    other = succeeded(store, tmp_path, job_id="ftjob-2")
    names = {str(job.tuned_name), str(other.tuned_name)}
    Handoff(settings, store, tmp_path / "served").look()
    assert [set(vllm.loaded) for vllm in replicas] == [names] * 2
    with store.writing() as connection:
        connection.execute(text("UPDATE jobs SET finished_at = 1"))
    store.erasure.delete_job(PROJECT, job.id)
    for _ in erase(settings, store, Places(tmp_path)):
        pass
    Handoff(settings, store, tmp_path / "served").look()  # of a service that has started since
    assert [set(vllm.loaded) for vllm in replicas] == [{str(other.tuned_name)}] * 2
    assert [path.name for path in (tmp_path / "served").iterdir()] == [str(other.tuned_name)]


def test_an_adapter_that_is_loaded_and_ignored_is_found_out(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    replicas[0].logprobs = lambda name, tokens: BASE
    job = succeeded(store, tmp_path)
    Handoff(settings, store, tmp_path / "served").look()
    assert told(store, job)[0].startswith("The server answers with the base, not with the adapter")


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT = [{"role": "user", "content": [PICTURE]}, {"role": "assistant", "content": "a square"}]


def asked_with_an_image(store: Store, home: Path, *, alone: bool = False) -> Job:
    """A job with a probe that shows an image, beside those of text unless `alone`."""
    job = succeeded(store, home)
    probe = Probe(tokens=TOKENS, tuned=TUNED, base=BASE)
    probes = [*([] if alone else [probe]), probe.model_copy(update={"chat": CHAT})]
    run = Places(home).run(job.id)
    run.put(PROBES, Probes(step=1, probes=probes).model_dump_json().encode())
    return job


def test_a_chat_with_an_image_is_compared_by_the_tokens_behind_it(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    for vllm in replicas:
        vllm.chat_tokens = [7, 7, 7, *TOKENS]
        vllm.logprobs = lambda name, tokens: TUNED if len(tokens) == 4 else [-9, -9, -9, *TUNED]
    job = asked_with_an_image(store, tmp_path)
    Handoff(settings, store, tmp_path / "served").look()
    [message] = told(store, job)
    assert message.startswith(
        "Served, verified: 2 prompts' log-probabilities (1 with an image) lie 0.000 nats"
    )
    asked = next(body for body in replicas[0].bodies if "messages" in body)
    assert asked == {
        **{"model": str(job.tuned_name), "messages": CHAT, "add_generation_prompt": False},
        **{"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
    }


def test_a_server_that_sees_another_image_is_found_out(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    for vllm in replicas:
        vllm.chat_tokens = [7, 7, 7, *TOKENS]
        vllm.logprobs = lambda name, tokens: [-9.0] * 6
    job = asked_with_an_image(store, tmp_path, alone=True)
    Handoff(settings, store, tmp_path / "served").look()
    assert told(store, job)[0].startswith("The server's answers are not the trained model's")


@pytest.mark.parametrize("rendered", [[], [7, 7, 1, 2, 8, 4], [3, 4]])
def test_what_a_server_does_not_tell_of_chats_is_left_out(
    rendered: list[int],
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
) -> None:
    """It tells nothing, as SGLang; its template writes other tokens, or fewer."""
    for vllm in replicas:
        vllm.chat_tokens = rendered
        vllm.logprobs = lambda name, tokens: [*TUNED, *TUNED][-len(tokens) + 1 :]
    job = asked_with_an_image(store, tmp_path)
    Handoff(settings, store, tmp_path / "served").look()
    [message] = told(store, job)
    assert message.startswith("Served, verified: 1 prompts' log-probabilities lie")


def test_a_job_of_images_alone_is_not_verified_by_a_server_that_tells_nothing_of_them(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    job = asked_with_an_image(store, tmp_path, alone=True)
    Handoff(settings, store, tmp_path / "served").look()
    [message] = told(store, job)
    assert message.startswith("Served, not verified: all that could be compared has images")


def test_a_refusal_is_told_in_the_servers_words_and_not_repeated(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    job = succeeded(store, tmp_path, r=64)
    handoff = Handoff(settings, store, tmp_path / "served")
    for _ in range(3):
        handoff.look()
    assert replicas[0].asked.count("/v1/load_lora_adapter") == 1
    [message] = told(store, job)
    assert "LoRA rank 64 is greater than max_lora_rank 16" in message


def test_an_adapter_on_experts_is_put_in_vllms_form_and_where_that_is_refused_merging_is_said(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The form itself: tests/workers/tasks/test_served_experts.py."""
    asked: list[list[str]] = []

    def worker(module: str, arguments: list[str]) -> dict[str, int]:
        asked.append([module, *arguments])
        Path(arguments[1], "adapter_config.json").write_text(json.dumps({"r": 64}))
        return {"r": 64}

    monkeypatch.setattr(handoff_module, "run_worker", worker)
    stacks = ["mlp.experts.gate_up_proj"]
    job = succeeded(
        store, tmp_path, lora=LoraOptions(target_parameters=stacks), target_parameters=stacks
    )
    Handoff(settings, store, tmp_path / "served").look()
    [[module, source, _, base]] = asked
    assert (module, base) == ("workers.tasks.pad_ranks", "/models/tiny")
    assert source == str(Places(tmp_path).run(job.id).path("adapter"))
    [message] = told(store, job)
    assert "max_lora_rank 16" in message
    assert "on GPUs only: merge the tuned model (ft export --format merged)" in message


@pytest.mark.parametrize(
    "worker",
    [lambda *_: {"ends": [7, 9]}, lambda *_: {"ends": []}, Mock(side_effect=SpecError("no"))],
)
def test_where_answers_end_is_kept_with_an_adapter_if_it_is_known(
    tmp_path: Path, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    """And the model is handed over if not."""
    monkeypatch.setattr(handoff_module, "run_worker", worker)
    name = str(succeeded(store, tmp_path, base=tmp_path).tuned_name)
    Handoff(settings, store, tmp_path / "served").look()
    assert (tmp_path / "served" / name / "adapter_model.safetensors").is_file()
    expected = [] if isinstance(worker, Mock) else worker()["ends"]
    assert ends_of_handed_over(tmp_path / "served", name) == expected


def test_a_replica_that_is_away_gets_it_later(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    away = replicas[1].key
    replicas[1].key = "another"
    job = succeeded(store, tmp_path, probes=False)
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    assert replicas[0].loaded
    assert not replicas[1].loaded
    assert told(store, job)[0].startswith("Served, not verified")
    replicas[1].key = away
    handoff.look()
    assert replicas[1].loaded


@pytest.mark.parametrize(
    "error", [UnavailableError("The database is away."), NotFoundError("There is no job ftjob-1.")]
)
def test_a_model_whose_job_could_not_be_read_is_handed_over_later(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
    error: FtError,
) -> None:
    """An outage between two queries ends the look; a job that has gone, by a backup that was
    restored, does not.
    """
    job = succeeded(store, tmp_path)
    handoff = Handoff(settings, store, tmp_path / "served")

    def fails(*_: object) -> Job:
        raise error

    with monkeypatch.context() as outage:
        outage.setattr(store.jobs, "get_job", fails)
        with contextlib.suppress(UnavailableError):
            handoff.look()
    assert not replicas[0].loaded
    handoff.look()
    assert set(replicas[0].loaded) == {str(job.tuned_name)}


BY_BASE = "The server answers with the base, not with the adapter"


def times_asked(vllm: FakeVllm, path: str) -> int:
    return vllm.asked.count(f"/v1/{path}")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_replica_that_loads_and_cannot_answer_yet_is_verified_once_it_can(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm], restarts: bool
) -> None:
    """The service may restart between load and comparison."""
    busy, other = replicas
    busy.status = 503
    busy.logprobs = lambda name, tokens: BASE
    job = succeeded(store, tmp_path)
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    assert [message[:16] for message in told(store, job)] == ["Served, verified"], (
        "by the other one"
    )
    busy.status = None
    handoff = Handoff(settings, store, tmp_path / "served") if restarts else handoff
    handoff.look()
    assert told(store, job)[-1].startswith(BY_BASE)
    assert times_asked(busy, "load_lora_adapter") == 1
    asked = times_asked(busy, "completions")
    handoff.look()
    Handoff(settings, store, tmp_path / "served").look()
    assert times_asked(busy, "completions") == asked, "it was judged"
    assert times_asked(other, "completions") == 4


def test_a_replica_that_loads_anew_is_verified_anew_even_if_the_service_restarts_before(
    tmp_path: Path, store: Store, settings: Settings, replicas: list[FakeVllm]
) -> None:
    job = succeeded(store, tmp_path)
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    restarted = replicas[0]
    restarted.loaded.clear()
    restarted.status = 503
    handoff.look()
    restarted.status = None
    restarted.logprobs = lambda name, tokens: BASE
    Handoff(settings, store, tmp_path / "served").look()
    assert told(store, job)[-1].startswith(BY_BASE)


def test_an_adapter_that_a_replica_loads_after_its_answer_was_given_up_is_verified(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = InferenceServer.load

    def late(server: InferenceServer, name: str, folder: str) -> None:
        load(server, name, folder)
        raise UnavailableError("timed out")

    monkeypatch.setattr(InferenceServer, "load", late)
    replicas[0].logprobs = lambda name, tokens: BASE
    job = succeeded(store, tmp_path)
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    assert told(store, job) == []
    handoff.look()
    assert told(store, job)[0].startswith(BY_BASE)
    assert [times_asked(vllm, "load_lora_adapter") for vllm in replicas] == [1, 1]


def test_one_adapter_by_which_a_replica_never_answers_keeps_no_other_waiting(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, *others = [succeeded(store, tmp_path, job_id=f"ftjob-{number}") for number in range(3)]
    logprobs = InferenceServer.logprobs

    def answers(server: InferenceServer, name: str, tokens: list[int]) -> list[float]:
        if name == str(stuck.tuned_name):
            raise UnavailableError("timed out")
        return logprobs(server, name, tokens)

    monkeypatch.setattr(InferenceServer, "logprobs", answers)
    handoff = Handoff(settings, store, tmp_path / "served")
    handoff.look()
    assert [len(vllm.loaded) for vllm in replicas] == [3, 3]
    handoff.look()
    assert [len(told(store, job)) for job in others] == [1, 1]
    assert told(store, stuck) == []


@pytest.mark.parametrize("fault", ["base", "refusal", "copy"])
def test_a_verdict_that_could_not_be_told_is_told_once_the_database_is_back(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    replicas: list[FakeVllm],
    fault: str,
) -> None:
    replicas[0].logprobs = replicas[1].logprobs = lambda name, tokens: BASE
    job = succeeded(store, tmp_path, r=64 if fault == "refusal" else 8)
    if fault == "copy":
        (tmp_path / "served").write_text("no folder")
    handoff = Handoff(settings, store, tmp_path / "served")

    def away(*_: object) -> None:
        raise UnavailableError("The database is away.")

    with monkeypatch.context() as outage:
        outage.setattr(store.jobs, "add_events", away)
        with pytest.raises(UnavailableError):
            handoff.look()
    for _ in range(3):
        handoff.look()
    [message] = told(store, job)
    assert {
        "base": BY_BASE,
        "refusal": "max_lora_rank",
        "copy": "could not be put into FT_ADAPTERS",
    }[fault] in message


def test_a_run_directory_that_was_replaced_by_a_link_keeps_no_other_model_waiting(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pods of engines may write to the folder of their project."""
    replaced, other = (
        succeeded(store, tmp_path, job_id=job_id) for job_id in ("ftjob-1", "ftjob-2")
    )
    run = Places(tmp_path).run_of_project(PROJECT, replaced.id).root
    run.rename(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))
    handoff = Handoff(settings, store, tmp_path / "served")
    for _ in range(2):
        handoff.look()
    assert [set(vllm.loaded) for vllm in replicas] == [{str(other.tuned_name)}] * 2
    assert told(store, replaced) == []
    assert caplog.text.count("was replaced by a link") == 1, "it is not logged every two seconds"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_replica_that_answers_in_another_form_keeps_no_other_waiting(
    tmp_path: Path,
    store: Store,
    settings: Settings,
    replicas: list[FakeVllm],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    answer = replicas[0].answer
    strange = {"choices": []} if path == "/v1/completions" else "<html>The page of a proxy.</html>"

    def strangely(method: str, asked: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, strange) if asked == path else answer(method, asked, body)

    monkeypatch.setattr(replicas[0], "answer", strangely)
    job = succeeded(store, tmp_path)
    Handoff(settings, store, tmp_path / "served").look()
    assert set(replicas[1].loaded) == {str(job.tuned_name)}
    assert told(store, job)[-1].startswith("Served, verified")
    assert any("in another form" in message for message in told(store, job)) is (
        path == "/v1/completions"
    )
