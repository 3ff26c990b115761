from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.wire.chat_request import parse_chat_completion
from ft_service.errors import SpecError
from ft_service.spec import (
    parse_request,
)
from ft_service.sweeps import search_space

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}

EVERY_OPTION = Path(__file__).parents[3] / "deploy/examples/every-option.yaml"


FILES = {"model": "tiny", "training_file": "file-a", "validation_file": "file-b"}


CHECK = {"type": "string_check", "name": "b", "input": "", "reference": "", "operation": "eq"}


NESTED: dict[str, Any] = {
    "integrations": [
        {"type": "wandb", "wandb": {"project": "p", "name": "n", "entity": "e", "tags": ["a"]}},
        {"type": "mlflow", "mlflow": {"experiment": "a"}},
        {"type": "trackio", "trackio": {"project": "a"}},
    ],
    "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}},
    "evaluation": {
        "prompts": [
            {"messages": [{"role": "user", "content": "a"}], "reference": "a", "item": {"a": 1}}
        ],
        "metrics": [
            "bleu",
            {
                "type": "text_similarity",
                "name": "a",
                "input": "",
                "reference": "",
                "evaluation_metric": "bleu",
            },
            CHECK,
            {"type": "multi", "name": "m", "graders": {"b": CHECK}, "calculate_output": "b"},
        ],
    },
    "metadata": {"a": "b"},
    "hyperparameters": {"n_epochs": 1, "batch_size": 2, "learning_rate_multiplier": 2},
    "sweep": {
        **{"method": "random", "samples": 2, "seed": 1, "halving": {"eta": 2}},
        **{"lora.r": [4, 8], "lora.lora_alpha": {"min": 1, "max": 2}},
    },
}


GRADED: dict[str, Any] = {
    "method": {
        "type": "reinforcement",
        "reinforcement": {
            "grader": {
                "type": "multi",
                "name": "m",
                "graders": {
                    "b": CHECK,
                    "s": {
                        **{
                            "type": "score_model",
                            "name": "s",
                            "model": "m",
                            "range": [0, 1],
                            "sampling_params": {"seed": 1},
                        },
                        "input": [
                            {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
                        ],
                    },
                    "l": {
                        **{
                            "type": "label_model",
                            "name": "l",
                            "model": "m",
                            "input": [{"role": "user", "content": "a"}],
                        },
                        **{"labels": ["a"], "passing_labels": ["a"]},
                    },
                    "p": {"type": "python", "name": "p", "source": "a"},
                    "e": {
                        "type": "endpoint",
                        "name": "e",
                        "url": "a",
                        "webhook_endpoint_id": "a",
                        "batch_size": 1,
                    },
                },
                "calculate_output": "b",
            },
            "hyperparameters": {
                "beta": 0.1,
                "num_generations": 2,
                "mask_truncated_completions": True,
            },
        },
    }
}


PYTHON_WORDS = re.compile(
    r"None|\bTrue\b|\bFalse\b|\b(dict|str|int|float|bool|tuple)\b|dictionary|instance|tinker"
)
"""What a user who writes JSON or YAML did not write, and a type of job that is not the user's to
choose.
"""


CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "tool", "tool_call_id": "a", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "logit_bias": {"1": 1},
}


