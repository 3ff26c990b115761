"""Tinker's wire, with a thread in place of the ranks.

Its own client is in tests/e2e/test_tinker.py.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from api.http import sample_answers
from api.http.dependencies import Services
from api.routes.tinker import training_routes
from ft_service.control.tinker import tinker_models
from ft_service.control.tinker.tinker_models import (
    MODEL_KEY,
    count_bytes,
    ended_text,
    pause_idle,
    remove_unused,
)
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import Job, State
from ft_service.rundir.documents import Desired
from ft_service.storage.locations import Places
from ft_service.store import tinker
from ft_service.store.records import NewKey
from ft_service.tinker import commands
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.bodies import MOST_METADATA_BYTES
from ft_service.tinker.commands import Command, CommandLog, CommandResult
from ft_service.tinker.loss_calls import LossRequest, write_output
from ft_service.tinker.loss_wire import MOST_DATUMS
from ft_service.tinker.names import KEY_PREFIX, job_id_of, request_id
from ft_service.tinker.saved_weights import SavedWeights, WeightsOptions, options_of
from tests.support.rest.service import TRAINING, Service, put_state, run_dir, wait_until
from tests.support.training.loss_messages import loss_message


class Ranks(threading.Thread):
    """What the ranks of all models would do: answer every command, in the order of their
    numbers.
    """

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service, self.stopped = service, threading.Event()
        self.done: list[tuple[str, int, str]] = []
        """(job, number, what) in the order in which it was carried out."""

    def run(self) -> None:
        following: dict[str, int] = {}
        while not self.stopped.wait(0.005):
            for folder in self._service.settings.runs_dir.glob("ftjob-*"):
                log = CommandLog(run_dir(self._service, folder.name))
                while (command := log.command(following.get(folder.name, 0))) is not None:
                    log.put_result(command.seq, answer(command))
                    self.done.append((folder.name, command.seq, command.op))
                    following[folder.name] = command.seq + 1


def answer(command: Command) -> CommandResult:
    match command.op:
        case "forward_backward":
            call = LossRequest.parse(command.body).call(vocabulary=1000, longest=64)
            return CommandResult(
                {},
                write_output([datum.inputs["weights"] for datum in call.data], {"loss:sum": 1.5}),
            )
        case "refused":
            return CommandResult.failed(command.options["error"])
        case "create_model":
            return CommandResult({"model_id": command.options["model_id"], "type": "create_model"})
        case "optim_step":
            return CommandResult(
                {"type": "optim_step", "metrics": {"lr": command.options["learning_rate"]}}
            )
        case op:
            return CommandResult({"path": command.options.get("path"), "type": op})


@pytest.fixture
def ranks(service: Service) -> Iterator[Ranks]:
    thread = Ranks(service)
    thread.start()
    yield thread
    thread.stopped.set()
    thread.join()


def send(
    service: Service, method: str, path: str, key: str | None = None, **options: Any
) -> httpx2.Response:
    headers = {"x-api-key": KEY_PREFIX + (key or service.key)}
    return service.connections.request(
        method, f"{service.url}/api/v1/{path}", headers=headers, **options
    )


def post(service: Service, path: str, body: Any, key: str | None = None) -> httpx2.Response:
    return send(service, "POST", path, key, json=body)


def result(service: Service, request: httpx2.Response) -> Any:
    """What a request comes to: JSON, or the client's message."""
    assert request.status_code == 200, request.text
    answer = post(service, "retrieve_future", {"request_id": request.json()["request_id"]})
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] != "application/x-protobuf":
        return answer.json()
    return dict(pb.ForwardBackwardOutput.FromString(answer.content).metrics)


def new_session(service: Service) -> str:
    return post(service, "create_session", {"tags": [], "sdk_version": "0.38"}).json()["session_id"]


def new_model(service: Service, session: str | None = None, **lora: Any) -> str:
    session = session or new_session(service)
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 4, **lora},
    }
    return result(service, post(service, "create_model", body))["model_id"]


def loss(service: Service, model: str, seq: int) -> httpx2.Response:
    ids = np.array([1, 2, 3])
    message = loss_message(seq, [(ids, {"target_tokens": ids})])
    message.model_id = model
    return send(service, "POST", "forward_backward", content=message.SerializeToString())


