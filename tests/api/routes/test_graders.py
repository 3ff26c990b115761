"""OpenAI's graders by the real client."""

from __future__ import annotations

from typing import Any, cast

import openai
import pytest

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
BOTH: Any = {"type": "multi", "name": "both", "graders": {"a": SAME, "b": NEAR}, "calculate_output": "0.5 * a + 0.5 * b"}


def test_graders_are_validated_and_run(service: Service) -> None:
    graders = service.client().fine_tuning.alpha.graders
    for grader in (SAME, NEAR, BOTH):
        found = graders.validate(grader=grader).grader
        assert found is not None
        assert found.to_dict() == grader
    ran = graders.run(grader=BOTH, model_sample="abcd", item={"reference_answer": "abxd"})
    assert (ran.reward, ran.sub_rewards) == (0.375, {"a": 0.0, "b": 0.75})
    assert (ran.metadata.name, ran.metadata.type, ran.metadata.scores) == ("both", "multi", {"a": 0.0, "b": 0.75})
    assert not any(ran.metadata.errors.to_dict().values())
    assert ran.api_model_grader_token_usage_per_model == {}
    missing = graders.run(grader=SAME, model_sample="abcd", item={})
    assert (missing.reward, missing.metadata.errors.invalid_variable_error) == (0.0, True)
    alone = graders.run(
        grader=cast("Any", {**BOTH, "graders": SAME, "calculate_output": "same"}),
        model_sample="x",
        item={"reference_answer": "x"},
    )
    assert alone.reward == 1.0


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ({"type": "python", "name": "p", "source": "def grade(sample, item): return 1"}, "code in a request is not run"),
        ({"type": "score_model", "name": "s", "model": "gpt", "input": []}, "models do not grade here"),
        ({"type": "label_model", "name": "l"}, "models do not grade here"),
        ({**NEAR, "evaluation_metric": "cosine"}, "needs an embedding model"),
        ({**BOTH, "graders": {"a": {"type": "python", "name": "p", "source": ""}}}, "code in a request is not run"),
        ({**BOTH, "calculate_output": "a + c"}, "there is no grader 'c'"),
        ({**SAME, "input": "{{ prompt }}"}, "names nothing"),
        ({**SAME, "operation": "is"}, "grader.operation = 'is': must be eq, ne, like or ilike"),
        ({"type": "oracle"}, "string_check, text_similarity or multi"),
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


def test_a_jobs_evaluation_takes_graders_and_a_file_of_prompts(service: Service) -> None:
    client = service.client()
    data = client.files.create(file=("a.jsonl", TRAINING), purpose="fine-tune")
    lines = b'{"messages": [{"role": "user", "content": "Hi"}], "reference": "Hello", "n": 3}\n{"prompt": "Once"}\n'
    prompts = client.files.create(file=("prompts.jsonl", lines), purpose="fine-tune")

    def create(evaluation: Any) -> Any:
        return client.fine_tuning.jobs.create(model="tiny", training_file=data.id, extra_body={"evaluation": evaluation})

    job = create({"prompts": prompts.id, "metrics": ["bleu", SAME]})
    assert job.evaluation["prompts"] == 2
    spec = service.store.jobs.get_job("default", job.id).spec
    assert spec.evaluation is not None
    first, second = spec.evaluation.given
    assert first.messages is not None
    assert (first.messages[0].content, first.reference, first.item, second.prompt) == ("Hi", "Hello", {"n": 3}, "Once")
    broken = client.files.create(file=("b.jsonl", b'{"prompt": "x"}\n{"messages": 3}\n'), purpose="fine-tune")
    for evaluation, said in (
        ({"prompts": broken.id}, "b.jsonl, line 2: messages"),
        ({"prompts": "file-none"}, "no such file"),
        ({"metrics": [{"type": "python", "name": "p", "source": ""}]}, "code in a request is not run"),
        ({"metrics": ["bleu", {**SAME, "input": "{{ x }}"}]}, "names nothing"),
        ({"metrics": ["rouge_1"]}, "rouge_l"),
        ({"metrics": [SAME, SAME]}, "'same' is there twice"),
        ({"prompts": 0}, "at least 1"),
        ({"prompts": [{"messages": [{"role": "assistant", "content": "x"}]}]}, "end before the assistant's answer"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create(evaluation)
        assert said in refused.value.message, evaluation
        assert (refused.value.param or "").startswith("evaluation"), evaluation
