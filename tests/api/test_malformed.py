"""Malformed input, beyond what the tests of each route hold: bodies and names get a 4xx that names
the fault and store nothing; contents of files make a failed job that names line and reason, and no
training process.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.jobs.states import State
from ft_service.storage.locations import Places
from tests.support.bases import save_base
from tests.support.fake_launcher import FakeLauncher
from tests.support.malformed import CHANGES, split
from tests.support.rest.refusals import MALFORMED, UNREADABLE, check_error
from tests.support.rest.service import TRAINING, Service, wait_until

WRONG_TYPES: dict[str, list[Any]] = {
    "model": [True, 1.5, [], {}, "x" * 513, "a\\b", "~root", ".hidden", "tiny/../tiny", "tiny\n"],
    "training_file": ["", True, {}, "x" * 4097, "../../etc/passwd", "file-\ud800"],
    "validation_file": ["", False, {}, []],
    "suffix": [1, [], "with space", "slash/ed", "ümlaut", "a\n"],
    "seed": ["", [], 1e10, -0.5],
    "metadata": [[], "a", 1, {"": "v"}, {"k" * 65: "v"}, {"k": None}, {"k": ["v"]}],
    "method": [
        "supervised",
        [],
        {"type": None},
        {"type": "supervised", "supervised": []},
        {"kind": "supervised"},
    ],
    "hyperparameters": [
        "auto",
        [],
        {"n_epochs": None},
        {"n_epochs": 1.5},
        {"batch_size": 0},
        {"learning_rate_multiplier": -1},
    ],
    "priority": ["high", None, 1.5, -1001, True],
    "lora": [
        "all",
        {"r": "16"},
        {"r": None},
        {"lora_alpha": 0},
        {"lora_alpha": "big"},
        {"target_modules": 5},
        {"r": 1.5},
    ],
    "precision": [
        "nf4",
        {"default": None},
        {"overrides": []},
        {"overrides": {"a": 4}},
        {"compute": "fp16"},
        {"bits": 4},
    ],
    "training": [
        [],
        {"batch_size": 0},
        {"batch_size": 8193},
        {"max_length": 7},
        {"n_epochs": 0},
        {"n_epochs": 51},
        {"learning_rate": 0},
        {"learning_rate": "fast"},
        {"warmup_ratio": 1.1},
        {"weight_decay": -1},
        {"max_grad_norm": -1},
        {"lr_scheduler_type": "sine"},
        {"optim": "sgd9"},
        {"eval_steps": 0},
        {"max_steps": 1.5},
        {"per_device_train_batch_size": 0},
    ],
    "distributed": [
        "auto",
        {"nproc_per_node": "many"},
        {"nproc_per_node": 65},
        {"reshard_after_forward": "yes"},
        {"gpus": 1},
    ],
    "checkpoint": [
        [],
        {"save_steps": -1},
        {"save_total_limit": 0},
        {"save_total_limit": 1001},
        {"every": 5},
    ],
}

NAMES: list[tuple[str, str, int]] = [
    (method, path.format(name), status)
    for method, path, status in (
        ("GET", "/v1/files/{}", 404),
        ("GET", "/v1/files/{}/content", 404),
        ("DELETE", "/v1/files/{}", 404),
        ("GET", "/v1/fine_tuning/jobs/{}", 404),
        ("POST", "/v1/fine_tuning/jobs/{}/cancel", 404),
        ("GET", "/v1/fine_tuning/jobs/{}/adapter", 404),
        ("GET", "/v1/fine_tuning/jobs/{}/logs", 404),
        ("GET", "/v1/fine_tuning/jobs/{}/events", 404),
        ("POST", "/v1/uploads/{}/cancel", 404),
        ("GET", "/v1/models/{}", 404),
        ("DELETE", "/v1/models/{}", 404),
        ("GET", "/v1/webhook_endpoints/{}", 404),
    )
    for name in (
        "..%2F..%2Fetc%2Fpasswd",
        "%00",
        "x%0d%0aset-cookie:%20a=b",
        "%ff%fe",
        "x" * 3000,
        "'%20OR%201=1--",
    )
]

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
LINES: list[tuple[bytes, str]] = [
    (b"{", "is not JSON"),
    (b"nonsense", "is not JSON"),
    (b"[]", "must be a JSON object"),
    (b"5", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b"{}", "messages is required"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": {}}', "messages"),
    (b'{"messages": "a"}', "messages"),
    (b'{"messages": [1]}', "messages.0"),
    (b'{"messages": [[]]}', "messages.0"),
    (b"\xff\xfe{}", "is not UTF-8"),
    (b"\xef\xbb\xbf{}", "UTF-8 BOM"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"messages": [' + b"1" * 5000 + b"]}", "not usable JSON"),
    (b"", "is blank"),
    (b'{"colour": 1}', "messages is required"),
    *[
        (json.dumps({"messages": messages}).encode(), says)
        for messages, says in (
            ([{"content": "a"}, ANSWER], "messages.0.role is required"),
            ([{"role": "robot", "content": "a"}, ANSWER], "messages.0.role"),
            ([{"role": 5, "content": "a"}, ANSWER], "messages.0.role"),
            ([{"role": "user"}, ANSWER], "messages.0.content is required"),
            ([{"role": "user", "content": 5}, ANSWER], "messages.0.content"),
            ([{"role": "user", "content": {}}, ANSWER], "messages.0.content"),
            ([USER, {"role": "assistant", "content": "\ud800"}], "messages.1.content"),
            ([USER], "no assistant message"),
            ([USER, {**ANSWER, "weight": 0}], "weight 0"),
            ([USER, {**ANSWER, "weight": 2}], "messages.1.weight"),
            ([USER, {**ANSWER, "weight": "1"}], "messages.1.weight"),
            ([{**USER, "weight": 1}, ANSWER], "messages.0.weight"),
            ([USER, {**ANSWER, "mood": "good"}], "messages.1.mood"),
        )
    ],
]


def test_there_are_two_hundred_of_them() -> None:
    assert (
        sum(map(len, WRONG_TYPES.values()))
        + len(NAMES)
        + len(LINES)
        + len(MALFORMED)
        + len(UNREADABLE)
        >= 200
    )


def test_a_wrong_value_is_named_and_stores_nothing(
    service: Service, training_file: str, subtests: pytest.Subtests
) -> None:
    for field, values in WRONG_TYPES.items():
        for value in values:
            with subtests.test(field=field, value=repr(value)[:60]):
                body = {"model": "tiny", "training_file": training_file, field: value}
                answer = service.http("POST", "/v1/fine_tuning/jobs", content=json.dumps(body))
                error = check_error(answer, 400)
                assert str(error["param"]).split(".")[0] == field
                assert field in error["message"]
                assert len(error["message"]) < 1000
    assert service.store.jobs.list_jobs("default").data == []


def test_a_name_of_nothing_is_a_404_and_harmless(
    service: Service, subtests: pytest.Subtests
) -> None:
    for method, path, status in NAMES:
        with subtests.test(method=method, path=path[:60]):
            answer = service.http(method, path)
            check_error(answer, status)
            assert "set-cookie" not in answer.headers
            assert "root:" not in answer.text


def test_a_line_that_cannot_be_trained_on_fails_the_job_with_its_number(
    service: Service,
    client: openai.OpenAI,
    subtests: pytest.Subtests,
    request: pytest.FixtureRequest,
) -> None:
    launcher = FakeLauncher(4)
    reconciler = Reconciler(
        service.store, launcher, Places.of(service.settings), ReconcilerOptions(idle_seconds=0.0)
    )
    request.addfinalizer(reconciler.close)
    for line, says in LINES:
        with subtests.test(line=line[:40]):
            body = TRAINING + line + b"\n" + TRAINING
            file = client.files.create(file=("bad.jsonl", body), purpose="fine-tune")
            job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
            wait_until(
                lambda: (
                    reconciler.step()
                    and client.fine_tuning.jobs.list(limit=1).data[0].status == "failed"
                )
            )
            error = client.fine_tuning.jobs.retrieve(job.id).error
            assert error is not None
            assert error.param == "training_file"
            assert error.message.startswith("bad.jsonl: ")
            assert "\nline 4: " in error.message
            assert says in error.message
            assert service.store.jobs.get_job("default", job.id).state is State.FAILED
    assert launcher.started == []


def test_bases_with_malformed_weights_are_refused_at_submit(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    """One 400 each, whatever the header holds, and no job."""
    weights = save_base(service.settings.model_folders()[0] / "damaged") / "model.safetensors"
    whole = split(weights.read_bytes())
    for change, make in CHANGES.items():
        weights.unlink()
        weights.write_bytes(make(*whole))
        body = {"model": "damaged", "training_file": training_file}
        error = check_error(service.http("POST", "/v1/fine_tuning/jobs", json=body), 400)
        assert (error["param"], error["code"]) == ("model", "model_unreadable"), change
        assert error["message"].startswith("The base's model.safetensors in "), change
    assert client.fine_tuning.jobs.list().data == []


def test_a_tokenizer_with_more_tokens_than_the_base_has_rows_is_refused_at_submit(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    save_base(service.settings.model_folders()[0] / "small", vocab_size=1000)
    answer = service.http(
        "POST", "/v1/fine_tuning/jobs", json={"model": "small", "training_file": training_file}
    )
    error = check_error(answer, 400)
    assert (error["param"], error["code"]) == ("model", "vocabulary_too_small")
    assert "token ids up to 1023" in error["message"]
    assert "has 1000 rows" in error["message"]
    assert client.fine_tuning.jobs.list().data == []
