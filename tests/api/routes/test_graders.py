"""OpenAI's graders by the real client."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import openai
import pytest

from ft_service.graders import asking, python_fence, text_processes
from ft_service.host.helper_process import HelperProcess
from ft_service.store.records import NewKey
from tests.support.rest.receiver import Answer, Received, hanging, receiving
from tests.support.rest.service import TRAINING, Service

SAME: Any = {
    "type": "string_check",
    "name": "same",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.reference_answer }}",
    "operation": "eq",
}
NEAR: Any = {**SAME, "type": "text_similarity", "name": "near", "evaluation_metric": "fuzzy_match"}
del NEAR["operation"]
BOTH: Any = {
    "type": "multi",
    "name": "both",
    "graders": {"a": SAME, "b": NEAR},
    "calculate_output": "0.5 * a + 0.5 * b",
}


def test_graders_are_validated_and_run(service: Service) -> None:
    graders = service.client().fine_tuning.alpha.graders
    for grader in (SAME, NEAR, BOTH):
        found = graders.validate(grader=grader).grader
        assert found is not None
        assert found.to_dict() == grader
    ran = graders.run(grader=BOTH, model_sample="abcd", item={"reference_answer": "abxd"})
    assert (ran.reward, ran.sub_rewards) == (0.375, {"a": 0.0, "b": 0.75})
    assert (ran.metadata.name, ran.metadata.type, ran.metadata.scores) == (
        "both",
        "multi",
        {"a": 0.0, "b": 0.75},
    )
    assert not any(ran.metadata.errors.to_dict().values())
    assert ran.api_model_grader_token_usage_per_model == {}
    missing = graders.run(grader=SAME, model_sample="abcd", item={})
    assert (missing.reward, missing.metadata.errors.invalid_variable_error) == (0.0, True)
    details = missing.metadata.errors.to_dict()["details"]
    assert details == {"invalid_variable_error": "{{ item.reference_answer }} is not there"}
    alone = graders.run(
        grader=cast("Any", {**BOTH, "graders": SAME, "calculate_output": "same"}),
        model_sample="x",
        item={"reference_answer": "x"},
    )
    assert alone.reward == 1.0


def test_numbers_of_an_item_are_filled_in_as_those_of_a_line_of_a_data_file(
    service: Service,
) -> None:
    """JSON of requests has 1.0 as a whole number elsewhere, and a grader would find another text
    than in training.
    """
    whole: Any = {
        **SAME,
        "reference": "{{ item.whole }} {{ item.list }} {{ sample.output_json.a }}",
        "input": "1.0 [2.0, 3] 4.0",
    }
    graders = service.client().fine_tuning.alpha.graders
    assert (
        graders.run(
            grader=whole, model_sample='{"a": 4.0}', item={"whole": 1.0, "list": [2.0, 3]}
        ).reward
        == 1.0
    )
    scored: Any = {**SCORED, "model": "none", "sampling_params": {"seed": 3.0}}
    with pytest.raises(openai.BadRequestError, match="model = 'none'"):
        graders.run(grader=scored, model_sample="x")


SCORED: Any = {
    "type": "score_model",
    "name": "s",
    "model": "judge",
    "input": [{"role": "user", "content": "{{item.q}}"}],
}
LABELLED: Any = {
    **SCORED,
    "type": "label_model",
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}
ASKED: Any = {
    "type": "endpoint",
    "name": "e",
    "url": "https://grader.example/x",
    "webhook_endpoint_id": "we_none",
}
PYTHON: Any = {
    "type": "python",
    "name": "p",
    "source": "def grade(sample, item): return len(sample['output_text']) / item['n']",
}


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (
            SCORED,
            "grader.model = 'judge': is not one that this service allows graders to ask, and it "
            "allows none",
        ),
        (
            {**SCORED, "range": [1, 0]},
            "grader.range = [1, 0]: the first number, the lowest score, must be below the second",
        ),
        ({**SCORED, "input": []}, "grader.input = []: must have at least 1 entry."),
        (
            {
                **SCORED,
                "input": [{"role": "user", "content": {"type": "input_image", "image_url": "x"}}],
            },
            "only text is graded",
        ),
        (LABELLED, "only available within a multi grader"),
        (
            {**BOTH, "graders": {"a": {**LABELLED, "passing_labels": ["fine"]}}},
            "'fine' is not one of labels",
        ),
        ({**BOTH, "graders": {}}, "grader.graders = {}: must have at least 1 entry."),
        (
            {**NEAR, "evaluation_metric": "cosine"},
            "grader.evaluation_metric = 'cosine': is not available: it needs an embedding",
        ),
        ({**NEAR, "evaluation_metric": "meteor"}, "needs WordNet"),
        ({**PYTHON, "image_tag": "2025-05-08"}, "image_tag is not available"),
        ({**PYTHON, "source": "é" * 131_073}, "source has 262,146 bytes, at most 262,144"),
        (
            {**ASKED, "url": "https://169.254.169.254/latest"},
            "grader.url = 'https://169.254.169.254/latest': 169.254.169.254 is not",
        ),
        ({**ASKED, "url": "http://grader.example"}, "must begin with https://"),
        ({**BOTH, "calculate_output": "a + c"}, "there is no grader 'c'"),
        ({**SAME, "input": "{{ prompt }}"}, "names nothing"),
        ({**SAME, "operation": "is"}, "grader.operation = 'is': must be eq, ne, like or ilike"),
        (
            {"type": "oracle"},
            "string_check, text_similarity, score_model, python, endpoint or multi",
        ),
    ],
)
def test_what_cannot_grade_is_refused_by_name(service: Service, grader: Any, said: str) -> None:
    client = service.client()
    for call in (
        lambda: client.fine_tuning.alpha.graders.validate(grader=grader),
        lambda: client.fine_tuning.alpha.graders.run(grader=grader, model_sample="x"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert said in refused.value.message
        assert (refused.value.param or "").startswith("grader")


def test_python_is_run_in_a_fence_or_refused_by_name(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    graders = service.client().fine_tuning.alpha.graders
    if python_fence.refusal({}) is None:
        assert graders.validate(grader=PYTHON).grader.to_dict() == PYTHON  # pyright: ignore[reportOptionalMemberAccess]
        assert graders.run(grader=PYTHON, model_sample="abc", item={"n": 4}).reward == 0.75
        errors = graders.run(grader=PYTHON, model_sample="abc", item={"n": 0}).metadata.errors
        assert errors.python_grader_runtime_error
        assert 'File "grader.py", line 1, in grade\nZeroDivisionError' in (
            errors.python_grader_runtime_error_details or ""
        )
        with pytest.raises(
            openai.BadRequestError, match=r"(?s)grader.source: cannot be loaded: .*SyntaxError"
        ):
            graders.validate(grader=cast("Any", {**PYTHON, "source": "def grade("}))
    monkeypatch.setattr(python_fence, "refusal", lambda _: "there is no fence")
    with pytest.raises(
        openai.BadRequestError, match="type 'python' is not available: there is no fence"
    ) as refused:
        graders.run(grader=PYTHON, model_sample="x")
    assert refused.value.code == "not_available"


def test_a_model_of_the_operators_list_grades(service: Service) -> None:
    def completion(_: Received) -> Answer:
        content = json.dumps({"steps": [], "result": 0.75})
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        choices = [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]
        return (
            200,
            {},
            iter([json.dumps({"model": "judge-2", "choices": choices, "usage": usage}).encode()]),
        )

    with receiving() as server:
        server.answer = completion
        (service.settings.home / "judge.key").write_text("sk-judge\n")
        models = service.settings.home / "graders.yaml"
        models.write_text(
            f"judge: {{base_url: '{server.url}/v1', key_file: judge.key, model: org/judge}}\n"
        )
        service.use(service.settings.model_copy(update={"grader_models": models}))
        grader: Any = {
            **SCORED,
            "range": [0, 1],
            "sampling_params": {"max_completions_tokens": 99, "seed": 1},
        }
        ran = service.client().fine_tuning.alpha.graders.run(
            grader=grader, model_sample="4", item={"q": "2+2?"}
        )
        asked = server.arrived.get_nowait()
    sent = json.loads(asked.body)
    assert (asked.path, asked.headers["authorization"]) == (
        "/v1/chat/completions",
        "Bearer sk-judge",
    )
    assert sent["messages"] == [{"role": "user", "content": "2+2?"}]
    assert (sent["model"], sent["max_completion_tokens"], sent["seed"]) == ("org/judge", 99, 1)
    assert (ran.reward, ran.metadata.token_usage, ran.metadata.sampled_model_name) == (
        0.75,
        10,
        "judge-2",
    )
    usage = {"judge": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
    assert ran.api_model_grader_token_usage_per_model == usage


def test_a_users_own_server_grades_and_can_verify_who_asks(service: Service) -> None:
    client = service.client()
    with receiving() as server:
        server.answer = lambda _: (200, {}, iter([b'{"reward": 0.5}']))
        service.use(service.settings.model_copy(update={"webhook_allow_private": True}))
        hook = client.webhooks.create(
            name="grader", url=server.url, event_types=["fine_tuning.job.failed"]
        )
        grader: Any = {**ASKED, "url": f"{server.url}/grade", "webhook_endpoint_id": hook.id}
        graders = client.fine_tuning.alpha.graders
        graders.validate(grader=grader)
        assert server.arrived.empty(), "to validate asks no server"
        assert graders.run(grader=grader, model_sample='{"a": 1}', item={"n": 2}).reward == 0.5
        asked = server.arrived.get_nowait()
        sent = json.loads(asked.body)
        assert (asked.path, sent["item"], sent["sample"]["output_json"]) == (
            "/grade",
            {"n": 2},
            {"a": 1},
        )
        client.webhooks.verify_signature(
            asked.body.decode(), asked.headers, secret=hook.signing_secret
        )
        with pytest.raises(openai.NotFoundError) as missing:
            graders.validate(grader=cast("Any", {**grader, "webhook_endpoint_id": "we_none"}))
        assert missing.value.param == "grader.webhook_endpoint_id"
        service.store.projects.ensure_project("rival", "rival")
        theirs = service.client(
            service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]
        )
        ran = theirs.fine_tuning.alpha.graders.run(grader=grader, model_sample="x")
        assert ran.metadata.errors.to_dict()["endpoint_grader_server_error"], (
            "another project's secret signs nothing"
        )
        assert server.arrived.empty()


def test_a_projects_slow_grader_costs_no_other_project_a_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "RETRY_SECONDS", 0.0)
    service.use(service.settings.model_copy(update={"webhook_allow_private": True}))
    service.store.projects.ensure_project("rival", "rival")
    rival = service.client(
        service.store.keys.create_key(NewKey(project_id="rival", name="k", scope="admin"))[1]
    )
    with hanging() as (url, hang_up), ThreadPoolExecutor(8) as threads:
        hook = rival.webhooks.create(name="g", url=url, event_types=["fine_tuning.job.failed"])
        slow: Any = {**ASKED, "url": url, "webhook_endpoint_id": hook.id}
        run = partial(rival.fine_tuning.alpha.graders.run, grader=slow, model_sample="x")
        waiting = [threads.submit(run) for _ in range(8)]
        try:
            quick = (
                service.client().with_options(timeout=20.0, max_retries=0).fine_tuning.alpha.graders
            )
            for _ in range(4):
                assert (
                    quick.run(grader=SAME, model_sample="x", item={"reference_answer": "x"}).reward
                    == 1.0
                )
            assert not any(one.done() for one in waiting)
        finally:
            hang_up()
        assert all(
            one.result().metadata.errors.to_dict()["endpoint_grader_server_error"]
            for one in waiting
        )


def test_a_host_that_kills_what_grades_is_a_503_with_a_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = text_processes._started

    def killed() -> HelperProcess:
        process = started()
        os.kill(process.pid, signal.SIGKILL)
        return process

    text_processes.TEXT_PROCESSES.close()
    monkeypatch.setattr(text_processes, "_started", killed)
    run = partial(
        service.client().with_options(max_retries=0).fine_tuning.alpha.graders.run,
        grader=BOTH,
        model_sample="abcd",
    )
    with pytest.raises(openai.InternalServerError) as later:
        run(item={"reference_answer": "abxd"})
    assert (later.value.status_code, later.value.code) == (503, "unavailable")
    assert int(later.value.response.headers["retry-after"]) > 0
    monkeypatch.undo()
    assert run(item={"reference_answer": "abxd"}).reward == 0.375


def test_a_jobs_evaluation_takes_graders_and_a_file_of_prompts(service: Service) -> None:
    client = service.client()
    data = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    lines = (
        b'{"messages": [{"role": "user", "content": "Hi"}], "reference": "Hello", "n": '
        b'3}\n{"prompt": "Once"}\n'
    )
    prompts = client.files.create(file=("prompts.jsonl", lines), purpose="fine-tune")

    def create(evaluation: Any) -> Any:
        return client.fine_tuning.jobs.create(
            model="tiny", training_file=data.id, extra_body={"evaluation": evaluation}
        )

    job = create({"prompts": prompts.id, "metrics": ["bleu", SAME]})
    assert job.evaluation["prompts"] == 2
    spec = service.store.jobs.get_job("default", job.id).spec
    assert spec.evaluation is not None
    first, second = spec.evaluation.given
    assert first.messages is not None
    assert (first.messages[0].content, first.reference, first.item, second.prompt) == (
        "Hi",
        "Hello",
        {"n": 3},
        "Once",
    )
    broken = client.files.create(
        file=("b.jsonl", b'{"prompt": "x"}\n{"messages": 3}\n'), purpose="fine-tune"
    )
    for evaluation, said in (
        ({"prompts": broken.id}, "b.jsonl, line 2: messages"),
        ({"prompts": "file-none"}, "no such file"),
        ({"metrics": [PYTHON]}, "run no code of requests"),
        (
            {"metrics": [{**BOTH, "graders": {"a": SCORED}}]},
            "type 'score_model' is not available in an evaluation",
        ),
        ({"metrics": ["bleu", {**SAME, "input": "{{ x }}"}]}, "names nothing"),
        ({"metrics": ["rouge_1"]}, "rouge_l"),
        ({"metrics": [SAME, SAME]}, "'same' is there twice"),
        ({"prompts": 0}, "at least 1"),
        (
            {"prompts": [{"messages": [{"role": "assistant", "content": "x"}]}]},
            "end before the assistant's answer",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create(evaluation)
        assert said in refused.value.message, evaluation
        assert (refused.value.param or "").startswith("evaluation"), evaluation
