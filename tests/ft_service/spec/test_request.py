from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import (
    NOT_YET,
    parse_request,
)

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def test_validation_is_by_a_file_or_by_a_share_of_the_training_file() -> None:
    with pytest.raises(
        SpecError, match="validation_file and validation_split are both given: keep one"
    ):
        parse_request(BODY | {"validation_split": 0.1, "validation_file": "file-1"})
    shared = parse_request(BODY | {"validation_split": 0.1, "checkpoint": {"keep_best": True}})
    assert shared.validation_split == 0.1


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(SpecError, match="must be an object"):
        parse_request(body)


def test_sections_that_are_null_count_as_absent() -> None:
    """Clients send null for what they leave out, and a job's method, as it is shown, has its other
    methods as null.
    """
    plain = parse_request(BODY)
    assert parse_request(BODY | {"method": None, "hyperparameters": None, "lora": None}) == plain
    shown = {
        "type": "dpo",
        "supervised": None,
        "dpo": {"hyperparameters": {"beta": 0.2}},
        "reinforcement": None,
    }
    given = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    assert parse_request(BODY | {"method": shown}) == parse_request(BODY | {"method": given})
    with pytest.raises(SpecError, match=r"hyperparameters\.n_epochs = null"):
        parse_request(BODY | {"hyperparameters": {"n_epochs": None}})


@pytest.mark.parametrize("missing", ["model", "training_file"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(SpecError, match=f"{missing} is required") as refused:
        parse_request({key: value for key, value in BODY.items() if key != missing})
    assert refused.value.param == missing


@pytest.mark.parametrize("dotted", NOT_YET)
def test_what_is_not_available_is_refused_by_name_with_a_way_out(dotted: str) -> None:
    section, key = dotted.split(".")
    with pytest.raises(
        SpecError, match=rf"{dotted} = .* is not available in this version: \w+"
    ) as refused:
        parse_request(BODY | {section: {key: 1}})
    assert (refused.value.param, refused.value.code) == (dotted, "not_available")


def test_auto_leaves_the_choice_to_training() -> None:
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    request = parse_request(BODY | {"hyperparameters": auto, "training": {"n_epochs": 7}})
    assert request.resolved_training().n_epochs == 7


@pytest.mark.parametrize(
    "change",
    [
        {"hyperparameters": {"batch_size": 4}, "training": {"batch_size": 4}},
        {"hyperparameters": {"learning_rate_multiplier": 2}, "training": {"learning_rate": 1e-4}},
        {
            "hyperparameters": {"n_epochs": 1},
            "method": {"supervised": {"hyperparameters": {"n_epochs": 1}}},
        },
    ],
)
def test_a_value_in_two_places_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"are both given: keep one"):
        parse_request(BODY | change)