WRONG: list[Any] = [
    [],
    {},
    [[]],
    [{}],
    {"a": []},
    {"type": []},
    {"type": {}},
    None,
    True,
    -1,
    1e308,
    10**30,
    "",
    "x",
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a document."""
    yield place
    members = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, member in members:
        yield from places(member, (*place, name))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    whole = copy.deepcopy(document)
    within = whole
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    return whole


def test_a_refusal_names_every_field_at_fault_and_no_class_of_ours() -> None:
    with pytest.raises(SpecError) as caught:
        parse_request(BODY | {"lora": {"r": 0}, "training": {"n_epochs": 0}, "checkpoint": 3})
    assert caught.value.message.splitlines() == [
        "3 options are invalid:",
        "lora.r = 0: must be at least 1.",
        "training.n_epochs = 0: must be at least 1 or auto.",
        "checkpoint = 3: must be an object with options of its own.",
    ]
    assert caught.value.param == "lora.r"
    with pytest.raises(SpecError) as caught:
        parse_request(BODY | {"method": "supervised"})
    assert (
        caught.value.message == "method = 'supervised': must be an object with options of its own."
    )
    with pytest.raises(
        SpecError, match=r"^distributed\.replicate = 9+\.\.\.: must be at most 4096\.$"
    ):
        parse_request(BODY | {"distributed": {"replicate": int("9" * 400)}})
    with pytest.raises(SpecError, match=r"must have at least 1 character\.$"):
        parse_request(BODY | {"integrations": [{"type": "wandb", "wandb": {"project": ""}}]})


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (CHECK | {"pass_threshold": 1}, "pass_threshold: there is no such option"),
        (CHECK | {"operation": "is"}, "operation = 'is': must be eq, ne, like or ilike"),
        ({key: value for key, value in CHECK.items() if key != "input"}, "input is required"),
    ],
)
def test_a_refusal_names_the_option_of_a_grader(grader: dict[str, Any], said: str) -> None:
    """`type` decides which options there are, and pydantic's location names it between the grader
    and its option.
    """
    both = {"type": "multi", "name": "m", "graders": {"a": grader}, "calculate_output": "a"}
    reinforced = {"method": {"type": "reinforcement", "reinforcement": {"grader": grader}}}
    nested = {"method": {"type": "reinforcement", "reinforcement": {"grader": both}}}
    for body, place in (
        (reinforced, "method.reinforcement.grader"),
        (nested, "method.reinforcement.grader.graders.a"),
        ({"evaluation": {"prompts": 1, "metrics": ["bleu", grader]}}, "evaluation.metrics.1"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_request(BODY | body)
        assert caught.value.message.startswith(f"{place}.{said}")
        assert caught.value.param == f"{place}.{said.split(maxsplit=1)[0].strip(':')}"


def test_of_a_list_where_a_number_may_stand_the_fault_within_is_told() -> None:
    prompts = [{"messages": [{"role": "user", "content": 5}]}, {"prompt": "a", "colour": 1}, 7]
    asked = [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]
    grader = {"type": "score_model", "name": "g", "model": "m", "input": asked}
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    with pytest.raises(SpecError) as caught:
        parse_request(BODY | {"evaluation": {"prompts": prompts}, "method": method})
    assert sorted(caught.value.message.splitlines()[1:]) == [
        "evaluation.prompts.0.messages.0.content = 5: must be text or a list.",
        "evaluation.prompts.1.colour: there is no such option. Check its spelling, or leave it "
        "out.",
        "evaluation.prompts.2 = 7: must be an object with options of its own.",
        "method.reinforcement.grader.input.0.content.0.text = 5: must be text.",
    ]


def test_nineteen_faults_are_all_told_and_what_is_required_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {
        "lora": {f"odd{number}": 1 for number in range(14)},
        "seed": -1,
        "modle": "tiny",
        "training_flie": "a.jsonl",
    }
    with pytest.raises(SpecError) as caught:
        parse_request(body)
    head, *lines = caught.value.message.splitlines()
    assert (head, len(lines)) == ("19 options are invalid:", 19)
    assert lines[:2] == ["model is required.", "training_file is required."]
    assert "did you mean model?" in lines[2]
    assert "did you mean training_file?" in lines[3]
    assert caught.value.param == "model"
    guessed: list[str] = []
    monkeypatch.setattr(
        "ft_service.spec.validation_errors.name_for", lambda place, model: guessed.append(place)
    )
    with pytest.raises(SpecError, match="… and 936 more"):
        parse_request({**BODY, "lora": {f"odd{number}": 1 for number in range(1000)}})
    assert len(guessed) <= 100, "guessing takes time, and a body may have any number"


@pytest.mark.parametrize(
    ("parse", "document"),
    [
        (parse_request, {**yaml.safe_load(EVERY_OPTION.read_text()), **FILES}),
        (parse_request, NESTED | FILES),
        (search_space.parse_sweep, NESTED | FILES),
        (parse_request, GRADED | BODY),
        (parse_chat_completion, CHAT),
    ],
    ids=["every option", "nested", "sweep", "graders", "chat"],
)
def test_a_wrong_kind_of_value_is_refused_as_one(parse: Any, document: Any) -> None:
    refusals: list[str] = []
    for place in list(places(document))[1:]:
        for value in WRONG:
            try:
                parse(changed(document, place, value))
            except SpecError as error:
                refusals.append(error.message)
            except Exception as error:
                pytest.fail(f"{'.'.join(map(str, place))} = {value!r}: {error!r}")
    assert len(refusals) > 100
    assert [text for text in refusals if PYTHON_WORDS.search(text)] == []


@pytest.mark.parametrize("parse", [parse_request, search_space.parse_sweep])
@pytest.mark.parametrize(
    ("body", "kind"), [(None, "null"), (True, "true"), ("a", "a string"), ([1], "a list")]
)
def test_a_body_that_is_no_object_is_told_in_words_of_json(
    parse: Any, body: Any, kind: str
) -> None:
    with pytest.raises(SpecError, match=rf"^The body must be an object with .*, not {kind}\.$"):
        parse(body)


def test_a_file_name_that_is_no_text_is_told_in_words() -> None:
    with pytest.raises(SpecError, match="must be text in UTF-8"):
        parse_request({"model": "tiny", "training_file": "\udcff.jsonl"})