def step(service: Service, model: str, seq: int, rate: float) -> httpx2.Response:
    return post(
        service,
        "optim_step",
        {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}},
    )


def test_commands_are_carried_out_in_order_once(service: Service, ranks: Ranks) -> None:
    model = new_model(service, seed=5)
    sent = [
        step(service, model, 4, 0.5),
        loss(service, model, 3),
        step(service, model, 2, 0.25),
        loss(service, model, 1),
    ]
    assert [result(service, request) for request in reversed(sent)] == [
        {"loss:sum": 1.5},
        {"type": "optim_step", "metrics": {"lr": 0.25}},
        {"loss:sum": 1.5},
        {"type": "optim_step", "metrics": {"lr": 0.5}},
    ]
    again = step(service, model, 4, 9.0)
    assert again.json() == sent[0].json()
    assert result(service, again)["metrics"] == {"lr": 0.5}
    assert [(number, op) for _, number, op in ranks.done] == [
        (0, "create_model"),
        (1, "forward_backward"),
        (2, "optim_step"),
        (3, "forward_backward"),
        (4, "optim_step"),
    ]


def test_a_model_is_a_job(service: Service, ranks: Ranks) -> None:
    session = new_session(service)
    model = new_model(service, session, seed=5)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    assert post(service, "create_model", body).json()["model_id"] == model, (
        "a repeated request finds it"
    )
    [job] = service.store.jobs.list_jobs("default").data
    assert (
        job.id,
        job.spec.training_data,
        job.spec.lora.r,
        job.spec.lora.lora_alpha,
        job.spec.seed,
    ) == (
        job_id_of(model),
        None,
        4,
        32,
        5,
    )
    shown = service.client().fine_tuning.jobs.retrieve(job.id)
    assert shown.method is not None
    assert (shown.method.type, shown.training_file) == ("tinker", None)
    assert post(service, "get_info", {"model_id": model}).json()["lora_rank"] == 4
    assert send(service, "GET", f"sessions/{session}").json()["training_run_ids"] == [model]
    [run] = send(service, "GET", "training_runs").json()["training_runs"]
    assert (run["training_run_id"], run["lora_rank"], run["user_metadata"]) == (model, 4, None)


def test_a_job_with_a_models_metadata_is_none(service: Service) -> None:
    create = {
        "model": "tiny",
        "training_file": upload(service),
        "metadata": {MODEL_KEY: "session-1:train:0"},
    }
    service.client().fine_tuning.jobs.create(**create)
    put_state(service.store, service.store.jobs.list_jobs("default").data[0].id, State.RUNNING)
    pause_idle(service.store, service.app.state.services.places, -1.0)
    [job] = service.store.jobs.list_jobs("default").data
    assert job.desired is Desired.RUN
    assert send(service, "GET", "training_runs").json()["training_runs"] == []


def upload(service: Service) -> str:
    return service.client().files.create(file=("train.jsonl", TRAINING), purpose="fine-tune").id


def test_only_attention_or_only_the_rest(service: Service) -> None:
    for number, lora in enumerate(({"train_mlp": False}, {"train_attn": False})):
        body = {
            "session_id": new_session(service),
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": lora,
        }
        post(service, "create_model", body)
    rest, attention = (
        job.spec.lora.target_modules for job in service.store.jobs.list_jobs("default").data
    )
    assert all("self_attn" in name for name in attention)
    assert all("mlp" in name for name in rest)
    assert len(attention) == 4 * len(rest) / 3


def test_wrong_options_are_the_requests_result(service: Service, ranks: Ranks) -> None:
    """Its number must not be missing, or the ranks would wait for it for ever."""
    model = new_model(service)
    wrong = result(service, step(service, model, 1, -1.0))
    assert (wrong["category"], "learning_rate = -1" in wrong["error"]) == ("user", True)
    named = post(service, "save_weights", {"model_id": model, "seq_id": 2, "path": "a b"})
    assert "1 to 128 letters" in result(service, named)["error"]
    missing = {
        "model_id": model,
        "seq_id": 3,
        "path": f"tinker://{model}/weights/none",
        "optimizer": True,
    }
    assert "no saved weights" in result(service, post(service, "load_weights", missing))["error"]
    external = post(service, "save_weights_external", {"model_id": model, "seq_id": 4, "path": "x"})
    assert "External weights are not here" in result(service, external)["error"]
    assert result(service, step(service, model, 5, 0.25))["metrics"] == {"lr": 0.25}
    assert post(service, "optim_step", {"model_id": model, "seq_id": True}).status_code == 400, (
        "no number"
    )


