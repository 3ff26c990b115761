"""The form of a new job: fields, create bodies, and the body as programs. Pure."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import yaml
from openai.resources.fine_tuning.jobs import Jobs

from api.page import job_form
from ft_service.spec import parse_request
from tests.support.rollouts import method as reinforcement

BODY = {
    "model": "tiny",
    "training_file": "file-a",
    "suffix": "v1",
    "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q": 4}},
    "training": {"learning_rate": 2e-4, "packing": False, "max_steps": 10},
    "validation_split": 0.1,
    "seed": 7,
    "data": {"prompt": "question", "completion": "answer"},
    "metadata": {"name": "by hand", "team": "a=b"},
}


def test_a_body_goes_through_the_form_unchanged() -> None:
    fields = job_form.fields_of(BODY)
    assert job_form.body_of(fields) == BODY
    assert (fields["validation_split"], fields["other"]) == ("0.1", "")


def test_what_the_form_has_no_field_for_goes_through_it_unchanged() -> None:
    dpo = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    other = {"method": dpo, "chat_template": "{{ messages }}", "evaluation": {"prompts": 4, "metrics": ["contains"]}}
    body = BODY | other
    assert job_form.body_of(job_form.fields_of(body)) == body
    assert job_form.fields_of(body)["evaluation.prompts"] == "4"
    for wrong, told in (("a: [", "must be YAML"), ("just words", "name: value"), ("lora: {r: 4}", "lora: the form has fields")):
        with pytest.raises(ValueError, match=told):
            job_form.body_of({"model": "tiny", "other": wrong})


def test_a_mapping_of_columns_is_taken_wherever_it_is_written() -> None:
    mapping = {"prompt": "Prompt", "completion": "Completion"}
    written = "{prompt: Prompt, completion: Completion}"
    for form in ({"data": written}, {"data": f"data: {written}"}, {"other": f"data: {written}"}):
        assert job_form.body_of({"model": "tiny", **form}) == {"model": "tiny", "data": mapping}
    with pytest.raises(ValueError, match="data: the form has fields"):
        job_form.body_of({"data": written, "other": f"data: {written}"})


def test_openais_hyperparameters_become_the_forms_own_fields() -> None:
    fields = job_form.fields_of({"method": {"supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}})
    assert fields["training.n_epochs"] == "2"
    assert fields["training.batch_size"] == "auto", "which is another than the default"
    assert job_form.fields_of({"hyperparameters": {"learning_rate_multiplier": 2}})["training.learning_rate"] == "0.0004"


@pytest.mark.parametrize("method", [{"type": "supervised"}, {"type": "dpo"}, reinforcement()])
def test_a_multiplied_learning_rate_stays_the_same_with_every_method(method: dict[str, Any]) -> None:
    body = {"model": "tiny", "training_file": "file-a", "method": method, "hyperparameters": {"learning_rate_multiplier": 2}}
    again = job_form.body_of(job_form.fields_of(body))
    assert "hyperparameters" not in again
    rate = parse_request(body).resolved_training().rate
    assert parse_request(again).resolved_training().rate == pytest.approx(rate, rel=1e-9)


def test_what_is_written_in_a_field_is_read_as_in_yaml() -> None:
    form = {"model": "tiny", "training.learning_rate": "3e-5", "lora.target_modules": "[q_proj]", "training.n_epochs": "two"}
    body = job_form.body_of(form)
    assert body["training"] == {"learning_rate": 3e-5, "n_epochs": "two"}, "what is wrong, the API says"
    assert body["lora"] == {"target_modules": ["q_proj"]}


def test_every_option_has_a_field_and_those_of_few_values_a_choice() -> None:
    options = job_form.options()
    assert set(job_form.FIRST) <= set(options)
    assert options["training.lr_scheduler_type"].choices[:3] == ("linear", "cosine", "constant")
    assert options["training.packing"].choices == ("true", "false")
    assert options["training.tokens_per_micro_batch"].choices == ()
    assert all(option.hint for name, option in options.items() if name != "training.optim")


def test_the_same_job_in_three_languages() -> None:
    files = {"file-a": "train.jsonl"}
    assert yaml.safe_load(job_form.yaml_text(BODY, files)) == BODY | {"training_file": "train.jsonl"}
    assert "ft submit --watch job.yaml" in job_form.command_text(BODY, files)
    calls: list[dict[str, object]] = []
    program = (
        job_form.python_text(BODY, "http://here").partition("client.fine_tuning.jobs.create(")[2].rpartition(")\nprint")[0]
    )
    exec(f"took({program})", {"took": lambda **given: calls.append(given)})
    ours = {"data", "lora", "training", "validation_split"}
    assert calls[0].pop("extra_body") == {name: value for name, value in BODY.items() if name in ours}
    assert calls[0] == {name: value for name, value in BODY.items() if name not in ours}
    assert set(calls[0]) <= set(inspect.signature(Jobs.create).parameters), "what the client knows"
