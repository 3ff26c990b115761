"""The form of a new job: fields, create bodies, and the body as programs. Pure."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import yaml
from openai.resources.fine_tuning.jobs import Jobs

from api.page import job_form
from ft_service.spec import parse_request
from ft_service.sweeps.search_space import parse_sweep
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


def test_values_to_try_make_a_sweep() -> None:
    form = {"model": "tiny", "training_file": "file-a", "validation_split": "0.1"}
    text = "training.learning_rate: [1e-4, 3e-4]\nlora.r: [8, 16]"
    values = {"training.learning_rate": ["1e-4", "3e-4"], "lora.r": [8, 16]}
    body = job_form.body_of(form | {"sweep": text})
    assert body["sweep"] == values
    assert len(parse_sweep(body).jobs) == 4, "numbers as YAML reads them, and as it does not"
    pasted = "sweep:\n" + "\n".join(f"  {line}" for line in text.splitlines())
    assert job_form.body_of(form | {"sweep": pasted}) == body
    assert "ft sweep submit --watch job.yaml" in job_form.command_text(body, {})
    program = job_form.python_text(body, "http://x")
    compile(program, "program", "exec")
    assert '"/fine_tuning/sweeps"' in program
    for wrong in ("[1, 2]", "a: [", "3"):
        with pytest.raises(ValueError, match="values to try must be"):
            job_form.body_of(form | {"sweep": wrong})
    with pytest.raises(ValueError, match="sweep: the form has fields for it"):
        job_form.body_of(form | {"other": "sweep: {lora.r: [8]}"})


def test_what_the_form_has_no_field_for_goes_through_it_unchanged() -> None:
    dpo = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    other = {
        "method": dpo,
        "chat_template": "{{ messages }}",
        "evaluation": {"prompts": 4, "metrics": ["contains"]},
    }
    body = BODY | other
    assert job_form.body_of(job_form.fields_of(body)) == body
    assert job_form.fields_of(body)["evaluation.prompts"] == "4"
    for wrong, told in (
        ("a: [", "must be YAML"),
        ("just words", "name: value"),
        ("lora: {r: 4}", "lora: the form has fields"),
    ):
        with pytest.raises(ValueError, match=told):
            job_form.body_of({"model": "tiny", "other": wrong})


def test_the_method_is_that_of_the_card_and_its_fields_with_the_other_options() -> None:
    card = {
        "model": "tiny",
        "method": "dpo",
        "method.beta": "0.2",
        "method.grader": job_form.EXAMPLE_GRADER,
    }
    more = "method: {dpo: {hyperparameters: {loss_type: ipo}}}"
    wanted = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "loss_type": "ipo"}}}
    assert job_form.body_of(card | {"other": more})["method"] == wanted
    fields = job_form.fields_of({"method": wanted})
    assert (fields["method"], fields["method.beta"]) == ("dpo", "0.2")
    assert job_form.body_of(fields)["method"] == wanted
    taught = {"teacher": "larger", "with_context": "Be brief.\n"}
    of_teacher = {"method": "distillation", **{f"method.{k}": v for k, v in taught.items()}}
    body = job_form.body_of(card | of_teacher | {"other": "method: {distillation: {top_k: 20}}"})
    assert body["method"] == {"type": "distillation", "distillation": {"top_k": 20, **taught}}
    fields = job_form.fields_of(body)
    assert {name: fields[name] for name in of_teacher} == of_teacher
    assert job_form.body_of(fields)["method"] == body["method"]
    graded = job_form.body_of(card | {"method": "reinforcement"})["method"]
    assert graded["reinforcement"]["grader"]["operation"] == "eq"
    for other, told in (
        ("method: {dpo: {hyperparameters: {beta: 1}}}", "beta: the form has a field"),
        ("method: {type: reinforcement}", "keep one"),
    ):
        with pytest.raises(ValueError, match=told):
            job_form.body_of(card | {"other": other})
    other = "method: {reinforcement: {grader: {type: python}}}"
    with pytest.raises(ValueError, match="grader: the form has a field"):
        job_form.body_of(card | {"method": "reinforcement", "other": other})


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_the_card_of_pairs_has_a_choice_of_losses(kind: str) -> None:
    card = {"model": "tiny", "method": "dpo", "method.pairs": kind, "method.beta": "0.5"}
    wanted = {"type": kind, kind: {"hyperparameters": {"beta": 0.5}}}
    body = job_form.body_of(card)
    assert body["method"] == wanted
    fields = job_form.fields_of(body)
    assert {name: fields[name] for name in card} == card
    assert fields["other"] == ""
    other_card = job_form.body_of(card | {"method": "kto"})["method"]
    assert other_card["type"] == "kto", "what a hidden field says does not count"
    with pytest.raises(ValueError, match="keep one"):
        job_form.body_of(card | {"other": "method: {type: dpo}"})


def test_a_mapping_of_columns_is_taken_wherever_it_is_written() -> None:
    mapping = {"prompt": "Prompt", "completion": "Completion"}
    written = "{prompt: Prompt, completion: Completion}"
    for form in ({"data": written}, {"data": f"data: {written}"}, {"other": f"data: {written}"}):
        assert job_form.body_of({"model": "tiny", **form}) == {"model": "tiny", "data": mapping}
    with pytest.raises(ValueError, match="data: the form has fields"):
        job_form.body_of({"data": written, "other": f"data: {written}"})


def test_openais_hyperparameters_become_the_forms_own_fields() -> None:
    fields = job_form.fields_of(
        {"method": {"supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}}
    )
    assert fields["training.n_epochs"] == "2"
    assert fields["training.batch_size"] == "auto", "which is another than the default"
    assert (
        job_form.fields_of({"hyperparameters": {"learning_rate_multiplier": 2}})[
            "training.learning_rate"
        ]
        == "0.0004"
    )


@pytest.mark.parametrize(
    "method",
    [{"type": "supervised"}, {"type": "dpo"}, {"type": "kto"}, {"type": "orpo"}, reinforcement()],
)
def test_a_multiplied_learning_rate_stays_the_same_with_every_method(
    method: dict[str, Any],
) -> None:
    body = {
        "model": "tiny",
        "training_file": "file-a",
        "method": method,
        "hyperparameters": {"learning_rate_multiplier": 2},
    }
    again = job_form.body_of(job_form.fields_of(body))
    assert "hyperparameters" not in again
    assert again.get("method", {"type": "supervised"})["type"] == method["type"]
    rate = parse_request(body).resolved_training().rate
    assert parse_request(again).resolved_training().rate == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize(
    "given",
    [
        {"distributed": {"nproc_per_node": "1:2", "nnodes": "2:8", "profile": "on"}},
        {
            "lora": {
                "target_modules": "1:2",
                "modules_to_save": ["1:2", "off"],
                "alpha_pattern": {"1:2": 0.1 + 0.2},
            }
        },
        {"lora": {"target_modules": "1e3", "rank_pattern": None}},
        {"lora": {"target_modules": "a: b # c"}, "distributed": {"profile": " a\nb\u2028\t"}},
        {"lora": {"target_modules": ""}, "distributed": {"profile": "null"}},
        {
            "lora": {"target_modules": "'q'"},
            "training": {"learning_rate": 1.2345678901234567e-5, "max_steps": None},
        },
        {
            "precision": {"fp8_products": "off", "default": "auto"},
            "distributed": {"compile": False},
        },
        {"data": {"prompt": "1:2", "completion": "yes"}},
        {"chat_template": "1:2", "integrations": [{"type": "wandb", "wandb": {"project": "1:2"}}]},
        {
            "metadata": {
                "a=b": "c",
                "k": "l1\nl2",
                " x": "y ",
                "{": "}",
                "é": "ü",
                "n": "",
                "o": "1:2",
                "p": "\u2028=",
            }
        },
    ],
)
def test_run_again_is_of_the_same_body_whatever_yaml_makes_of_its_texts(
    given: dict[str, Any],
) -> None:
    body = {"model": "tiny", **given}
    again = job_form.body_of(job_form.fields_of(body))
    assert json.dumps(again, sort_keys=True) == json.dumps(body, sort_keys=True), (
        "in which 1, 1.0 and true differ"
    )


def test_a_range_is_written_as_it_is_and_no_number_in_base_60() -> None:
    body = job_form.body_of(
        {
            "distributed.nproc_per_node": "1:2",
            "data": "{prompt: 1:2}",
            "other": "suffixes: [2:8, 1:2.5]",
        }
    )
    assert body == {
        "distributed": {"nproc_per_node": "1:2"},
        "data": {"prompt": "1:2"},
        "suffixes": ["2:8", "1:2.5"],
    }
    assert job_form.fields_of(body)["distributed.nproc_per_node"] == "1:2"


@pytest.mark.parametrize(
    "text",
    [
        "nan",
        ".nan",
        ".inf",
        "1e999",
        '"\\ud800"',
        "[2024-01-01]",
        "{a: 2024-13-45}",
        "!!int x",
        "&a [*a]",
        "[" * 500,
    ],
)
def test_what_json_cannot_hold_is_text_in_a_field_and_refused_elsewhere(text: str) -> None:
    assert job_form.body_of({"training.learning_rate": text}) == {
        "training": {"learning_rate": text}
    }
    assert job_form.body_of({"metadata": '{"a": NaN}'}) == {"metadata": {'{"a": NaN}': ""}}
    if text not in ("nan", "1e999"):  # which are words to YAML
        with pytest.raises(ValueError, match=r"JSON cannot hold|aliases are not read"):
            job_form.body_of({"other": f"integrations: {text}"})


def test_a_few_hundred_bytes_of_yaml_do_not_become_a_thousand_million_values() -> None:
    levels = [
        f"x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)
    ]
    with pytest.raises(ValueError, match=r"\*a0: aliases are not read here"):
        job_form.body_of({"other": "\n".join(["x0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", *levels])})


def test_megabytes_are_not_read_as_yaml() -> None:
    """Reading one takes a dozen seconds of a thread."""
    text = "a: [" + "1, " * 400_000 + "]"
    with pytest.raises(ValueError, match="1,200,005 characters, at most 300,000"):
        job_form.body_of({"other": text})
    assert job_form.body_of({"evaluation.prompts": text})["evaluation"]["prompts"] == text, (
        "which the API refuses as no list"
    )


def test_an_auto_beside_a_value_of_the_method_fills_in_no_field() -> None:
    """Filled in, it would be given twice."""
    own = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 3}}}
    fields = job_form.fields_of(
        {**BODY, "hyperparameters": {"n_epochs": "auto", "batch_size": "auto"}, "method": own}
    )
    assert "training.n_epochs" not in fields
    assert fields["training.batch_size"] == "auto"
    request = parse_request(job_form.body_of(fields))
    assert request.resolved_training().n_epochs == 3


def test_the_fields_show_numbers_and_words_without_quotes() -> None:
    """`1e-4` is text to YAML 1.1, and an unquoted `off` is false: bodies of SPEC files have them
    so.
    """
    body = {
        "training": {"learning_rate": "1e-4"},
        "precision": {"fp8_products": False, "fused_kernels": "off"},
        "hyperparameters": {"learning_rate_multiplier": "2", "n_epochs": "3"},
    }
    fields = job_form.fields_of({**body, "hyperparameters": {}})
    assert fields["training.learning_rate"] == "1e-4"
    assert (fields["precision.fp8_products"], fields["precision.fused_kernels"]) == ("off", "off")
    fields = job_form.fields_of(body)
    assert (fields["training.learning_rate"], fields["training.n_epochs"]) == ("0.0004", "3")
    options = job_form.options()
    assert options["precision.fp8_products"].choices == ("auto", "off")
    assert options["distributed.nproc_per_node"].default == "auto"


def test_a_format_that_was_given_stays_given_where_the_default_is_chosen() -> None:
    options = job_form.options()
    for name in ("precision.default", "precision.compute"):
        assert (options[name].default, "bf16" in options[name].choices) == ("auto", True)
    fields = job_form.fields_of({"precision": {"default": "bf16"}})
    assert job_form.body_of({"model": "tiny", **fields})["precision"] == {"default": "bf16"}


def test_what_is_written_in_a_field_is_read_as_in_yaml() -> None:
    form = {
        "model": "tiny",
        "training.learning_rate": "3e-5",
        "lora.target_modules": "[q_proj]",
        "training.n_epochs": "two",
    }
    body = job_form.body_of(form)
    assert body["training"] == {"learning_rate": 3e-5, "n_epochs": "two"}, (
        "what is wrong, the API says"
    )
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
    assert yaml.safe_load(job_form.yaml_text(BODY, files)) == BODY | {
        "training_file": "train.jsonl"
    }
    assert "ft submit --watch job.yaml" in job_form.command_text(BODY, files)
    calls: list[dict[str, object]] = []
    program = (
        job_form.python_text(BODY, "http://here")
        .partition("client.fine_tuning.jobs.create(")[2]
        .rpartition(")\nprint")[0]
    )
    exec(f"took({program})", {"took": lambda **given: calls.append(given)})
    ours = {"data", "lora", "training", "validation_split"}
    assert calls[0].pop("extra_body") == {
        name: value for name, value in BODY.items() if name in ours
    }
    assert calls[0] == {name: value for name, value in BODY.items() if name not in ours}
    assert set(calls[0]) <= set(inspect.signature(Jobs.create).parameters), "what the client knows"