def test_a_call_that_is_too_large_is_its_own_result(
    service: Service, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_routes, "MOST_CALL_BYTES", 100)
    model = new_model(service)
    too_large = result(service, loss(service, model, 1))
    assert (too_large["category"], "larger than 100 bytes" in too_large["error"]) == ("user", True)
    assert result(service, step(service, model, 2, 0.25))["metrics"] == {"lr": 0.25}
    nothing = send(service, "POST", "forward_backward", content=b"\xff" * 101)
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (400, "invalid_value")


def test_a_call_of_too_many_parts_is_its_own_result(service: Service, ranks: Ranks) -> None:
    model = new_model(service)
    head = pb.ForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString()
    many = send(service, "POST", "forward_backward", content=head + b"\x1a\0" * (MOST_DATUMS + 1))
    assert f"1 to {MOST_DATUMS:,} are possible" in result(service, many)["error"]
    assert result(service, loss(service, model, 2)) == {"loss:sum": 1.5}
    foreign = pb.ForwardBackwardRequest(model_id="session-a:train:0", seq_id=1).SerializeToString()
    unknown = send(service, "POST", "forward_backward", content=foreign + b"\x1a\0" * 2**20)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_commands_ahead_have_a_limit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for number 1, which has not been sent, for as long as the model lives."""
    model = new_model_without_ranks(service)
    monkeypatch.setattr(commands, "MOST_AHEAD", 3)
    codes = [step(service, model, seq, 0.5).status_code for seq in (10, 11, 12, 13)]
    assert codes == [200, 200, 200, 429]
    refused = step(service, model, 13, 0.5)
    assert (refused.json()["error"]["code"], "retry-after" in refused.headers) == (
        "too_many_commands",
        True,
    )
    assert "the number 1" in refused.json()["error"]["message"]
    assert step(service, model, 1, 0.5).status_code == 200, "the ranks wait for it"
    assert step(service, model, 12, 0.5).status_code == 200, "it is there"
    monkeypatch.setattr(commands, "MOST_AHEAD", 100)
    monkeypatch.setattr(commands, "MOST_AHEAD_BYTES", 1000)
    assert loss(service, model, 14).status_code == 200
    large = loss_message(15, [(np.arange(200), {})])
    large.model_id = model
    answer = send(service, "POST", "forward_backward", content=large.SerializeToString())
    assert answer.json()["error"]["code"] == "too_many_commands"


def test_the_bytes_of_commands_count_for_their_project(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model_without_ranks(service)
    service.store.projects.update_project("default", limits={"max_bytes": 40_000})

    def call(seq: int) -> httpx2.Response:
        message = loss_message(seq, [(np.arange(4000), {})])
        message.model_id = model
        return send(service, "POST", "forward_backward", content=message.SerializeToString())

    assert [call(seq).status_code for seq in (10, 11, 12, 10)] == [200, 200, 429, 200], (
        "of 16 kB each"
    )
    assert call(12).json()["error"]["code"] == "storage_limit"
    with pytest.raises(openai.RateLimitError) as refused:
        service.client().files.create(file=("train.jsonl", TRAINING * 30), purpose="fine-tune")
    assert refused.value.code == "storage_limit"
    for path in run_dir(service, job_id_of(model)).path("commands").iterdir():
        path.unlink()
    count_bytes("default", service.store, service.app.state.services.places)
    assert call(12).status_code == 200


def new_model_without_ranks(service: Service) -> str:
    """A model whose creation is answered, and nothing else."""
    body = {"session_id": new_session(service), "model_seq_id": 0, "base_model": "tiny"}
    model = post(service, "create_model", body).json()["model_id"]
    CommandLog(run_dir(service, job_id_of(model))).put_result(0, CommandResult({"model_id": model}))
    return model


def test_sessions_have_limits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"user_metadata": {f"key {number}": "x" * 2000 for number in range(14)}}
    refused = post(service, "create_session", large)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user_metadata")
    assert f"{MOST_METADATA_BYTES:,} bytes" in refused.json()["error"]["message"]
    monkeypatch.setattr(tinker, "MOST_SESSIONS", 2)
    first = new_session(service)
    _ = new_session(service)
    one_more = post(service, "create_session", {})
    assert (one_more.status_code, one_more.json()["error"]["code"]) == (429, "too_many_sessions")
    monkeypatch.setattr(tinker, "MOST_SESSIONS", 100)
    service.store.projects.update_project("default", limits={"max_bytes": 10_000})
    metadata = {"user_metadata": {f"key {number}": "x" * 500 for number in range(14)}}
    codes = [post(service, "create_session", metadata).status_code for _ in range(3)]
    assert codes == [200, 429, 429]
    assert new_session(service), "by which weights can be deleted"
    assert post(service, "session_heartbeat", {"session_id": first}).status_code == 200


def test_a_list_of_sessions_reads_no_metadata(service: Service) -> None:
    session = post(service, "create_session", {"user_metadata": {"a": "b"}}).json()["session_id"]
    service.sql("UPDATE tinker_sessions SET user_metadata = 'no JSON'")
    assert send(service, "GET", "sessions").json() == {"sessions": [session]}


def test_samplers_have_a_limit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "MOST_SAMPLERS", 1)
    monkeypatch.setattr(Services, "refuse_samples", lambda *_, **__: None)
    new = {"session_id": new_session(service), "base_model": "tiny"}
    codes = [
        post(
            service, "create_sampling_session", {**new, "sampling_session_seq_id": seq}
        ).status_code
        for seq in (0, 1, 0)
    ]
    assert codes == [200, 429, 200]


def test_what_is_not_used_is_removed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Services, "refuse_samples", lambda *_, **__: None)
    sessions = [new_session(service) for _ in range(4)]
    new = {"sampling_session_seq_id": 0, "base_model": "tiny"}
    samplers = [
        post(service, "create_sampling_session", {**new, "session_id": session}).json()[
            "sampling_session_id"
        ]
        for session in sessions[:2]
    ]
    post(service, f"sessions/{sessions[2]}/finish", {"reason": {"type": "success"}})
    post(service, f"sessions/{sessions[3]}/finish", {"reason": {"type": "success"}})
    week = tinker.KEEP_UNUSED_SECONDS + 1
    day = tinker.KEEP_FINISHED_SECONDS + 1
    service.sql(
        "UPDATE tinker_sessions SET used_at = used_at - :age WHERE id = :id",
        age=week,
        id=sessions[0],
    )
    service.sql(
        "UPDATE tinker_samplers SET used_at = used_at - :age WHERE id = :id",
        age=week,
        id=samplers[0],
    )
    service.sql(
        "UPDATE tinker_sessions SET finished_at = finished_at - :age WHERE id = :id",
        age=day,
        id=sessions[2],
    )
    remove_unused(service.store, service.app.state.services.places)
    assert send(service, "GET", "sessions").json() == {"sessions": [sessions[3], sessions[1]]}
    assert [send(service, "GET", f"samplers/{sampler}").status_code for sampler in samplers] == [
        404,
        200,
    ]


def test_waiting_requests_share_their_looks(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 at once, for results that do not come."""
    model = new_model_without_ranks(service)
    looks = list[int]()
    asked = Counter[str]()
    assert [step(service, model, seq, 0.5).status_code for seq in (2, 3)] == [200, 200]
    monkeypatch.setattr(training_routes, "HELD_SECONDS", 3.0)
    results_of = sample_answers.results_of
    result_of = tinker_models.result_of

    def counted(models: Any) -> dict[str, list[int]]:
        looks.append(sum(len(seqs) for _, seqs in models.values()))
        return results_of(models)

    def read(job: Job, seq: int, places: Places) -> CommandResult | None:
        asked["results"] += 1
        return result_of(job, seq, places)

    monkeypatch.setattr(sample_answers, "results_of", counted)
    monkeypatch.setattr(tinker_models, "result_of", read)

    async def all_wait() -> Counter[int]:
        headers = {"x-api-key": KEY_PREFIX + service.key}
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=service.url, headers=headers, timeout=120, limits=limits
        ) as client:
            bodies = [{"request_id": f"{model}#{2 + number % 2}"} for number in range(300)]
            answers = await asyncio.gather(
                *(client.post("/api/v1/retrieve_future", json=body) for body in bodies)
            )
        return Counter(answer.status_code for answer in answers)

    began = time.monotonic()
    assert asyncio.run(all_wait()) == {408: 300}
    assert asked["results"] == 600, "once before and once behind the wait"
    assert 0 < len(looks) < 20 + 6 * (time.monotonic() - began), "a few a second, for all together"
    assert max(looks) == 2, "numbers, not requests"


