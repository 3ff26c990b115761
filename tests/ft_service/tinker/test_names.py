from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from ft_service.tinker.names import (
    WeightsPath,
    check_model_id,
    check_name,
    job_id_of,
    model_id,
    parse_request_id,
    request_id,
    sampler_id,
    session_of,
)

SESSION = "session-Ab1"


def test_ids_lead_back() -> None:
    model = model_id(SESSION, 3)
    sampler = sampler_id(SESSION, 4)
    assert session_of(model) == session_of(sampler) == SESSION
    assert check_model_id(model) == model
    assert job_id_of(model) == job_id_of(model) != job_id_of(model_id(SESSION, 2))
    assert parse_request_id(request_id(model, 7)) == (model, False, 7)
    assert parse_request_id(request_id(sampler, 1_000_000_000)) == (sampler, True, 1_000_000_000)
    path = WeightsPath(model, "weights", "step-1")
    assert WeightsPath.parse(str(path)) == path
    assert path.checkpoint_id == "weights/step-1"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "tinker://x/weights/a",
        f"tinker://{SESSION}:train:1/weights/../x",
        f"tinker://{SESSION}:train:1/other/a",
        "a" * 10_000,
    ],
)
def test_paths_that_are_none(given: str) -> None:
    with pytest.raises(SpecError, match=r"a path of saved weights is"):
        WeightsPath.parse(given)


def test_weights_of_the_other_kind_are_said_to_be_such() -> None:
    with pytest.raises(SpecError, match=r"saved to sample from.*save_state"):
        WeightsPath.parse(f"tinker://{SESSION}:train:1/sampler_weights/a", "weights")
    with pytest.raises(SpecError, match=r"saved to train on.*save_weights_for_sampler"):
        WeightsPath.parse(f"tinker://{SESSION}:train:1/weights/a", "sampler_weights")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 129])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(SpecError, match=r"1 to 128 letters"):
        check_name(name)


@pytest.mark.parametrize(
    "given", ["", "session-1:train:2", "session-1:other:2#3", "session-1:train:2#-1", "x" * 10_000]
)
def test_request_ids_that_are_none(given: str) -> None:
    with pytest.raises(SpecError, match=r"request_id"):
        parse_request_id(given)
