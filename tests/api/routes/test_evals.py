"""Evals by the real client against the real server, with the loop that carries runs out; an
inference server answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from api.routes import inference
from ft_service.control import eval_runs
from ft_service.control.eval_runs import EvalRuns
from ft_service.jobs.states import State
from ft_service.storage.locations import Places
from ft_service.store.records import NewKey
from tests.support.rest.receiver import Receiver, receiving
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service, put, wait_until

JSON = {"content-type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"question": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["question", "answer"],
}
CONFIG: Any = {"type": "custom", "item_schema": SCHEMA, "include_sample_schema": True}
SAME: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "operation": "eq",
}
NEAR: Any = {
    "type": "text_similarity",
    "name": "near",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
    "pass_threshold": 0.5,
}
TEMPLATE: Any = {
    "type": "template",
    "template": [
        {"role": "developer", "content": "Answer."},
        {"role": "user", "content": [{"type": "input_text", "text": "{{ item.question }}?"}]},
    ],
}
ANSWERS = {"one?": "1", "two?": "2", "six?": "seven"}


def items(*names: str) -> list[dict[str, Any]]:
    known = {"one": "1", "two": "2", "six": "6"}
    return [{"item": {"question": name, "answer": known[name]}} for name in names]


def source(*names: str, model: str = "tiny", **more: Any) -> Any:
    return {
        "type": "completions",
        "model": model,
        "source": {"type": "file_content", "content": items(*names)},
        "input_messages": TEMPLATE,
        **more,
    }


def chat(text: str) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": text}}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        receiver.answer = lambda arrived: (
            200,
            JSON,
            iter([chat(ANSWERS[json.loads(arrived.body)["messages"][-1]["content"]])]),
        )
        yield receiver


@pytest.fixture
def configure(configure: dict[str, Any], receiver: Receiver, tmp_path: Path) -> dict[str, Any]:
    models = tmp_path / "graders.yaml"
    models.write_text(f"judge: {{base_url: {receiver.url}/v1}}\n")
    return configure | {"inference_url": f"{receiver.url}/v1", "grader_models": models}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_runs, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(eval_runs, "pause_seconds", lambda tries: 0.02)


def loop_of(service: Service) -> EvalRuns:
    services = service.app.state.services
    ask = partial(inference.asked, services=services)
    return EvalRuns(service.store, Places.of(service.settings), services.grader_limits, ask)


@contextmanager
def looping(runs: EvalRuns) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=runs.run, args=(stop,), name="evals")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture
def carry_out(service: Service) -> Callable[[openai.OpenAI, Any], Any]:
    """A run at its end."""

    def wait(client: openai.OpenAI, run: Any) -> Any:
        def now() -> Any:
            return client.evals.runs.retrieve(run.id, eval_id=run.eval_id)

        with looping(loop_of(service)):
            wait_until(lambda: now().status not in ("queued", "in_progress"))
        return now()

    return wait


def test_two_models_are_judged_by_the_same_eval(
    service: Service, client: openai.OpenAI, receiver: Receiver, carry_out: Callable[..., Any]
) -> None:
    other = "meta-llama/Llama-3.2-1B"
    made = client.evals.create(
        name="sums", data_source_config=CONFIG, testing_criteria=[SAME, NEAR], metadata={"a": "b"}
    )
    config: Any = made.data_source_config
    assert config.schema_["properties"]["item"] == SCHEMA
    assert made.testing_criteria[1].to_dict()["pass_threshold"] == 0.5
    run = client.evals.runs.create(
        made.id, name="first", data_source=source("one", "two", "six", model=other)
    )
    assert (run.status, run.model, run.result_counts.total) == ("queued", other, 0)
    ended = carry_out(client, run)
    counts = ended.result_counts
    assert (ended.status, counts.total, counts.passed, counts.failed) == ("completed", 3, 2, 1)
    judged = {one.testing_criteria: one for one in ended.per_testing_criteria_results}
    assert (judged["same"].passed, judged["same"].failed) == (2, 1)
    (usage,) = ended.per_model_usage
    assert (usage.model_name, usage.invocation_count, usage.total_tokens) == (other, 3, 12)
    sent = [json.loads(receiver.arrived.get(timeout=60).body) for _ in range(3)]
    assert {body["model"] for body in sent} == {other}
    assert {body["max_completion_tokens"] for body in sent} == {1024}
    assert sent[0]["messages"][0] == {"role": "developer", "content": "Answer."}

    listed = client.evals.runs.output_items.list(run.id, eval_id=made.id, limit=2)
    found = {item.datasource_item["question"]: item for item in listed}
    assert len(found) == 3, "over two pages"
    assert [found[name].status for name in ("one", "two", "six")] == ["pass", "pass", "fail"]
    wrong = found["six"]
    assert (wrong.sample.output[0].content, wrong.sample.finish_reason) == ("seven", "stop")
    assert wrong.sample.input[1].content == "six?"
    assert [(one.name, one.passed) for one in wrong.results] == [("same", False), ("near", False)]
    one = client.evals.runs.output_items.retrieve(wrong.id, eval_id=made.id, run_id=run.id)
    assert one.datasource_item_id == 2
    failed = client.evals.runs.output_items.list(run.id, eval_id=made.id, status="fail").data
    assert [item.id for item in failed] == [wrong.id]

    base = carry_out(client, client.evals.runs.create(made.id, data_source=source("one")))
    assert (base.result_counts.passed, base.model) == (1, "tiny")
    listed = client.evals.runs.list(made.id, limit=1)
    assert [own.id for own in listed] == [run.id, base.id], "oldest first"
    assert client.evals.update(made.id, name="other").name == "other"
    assert [own.id for own in client.evals.list()] == [made.id]
    assert client.evals.runs.delete(base.id, eval_id=made.id).deleted
    assert client.evals.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert service.store.evals.numbers_of(run.id) == set()


def test_items_of_a_file_and_answers_that_lines_bring_along(
    client: openai.OpenAI, carry_out: Callable[..., Any], receiver: Receiver
) -> None:
    lines = items("one", "six")
    lines[0]["sample"] = {"output_text": "1"}
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("items.jsonl", content), purpose="evals")
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    given: Any = {"type": "jsonl", "source": {"type": "file_id", "id": file.id}}
    ended = carry_out(client, client.evals.runs.create(made.id, data_source=given))
    counts = ended.result_counts
    assert (counts.passed, counts.errored, ended.model) == (1, 1, None)
    assert receiver.arrived.empty(), "no model is asked"
    (error,) = client.evals.runs.output_items.list(
        ended.id, eval_id=made.id, extra_query={"status": "error"}
    ).data
    assert error.sample.error.code == "no_sample"
    with pytest.raises(openai.BadRequestError, match="purpose is evals"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id)

    wrong = client.files.create(
        file=("wrong.jsonl", content + b'\n{"item": {"question": "one"}}'), purpose="evals"
    )
    given["source"]["id"] = wrong.id
    failed = carry_out(client, client.evals.runs.create(made.id, data_source=given))
    assert (failed.status, failed.error.code) == ("failed", "invalid_item")
    assert failed.error.message == "Line 3: item.answer: is missing."


def test_messages_that_an_item_holds(
    client: openai.OpenAI, carry_out: Callable[..., Any], receiver: Receiver
) -> None:
    config: Any = {**CONFIG, "item_schema": {"type": "object"}}
    one: Any = {**SAME, "reference": "1"}
    made = client.evals.create(data_source_config=config, testing_criteria=[one])
    content = [
        {"item": {"chat": [{"role": "user", "content": "one?"}]}},
        {"item": {"chat": "one?"}},
        {"item": {}},
    ]
    reference = {"type": "item_reference", "item_reference": "item.chat"}
    data = source(input_messages=reference, source={"type": "file_content", "content": content})
    ended = carry_out(client, client.evals.runs.create(made.id, data_source=data))
    assert (ended.result_counts.passed, ended.result_counts.errored) == (1, 2)
    assert receiver.arrived.qsize() == 1


def test_models_that_grade_say_who_passes(
    client: openai.OpenAI, carry_out: Callable[..., Any], receiver: Receiver
) -> None:
    asked = [{"role": "user", "content": "{{ item.answer }} {{ sample.output_text }}"}]
    common = {"model": "judge", "input": asked}
    criteria: Any = [
        {"type": "score_model", "name": "a", "range": [0, 7], "pass_threshold": 5, **common},
        {"type": "label_model", "name": "b", "labels": ["x", "y"], "passing_labels": ["x"]}
        | common,
    ]

    def answer(arrived: Any) -> Any:
        body = json.loads(arrived.body)
        if body["model"] != "judge":
            return (200, JSON, iter([chat("1")]))
        schema = body["response_format"]["json_schema"]["schema"]["properties"]["result"]
        of_one = body["messages"][0]["content"] == "1 1"
        if schema["type"] == "number":
            result: Any = 5 if of_one else 4.5
        else:
            result = "x" if of_one else "z"
        return (200, JSON, iter([chat(json.dumps({"steps": [], "result": result}))]))

    receiver.answer = answer
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=criteria)
    ended = carry_out(client, client.evals.runs.create(made.id, data_source=source("one", "two")))
    counts = ended.result_counts
    assert (counts.passed, counts.failed, counts.errored) == (1, 0, 1)
    judged = {own.testing_criteria: own for own in ended.per_testing_criteria_results}
    assert (judged["a"].passed, judged["a"].failed) == (1, 1)
    assert (judged["b"].passed, judged["b"].failed) == (1, 0), "a label that is none is no grade"
    items = client.evals.runs.output_items.list(ended.id, eval_id=made.id).data
    assert [result.score for result in items[1].results] == [4.5, 0]
    error: Any = items[1].results[1].to_dict()["error"]
    assert error["code"] == "model_grader_parse_error"


def test_a_run_goes_on_where_another_process_has_left_it(
    service: Service, client: openai.OpenAI, carry_out: Callable[..., Any], receiver: Receiver
) -> None:
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    run = client.evals.runs.create(made.id, data_source=source(*["one"] * 20))
    held = threading.Event()
    usual = receiver.answer

    def answer(arrived: Any) -> Any:
        if receiver.arrived.qsize() >= 12:
            held.wait(60)
            return (503, JSON, iter([b"{}"]))
        return usual(arrived)

    receiver.answer = answer
    first = loop_of(service)
    with looping(first):
        wait_until(lambda: len(service.store.evals.numbers_of(run.id)) == 8)
        held.set()
    now = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (now.status, now.result_counts.passed) == ("in_progress", 8)
    receiver.answer = usual
    asked = receiver.arrived.qsize()
    ended = carry_out(client, run)
    assert (ended.status, ended.result_counts.passed) == ("completed", 20)
    assert receiver.arrived.qsize() - asked == 12, "what was stored is not asked again"
    assert ended.per_model_usage[0].invocation_count == 20


def test_a_run_that_is_cancelled_or_lost_to_another_process_stores_nothing_more(
    service: Service, client: openai.OpenAI, receiver: Receiver
) -> None:
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    run = client.evals.runs.create(made.id, data_source=source("one"))
    receiver.answer = lambda _: (503, JSON, iter([b"{}"]))
    runs = loop_of(service)
    with looping(runs):
        wait_until(lambda: receiver.arrived.qsize() > 1)
        canceled = client.evals.runs.cancel(run.id, eval_id=made.id)
        assert canceled.status == "canceled"
        wait_until(lambda: not runs.threads)
    assert client.evals.runs.cancel(run.id, eval_id=made.id).status == "canceled"
    old = service.http("POST", f"/v1/evals/{made.id}/runs/{run.id}")
    assert old.json()["status"] == "canceled", "as clients before 3 ask"
    assert service.store.evals.claim_run("other", []) is None
    taken = client.evals.runs.create(made.id, data_source=source("one"))
    claimed = service.store.evals.claim_run("other", [])
    assert claimed is not None
    assert claimed.id == taken.id
    assert service.store.evals.claim_run("third", []) is None
    assert not service.store.evals.end_run(taken.id, "third", "completed")


@pytest.mark.slow
def test_a_tuned_model_is_judged_until_it_is_gone(
    service: Service,
    client: openai.OpenAI,
    training_file: str,
    receiver: Receiver,
    carry_out: Callable[..., Any],
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    tuned = put(service, job_id, state=State.SUCCEEDED, attempt=1).spec.tuned_name
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    run = client.evals.runs.create(made.id, data_source=source("one", model=tuned))
    ended = carry_out(client, run)
    assert (ended.result_counts.passed, ended.model) == (1, tuned)
    assert json.loads(receiver.arrived.get(timeout=60).body)["model"] == tuned
    run = client.evals.runs.create(made.id, data_source=source("one", model=tuned))
    client.models.delete(tuned)
    failed = carry_out(client, run)
    assert (failed.status, failed.error.code) == ("failed", "model_not_found")


def test_a_servers_refusal_is_the_items(
    client: openai.OpenAI, receiver: Receiver, carry_out: Callable[..., Any]
) -> None:
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    receiver.answer = lambda _: (400, JSON, iter([b'{"error": {"message": "too long"}}']))
    run = client.evals.runs.create(made.id, data_source=source("one"))
    ended = carry_out(client, run)
    assert (ended.status, ended.result_counts.errored) == ("completed", 1)
    (item,) = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    assert item.sample.error.message.endswith("answered 400: too long")
    for headers, body in (
        (JSON, b"[]"),
        (JSON, b"{}"),
        ({"content-type": "text/event-stream"}, b""),
    ):
        receiver.answer = lambda _, told=(200, headers, body): (*told[:2], iter([told[2]]))
        run = client.evals.runs.create(made.id, data_source=source("one"))
        ended = carry_out(client, run)
        assert (ended.status, ended.result_counts.errored) == ("completed", 1)


def test_what_is_lacking_is_refused_by_name(service: Service, client: openai.OpenAI) -> None:
    def refused(path: str, body: Any, param: str) -> str:
        error = check_error(service.http("POST", f"/v1/evals{path}", json=body), 400)
        assert error["param"] == param
        return error["message"]

    usual = {"data_source_config": CONFIG, "testing_criteria": [SAME]}
    for name in ("logs", "stored_completions"):
        said = refused("", {**usual, "data_source_config": {"type": name}}, "data_source_config")
        assert f"'{name}' is not available" in said
    pattern = {**CONFIG, "item_schema": {"pattern": "(a+)+$"}}
    refused("", {**usual, "data_source_config": pattern}, "data_source_config.item_schema")
    for criteria, param in (
        ([SAME, SAME], "testing_criteria.1.name"),
        ([{**NEAR, "pass_threshold": None}], "testing_criteria.0.pass_threshold"),
        ([{**SAME, "reference": "{{ items.answer }}"}], "testing_criteria.0"),
        ([{"type": "multi", "name": "a"}], "testing_criteria.0"),
        (
            [
                {
                    "type": "label_model",
                    "name": "l",
                    "model": "gpt-4o",
                    "input": [{"role": "user", "content": "{{ item.answer }}"}],
                    "labels": ["a"],
                    "passing_labels": ["a"],
                }
            ],
            "testing_criteria.0.model",
        ),
    ):
        refused("", {**usual, "testing_criteria": criteria}, param)
    blind = {**CONFIG, "include_sample_schema": False}
    refused(
        "",
        {**usual, "data_source_config": blind},
        "data_source_config.include_sample_schema",
    )
    runs = f"/{client.evals.create(**usual).id}/runs"
    stored = {"type": "stored_completions"}
    for data, param in (
        (source(source=stored), "data_source.source"),
        (source(source={"type": "file_id", "id": "file-none"}), "data_source.source.id"),
        (source("one", sampling_params={"max_completion_tokens": 5000}), None),
        (source(source={"type": "file_content", "content": [{"item": {}}]}), None),
        (
            source(
                "one",
                input_messages={
                    "type": "template",
                    "template": [{"role": "user", "content": "{{ sample.output_text }}"}],
                },
            ),
            "data_source.input_messages.template.0.content",
        ),
        (source("one", model="ft:tiny:local::none"), "model"),
    ):
        answer = service.http("POST", f"/v1/evals{runs}", json={"data_source": data})
        assert answer.status_code in (400, 404), answer.text
        if param:
            assert answer.json()["error"]["param"] == param
    assert client.evals.runs.list(runs.split("/")[1]).data == []


def test_without_an_inference_server_the_preview_is_asked_and_names_what_it_lacks(
    service: Service, client: openai.OpenAI
) -> None:
    service.use(service.settings.model_copy(update={"inference_url": ""}))
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    form = {"response_format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError, match="the preview does not have it"):
        client.evals.runs.create(made.id, data_source=source("one", sampling_params=form))
    service.use(service.settings.model_copy(update={"inference_url": "", "preview": "off"}))
    with pytest.raises(openai.NotFoundError, match="does not serve"):
        client.evals.runs.create(made.id, data_source=source("one"))


def test_a_repeated_create_makes_no_second_one(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"data_source_config": CONFIG, "testing_criteria": [SAME]}
    keyed = {"idempotency-key": "k1"}
    again = {"x-stainless-retry-count": "1"}
    made = client.evals.create(**wanted, extra_headers=keyed)
    assert client.evals.create(**wanted, extra_headers=keyed).id == made.id
    assert client.evals.create(**wanted, extra_headers=again).id == made.id
    assert client.evals.create(**wanted).id != made.id
    with pytest.raises(openai.BadRequestError, match="used with another body"):
        client.evals.create(**{**wanted, "testing_criteria": [NEAR]}, extra_headers=keyed)
    asked = source("one")
    run = client.evals.runs.create(made.id, data_source=asked, extra_headers=keyed)
    for headers in (keyed, again):
        repeated = client.evals.runs.create(made.id, data_source=asked, extra_headers=headers)
        assert repeated.id == run.id
    assert client.evals.runs.create(made.id, data_source=asked).id != run.id
    with pytest.raises(openai.BadRequestError, match="used with another body"):
        client.evals.runs.create(made.id, data_source=source("two"), extra_headers=keyed)


def test_projects_see_nothing_of_each_other_and_bytes_count(
    service: Service, client: openai.OpenAI, carry_out: Callable[..., Any]
) -> None:
    made = client.evals.create(data_source_config=CONFIG, testing_criteria=[SAME])
    run = client.evals.runs.create(made.id, data_source=source("one"))
    service.store.projects.ensure_project("other", "rival")
    other = service.client(
        service.store.keys.create_key(NewKey(project_id="other", name="k", scope="user"))[1]
    )
    assert other.evals.list().data == []
    for call in (
        lambda: other.evals.retrieve(made.id),
        lambda: other.evals.update(made.id, name="x"),
        lambda: other.evals.runs.list(made.id),
        lambda: other.evals.runs.cancel(run.id, eval_id=made.id),
        lambda: other.evals.runs.output_items.list(run.id, eval_id=made.id),
        lambda: other.evals.runs.create(made.id, data_source=source("one")),
        lambda: other.evals.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    service.store.projects.update_project("default", limits={"max_bytes": 3000})
    failed = carry_out(client, run)
    assert (failed.status, failed.error.code) == ("failed", "storage_limit")