def test_a_keys_waiting_requests_have_a_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model_without_ranks(service)
    monkeypatch.setattr(sample_answers, "MOST_WAITING", 0)
    refused = post(service, "retrieve_future", {"request_id": f"{model}#0"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_waiting")
    monkeypatch.setattr(sample_answers, "MOST_WAITING", 1)
    for _ in range(3):
        assert post(service, "retrieve_future", {"request_id": f"{model}#0"}).status_code == 200


def test_saved_weights_have_limits(
    service: Service, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(service)
    saved = SavedWeights(
        name="one", checkpoint="step-1-a1", step=1, command=1, created_at=1.0, bytes=600
    )
    for name in ("one", "two"):
        run_dir(service, job_id_of(model)).write(f"saved_weights/{name}.json", saved)

    def save(seq: int, op: str = "save_weights") -> Any:
        return result(
            service, post(service, op, {"model_id": model, "seq_id": seq, "path": f"at-{seq}"})
        )

    assert "error" not in save(1)
    service.store.projects.update_project("default", limits={"max_bytes": 1200})
    wait_until(lambda: "may keep 1200 (its limit max_bytes)" in str(save(ranks.done[-1][1] + 1)))
    service.store.projects.update_project("default", limits={"max_bytes": None})
    monkeypatch.setattr(tinker_models, "MOST_SAVED", 2)
    assert "has 2 saved weights" in save(ranks.done[-1][1] + 1, "save_weights_for_sampler")["error"]


def test_options_are_of_the_weights_that_are_saved(service: Service, ranks: Ranks) -> None:
    """The ranks write them with the weights; a request that is refused changes nothing, and deleted
    weights leave none.
    """
    model = new_model(service)
    run = run_dir(service, job_id_of(model))
    run.write(
        "saved_weights/one.json",
        SavedWeights(name="one", checkpoint="c", step=1, command=1, created_at=1.0, bytes=6),
    )
    own = {"ttl_seconds": 3600, "user_metadata": {"epoch": "1"}}
    result(
        service,
        post(service, "save_weights", {"model_id": model, "seq_id": 1, "path": "one", **own}),
    )
    command = CommandLog(run).command(1)
    assert command is not None
    assert command.options.items() >= own.items()
    assert options_of(run, "weights/one") == WeightsOptions()
    checkpoint = f"training_runs/{model}/checkpoints/weights/one"
    assert send(service, "POST", f"{checkpoint}/publish").status_code == 204
    assert options_of(run, "weights/one").public
    assert send(service, "DELETE", checkpoint).status_code == 204
    assert options_of(run, "weights/one") == WeightsOptions()


def test_metadata_that_is_no_text_is_refused_by_its_number(service: Service, ranks: Ranks) -> None:
    """Without a command of its number, the model would wait for it for ever."""
    body = json.dumps(
        {
            "model_id": new_model(service),
            "seq_id": 1,
            "path": "one",
            "user_metadata": {"a": "\ud800"},
        }
    )
    assert (
        "user_metadata.a"
        in result(service, send(service, "POST", "save_weights", content=body))["error"]
    )


REFUSED = {
    "a base that is not there": (
        "create_model",
        {"base_model": "nothing"},
        "there is no such base model",
    ),
    "a rank": (
        "create_model",
        {"base_model": "tiny", "lora_config": {"rank": 0}},
        "lora_config.rank = 0",
    ),
    "the head alone": (
        "create_model",
        {"base_model": "tiny", "lora_config": {"train_mlp": False, "train_attn": False}},
        "output head alone",
    ),
    "another optimizer": (
        "create_model",
        {"base_model": "tiny", "optimizer_config": {"type": "dimuon"}},
        "AdamW only",
    ),
    "an unknown field": (
        "create_sampling_session",
        {"surprise": "x"},
        "surprise: this service does not know it",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused_is_named(service: Service, case: str) -> None:
    path, changes, text = REFUSED[case]
    number = {"model_seq_id": 0} if path == "create_model" else {"sampling_session_seq_id": 0}
    answer = post(service, path, {"session_id": new_session(service), **number, **changes})
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]
    assert service.store.jobs.list_jobs("default").data == []


def test_samples_are_refused_where_no_process_of_the_service_answers(service: Service) -> None:
    """One that serves the API alone takes requests, which another answers."""
    new = {"session_id": new_session(service), "base_model": "tiny", "sampling_session_seq_id": 0}
    services = service.app.state.services
    assert services.preview is None
    assert post(service, "create_sampling_session", new).status_code == 200
    off = service.settings.model_copy(update={"preview": "off"})
    service.app.state.services = replace(services, settings=off)
    answer = post(service, "create_sampling_session", {**new, "sampling_session_seq_id": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_sampler")
    assert "preview is off" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "text"),
    [("copy_weights", "publish the weights"), ("nothing/at/all", "docs/tinker.md")],
)
def test_what_is_not_here_is_named(service: Service, path: str, text: str) -> None:
    answer = post(service, path, {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_operation")
    assert path in answer.json()["error"]["message"]
    assert text in answer.json()["error"]["message"]


def test_a_session_that_is_finished_ends_its_models(service: Service, ranks: Ranks) -> None:
    session = new_session(service)
    model = new_model(service, session)
    assert result(service, step(service, model, 1, 0.5))
    assert (
        post(service, f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code
        == 200
    )
    assert (
        post(service, f"sessions/{session}/finish", {"reason": {"type": "errored"}}).status_code
        == 200
    )
    wait_until(lambda: ranks.done[-1][1:] == (2, "finish"))
    answer = post(
        service, "create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}
    )
    assert answer.json()["error"]["code"] == "session_finished"


def test_a_failed_job_answers_what_waits(service: Service) -> None:
    session = new_session(service)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    request = post(service, "create_model", body)
    [job] = service.store.jobs.list_jobs("default").data
    service.client().fine_tuning.jobs.cancel(job.id)
    ended = result(service, request)
    assert (ended["category"], "has ended (cancelled)" in ended["error"]) == ("server", True)
    assert (
        step(service, request.json()["model_id"], 1, 0.5).json()["error"]["code"] == "model_ended"
    )


def test_keys(service: Service) -> None:
    assert (
        service.connections.post(f"{service.url}/api/v1/create_session", json={}).status_code == 401
    )
    assert post(service, "create_session", {}, key="wrong").status_code == 401
    _, read = service.store.keys.create_key(NewKey(project_id="default", name="r", scope="read"))
    assert post(service, "create_session", {}, key=read).status_code == 403
    assert post(service, "create_session", {"project_id": "other"}).status_code == 400


def test_a_read_key_reads_by_the_posts_that_change_nothing(service: Service, ranks: Ranks) -> None:
    _, read = service.store.keys.create_key(NewKey(project_id="default", name="r", scope="read"))
    model = new_model(service)
    answers = [
        post(service, "get_info", {"model_id": model}, read),
        post(service, "retrieve_future", {"request_id": request_id(model, 0)}, read),
        post(service, "weights_info", {"tinker_path": f"tinker://{model}/weights/none"}, read),
        post(
            service,
            "optim_step",
            {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
            read,
        ),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 403], [
        answer.text for answer in answers
    ]


def test_a_client_is_told_the_name_of_a_base_and_not_its_path(
    service: Service, ranks: Ranks
) -> None:
    answer = post(service, "get_info", {"model_id": new_model(service)})
    assert answer.json()["model_data"] == {"model_name": "tiny", "tokenizer_id": "tiny"}


def test_what_failed_is_told_without_the_hosts_paths(service: Service) -> None:
    model = new_model_without_ranks(service)
    folder = service.settings.model_folders()[0] / "tiny"
    failed = CommandResult.failed(f"The base in {folder} makes no model.", by_user=False)
    CommandLog(run_dir(service, job_id_of(model))).put_result(1, failed)
    told = post(service, "retrieve_future", {"request_id": request_id(model, 1)}).json()
    assert told == {"error": "The base in tiny makes no model.", "category": "server"}


def test_the_reason_why_a_model_has_ended_is_one_sentence(service: Service) -> None:
    post(
        service,
        "create_model",
        {"session_id": new_session(service), "model_seq_id": 0, "base_model": "tiny"},
    )
    [job] = service.store.jobs.list_jobs("default").data
    told = ended_text(replace(job, state=State.FAILED, error={"message": "3 attempts failed."}))
    assert told.startswith("The model has ended (failed): 3 attempts failed. Create another one;")


def test_another_project_sees_nothing(service: Service, ranks: Ranks) -> None:
    session = new_session(service)
    model = new_model(service, session)
    saved = SavedWeights(
        name="mine", checkpoint="step-1-a1", step=1, command=1, created_at=1.0, bytes=3
    )
    run_dir(service, job_id_of(model)).write("saved_weights/mine.json", saved)
    service.store.projects.ensure_project("other", "local")
    _, key = service.store.keys.create_key(NewKey(project_id="other", name="o", scope="admin"))
    path = f"tinker://{model}/weights/mine"
    tried = [
        post(service, "get_info", {"model_id": model}, key),
        post(service, "optim_step", {"model_id": model, "seq_id": 9}, key),
        post(service, "session_heartbeat", {"session_id": session}, key),
        post(
            service,
            "create_model",
            {"session_id": session, "model_seq_id": 5, "base_model": "tiny"},
            key,
        ),
        post(service, "retrieve_future", {"request_id": f"{model}#0"}, key),
        post(service, "weights_info", {"tinker_path": path}, key),
        *(
            send(service, "GET", place, key)
            for place in (
                f"sessions/{session}",
                f"training_runs/{model}",
                f"training_runs/{model}/checkpoints",
            )
        ),
    ]
    assert [answer.status_code for answer in tried] == [404] * len(tried)
    place = f"training_runs/{model}/checkpoints/weights/mine"
    assert send(service, "POST", f"{place}/publish", key).status_code == 404
    for _ in range(2):
        assert send(service, "POST", f"{place}/publish").status_code == 204
    assert (
        post(service, "weights_info", {"tinker_path": path}, key).json()["base_model"] == "tiny"
    ), "for all who know the path"
    for _ in range(2):
        assert send(service, "DELETE", f"{place}/publish").status_code == 204
    assert post(service, "weights_info", {"tinker_path": path}, key).status_code == 404
    assert send(service, "PUT", f"{place}/ttl", json={"ttl_seconds": 60}).status_code == 400
    assert send(service, "DELETE", place).status_code == 204
    assert send(service, "GET", f"training_runs/{model}/checkpoints").json() == {"checkpoints": []}
    changes = [
        entry
        for entry in service.store.audit.list_audit(project_id="default").data
        if entry.type.startswith("weights.")
    ]
    assert [(entry.type, entry.target) for entry in reversed(changes)] == [
        ("weights.published", path),
        ("weights.unpublished", path),
        ("weights.deleted", path),
    ]
    assert all(entry.key_id is not None for entry in changes)


def test_a_model_that_waits_is_paused_and_returns(service: Service, ranks: Ranks) -> None:
    model = new_model(service)
    job_id = job_id_of(model)
    put_state(service.store, job_id, State.RUNNING)
    places = service.app.state.services.places
    pause_idle(service.store, places, 3600.0)
    assert service.store.jobs.get_job("default", job_id).desired is Desired.RUN
    pause_idle(service.store, places, -1.0)
    paused = service.store.jobs.get_job("default", job_id)
    assert (paused.desired, paused.reason) == (Desired.PAUSE, Reason.IDLE)
    assert result(service, step(service, model, 1, 0.5))
    assert service.store.jobs.get_job("default", job_id).desired is Desired.RUN
    service.client().fine_tuning.jobs.pause(job_id)
    assert result(service, step(service, model, 2, 0.5))
    assert service.store.jobs.get_job("default", job_id).desired is Desired.PAUSE, (
        "whom its user pauses, no command resumes"
    )


def test_the_wire_can_be_switched_off(service: Service) -> None:
    service.use(service.settings.model_copy(update={"tinker": "off"}))
    answer = post(service, "create_session", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tinker_off")
