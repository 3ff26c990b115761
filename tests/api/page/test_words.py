"""What the page makes of numbers, forms and samples. Pure."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import yaml
from fastapi import Request
from openai.resources.fine_tuning.jobs import Jobs

from api.page import answers, comparing, job_form, use, words
from api.page.rendering import rendered
from tests.support.page.teams import evaluation_messages

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


def test_numbers_and_times_in_few_characters() -> None:
    assert [words.number(value) for value in (None, 3, 1234567, 0.30001, 2e-4, 0.0, 123456.7)] == [
        *(words.NONE, "3", "1,234,567", "0.3", "2e-4", "0", "123,457")
    ]
    assert [words.duration(seconds) for seconds in (0, 59, 60, 3725, 90_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert words.byte_text(3 * 1024**3) == "3.0 GiB"


def test_jobs_are_compared_by_what_differs() -> None:
    def job(**lora: Any) -> dict[str, Any]:
        return {"model": "m", "training_file": "f", "validation_file": None, "seed": 1, "priority": 0, "lora": lora} | {
            section: {} for section in job_form.SECTIONS if section != "lora"
        }

    assert comparing.differing([job(r=8, alpha=1), job(r=16, alpha=1)]) == [("lora.r", [8, 16])]
    assert comparing.loss_of({"valid_loss": {"values": [2.0, 1.0, 1.5]}, "train_loss": {"values": [0.1]}}) == 1.0
    assert comparing.loss_of({"train_loss": {"values": [0.5, 0.7]}}) == 0.7
    assert comparing.loss_of({}) is None


def test_lengths_as_bars() -> None:
    bars = words.length_bars([{"total": total, "learned": 5} for total in (10, 10, 40)] + [{"total": 0, "learned": 0}], most=4)
    assert bars is not None
    assert [bar["count"] for bar in bars["bars"]] == [2, 0, 0, 1]
    assert (bars["longest"], bars["median"], bars["learned"]) == (40, 10, 0.25)
    assert words.length_bars([]) is None


def test_use_is_summed_by_day_project_and_key() -> None:
    def result(project: str, key: str | None, tokens: int, seconds: float) -> dict[str, Any]:
        return {
            "project_id": project,
            "api_key_id": key,
            "trained_tokens": tokens,
            "gpu_seconds": seconds,
            "uploaded_bytes": 10,
            "num_jobs": 1,
        }

    days = [
        [result("a", "k1", 5, 60.0), result("b", "k2", 7, 90.5)],
        [],
        [result("a", "k3", 1, 120.0), result("a", None, 2, 0.5)],
    ]
    found = use.summed([{"start_time": 86_400 * day, "results": results} for day, results in enumerate(days)])
    assert found.total == use.Use(tokens=15, gpu_seconds=271.0, bytes=40, jobs=4)
    assert [one.tokens for one in found.days.values()] == [12, 0, 3]
    assert list(found.projects) == ["a", "b"], "who used most first"
    assert [(key, one.tokens) for key, one in found.keys.items()] == [
        (("a", "k3"), 1),
        (("b", "k2"), 7),
        (("a", "k1"), 5),
        (("a", ""), 2),
    ]
    assert [bar["share"] for bar in use.bars(found.days, "tokens")] == [1.0, 0.0, 0.25]
    assert [bar["share"] for bar in use.bars({0: use.Use()}, "jobs")] == [0.0]


def test_answers_of_a_job_of_before_are_those_of_its_newest_evaluation() -> None:
    asked = [("Two\nlines?", "yes", "no\nno", "yes"), ("And?", "x", "", "y")]
    old = evaluation_messages([("Old?", "a", "b", "c")], 5)
    found = answers.from_messages([*old, "Checkpoint at step 9.", *evaluation_messages(asked, 10), "Training has finished."])
    assert found is not None
    assert (found.steps, found.shown) == ((10,), 10)
    assert found.scores == {"exact_match": (0.0, 0.83), "json_valid": (0.17, 1.0)}
    assert found.prompts == tuple(answers.Answered((("", prompt),), *texts) for prompt, *texts in asked)
    assert answers.from_messages(["Asked: a\nExpected: b", "Step 1/2"]) is None


def test_answers_at_a_step_beside_those_before_training() -> None:
    def evaluation(step: int, score: float, tuned: str | None) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": []}] if step == 8 else None
        sample = {"prompt": "p", "messages": messages, "reference": None, "base": "b", "tuned": tuned}
        base = {"rouge_l": 0.1} if step else {}
        return {"step": step, "metrics": {"rouge_l": score}, "base_metrics": base, "samples": [sample]}

    listed = [evaluation(8, 0.9, "later"), evaluation(4, 0.5, "half"), evaluation(0, 0.1, None)]
    found = answers.from_evaluations(listed, 4)
    assert found == answers.Answers(
        (4, 8), 4, {"rouge_l": (0.1, 0.5, 0.9)}, (answers.Answered((("", "p"),), None, "b", "half"),)
    )
    newest, begun = answers.from_evaluations(listed, 5), answers.from_evaluations(listed[2:], None)
    assert newest is not None
    assert newest.shown == 8
    assert newest.prompts[0].turns == (("user", "Hi"), ("assistant", "null"))
    assert begun is not None
    assert (begun.shown, begun.scores) == (None, {"rouge_l": (0.1,)})
    assert answers.from_evaluations([], None) is None


def test_samples_are_drawn_by_role_and_their_text_is_text() -> None:
    tokens = [
        {"id": 1, "text": "<b>", "role": "template"},
        {"id": 2, "text": "Hi", "role": "words"},
        {"id": 3, "text": "<script>", "role": "learned"},
        {"id": 4, "text": "far", "role": "cut"},
    ]
    sample = {"line": 3, "tokens": tokens, "learned": 1, "total": 4, "cut_at": 3, "error": None, "answer": ""}
    fault = {"line": 4, "tokens": [], "learned": 0, "total": 0, "cut_at": None, "error": "no <i>", "answer": ""}
    found = {"data": [sample, fault], "has_more": True, "word": "line", "format": "chat lines"}
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "server": ("h", 1)})
    body = rendered(request, "samples.html", found=found, after=0, more="/more?after=", lengths=None).body
    for role, text in (("template", "&lt;b&gt;"), ("words", "Hi"), ("learned", "&lt;script&gt;"), ("cut", "far")):
        assert f'class="t-{role}"' in body
        assert text in body
    assert "no &lt;i&gt;" in body
    assert 'hx-get="/more?after=4"' in body


def test_a_file_in_numbers_names_the_lines_to_look_at() -> None:
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "server": ("h", 1)})
    spread = {"least": 3, "mean": 5.0, "median": 5, "p90": 8, "p99": 9, "most": 9}
    none, cut = {"count": 0, "first": []}, {"count": 3, "first": [2, 7]}
    file = {"word": "line", "samples": 40, "tokens": 200, "targets": 50, "lengths": spread, "cut": cut}
    file |= dict.fromkeys(("dropped", "duplicates", "near_empty"), none)
    bars = [{"begin": 3, "end": 9, "samples": 40, "share": 1.0}]
    body = rendered(request, "statistics.html", found={"training": file, "warnings": ["<b>"]}, bars=bars).body
    assert "25.0 %" in body
    assert "3<small> line 2, 7 …" in body
    assert "Doubles" not in body
    assert "&lt;b&gt;" in body
    refused = rendered(request, "statistics.html", found={"fault": "a.jsonl, line 3: <i>"}).body
    assert "line 3: &lt;i&gt;" in refused
