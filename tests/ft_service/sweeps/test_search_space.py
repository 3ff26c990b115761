"""What a sweep asks for: its jobs' bodies, what is drawn, and every fault at once, by its name."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import parse_request
from ft_service.spec.request import read_request
from ft_service.sweeps import search_space
from ft_service.sweeps.search_space import Range, drawn, parse_sweep, values_text
from tests.support.rollouts import method

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-a", "validation_file": "file-v"}


def sweep(given: Any, **more: Any) -> Any:
    return parse_sweep({**BODY, **more, "sweep": given})


def refused(given: Any, **more: Any) -> SpecError:
    with pytest.raises(SpecError) as error:
        sweep(given, **more)
    return error.value


def test_a_grid_is_every_combination_in_bodies_of_their_own() -> None:
    body = {
        **BODY,
        "lora": {"r": 4},
        "sweep": {"training.learning_rate": ["1e-4", 3e-4], "lora.lora_alpha": [8, 16]},
    }
    asked = parse_sweep(body)
    assert [job.values for job in asked.jobs] == [
        {"training.learning_rate": rate, "lora.lora_alpha": alpha}
        for rate in (1e-4, 3e-4)
        for alpha in (8.0, 16.0)
    ]
    last = asked.jobs[-1]
    assert last.body == {
        **BODY,
        "seed": 0,
        "lora": {"r": 4, "lora_alpha": 16},
        "training": {"learning_rate": 3e-4},
    }
    assert parse_request(last.body) == last.request
    assert body["lora"] == {"r": 4}, "what was given stays as it is"
    assert asked.settings["options"] == ["training.learning_rate", "lora.lora_alpha"]
    assert (asked.settings["eta"], asked.settings["rungs"]) == (2, [0.25, 0.5])
    assert values_text(last.values) == "training.learning_rate = 0.0003, lora.lora_alpha = 16"


def test_openais_hyperparameters_and_seeds_can_be_swept() -> None:
    asked = sweep({"hyperparameters.n_epochs": [1, 2], "seed": [1, 2, 3]})
    assert len(asked.jobs) == 6
    assert asked.jobs[-1].request.resolved_training().epochs == 2
    assert asked.jobs[-1].request.seed == 3


def test_what_is_drawn_follows_from_the_seed() -> None:
    given = {
        "method": "random",
        "samples": 12,
        "seed": 4,
        "training.learning_rate": {"min": "1e-5", "max": 1e-3, "log": True},
        "lora.r": {"min": 4, "max": 64, "log": True},
        "lora.lora_dropout": [0.0, 0.1],
    }
    jobs = sweep(given).jobs
    assert [job.values for job in sweep(given).jobs] == [job.values for job in jobs]
    assert [job.values for job in sweep({**given, "seed": 5}).jobs] != [job.values for job in jobs]
    assert len({tuple(job.values.values()) for job in jobs}) == 12
    rates = [job.request.resolved_training().rate for job in jobs]
    assert all(1e-5 <= rate <= 1e-3 and rate == float(f"{rate:.2e}") for rate in rates)
    assert any(rate < 1e-4 for rate in rates), "as many below as above"
    assert all(
        isinstance(job.values["lora.r"], int) and 4 <= job.values["lora.r"] <= 64 for job in jobs
    )
    assert sweep(given).settings["seed"] == 4


def test_a_narrow_range_has_many_values() -> None:
    """Three digits of numbers from 0.9995 to 0.9999 are two values."""
    narrow = Range(min=0.9995, max=0.9999)
    assert len({narrow.at(number / 64) for number in range(64)}) == 64
    assert Range(min=1e-5, max=1e-3, log=True).at(0.123) == 1.76e-05


def test_the_draw_is_the_same_on_every_python() -> None:
    assert drawn({"a": Range(min=1, max=100), "b": [1, 2, 3]}, 3, seed=7) == [
        {"a": 33, "b": 1},
        {"a": 66, "b": 1},
        {"a": 54, "b": 2},
    ]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("most", [2**53, 2.0**53])
def test_the_widest_range_can_be_drawn_from(most: float, log: bool) -> None:
    widest = Range(min=1, max=most, log=log)
    assert all(1 <= widest.at(share) <= most for share in (0.0, 0.5, 1 - 2**-53))


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (
            {"training.learning_rte": [1, 2]},
            "sweep.training.learning_rte",
            "did you mean training.learning_rate?",
        ),
        ({"lora.r": [8, 0]}, "sweep.lora.r", "sweep.lora.r = 0: must be at least 1."),
        ({"lora.r": 8}, "sweep.lora.r", "must be a list of values"),
        ({"lora.r": []}, "sweep.lora.r", "must be a list of values"),
        ({"lora.r": [8, 8]}, "sweep.lora.r", "8 is there twice"),
        (
            {"lora.r": list(range(257))},
            "sweep.lora.r",
            "257 values; at most 256 are possible. Leave values out.",
        ),
        (
            {"data.completion": ["short", "long"]},
            "sweep.data.completion",
            "it changes what the loss measures",
        ),
        ({"lora.r": [8]}, "sweep", "makes 1 job, and may make 2 to 64"),
        ({"lora.r": list(range(1, 14)), "seed": [1, 2, 3, 4, 5]}, "sweep", "makes 65 jobs"),
        ({"lora.r": {"min": 1, "max": 8}}, "sweep.lora.r", "ranges are of method: random"),
        ({"method": "random", "lora.r": [8, 16]}, "sweep", "sweep.samples is required"),
        (
            {"method": "random", "samples": 3, "lora.r": [8, 16]},
            "sweep.samples",
            "only 2 combinations",
        ),
        ({"method": "random", "samples": 65, "lora.r": [8, 16]}, "sweep.samples", "at most 64"),
        (
            {"method": "random", "samples": 2, "lora.r": {"min": 0, "max": 8, "log": True}},
            "sweep.lora.r",
            "numbers above 0",
        ),
        (
            {"method": "random", "samples": 2, "lora.r": {"low": 1, "max": 8}},
            "sweep.lora.r",
            "sweep.lora.r.low: there is no such",
        ),
        *(
            ({"method": "random", "samples": 2, "lora.r": bounds}, f"sweep.lora.r.{name}", words)
            for bounds, name, words in (
                ({"min": 1, "max": 10**400}, "max", "sweep.lora.r.max = 1000"),
                (
                    {"min": 1, "max": 10**400, "log": True},
                    "max",
                    "must be from -9007199254740992 to 9007199254740992",
                ),
                (
                    {"min": 1, "max": 2**53 + 1},
                    "max",
                    "= 9007199254740993: must be from -9007199254740992 to 9",
                ),
                ({"min": -(10**400), "max": 1.5}, "min", "must be from -9007199254740992"),
                ({"min": 0.5, "max": "1e300"}, "max", "'1e300': must be from"),
                (
                    {"min": 0.5, "max": 1e300},
                    "max",
                    "= 1e+300: must be from -9007199254740992 to 9007199254740992.",
                ),
            )
        ),
        ({"method": "bayes", "lora.r": [8, 16]}, "sweep.method", "grid or random"),
        ({"samples": 4, "lora.r": [8, 16]}, "sweep", "sweep.samples is for sweep.method random"),
        (
            {"halving": {"eta": 1}, "lora.r": [8, 16]},
            "sweep.halving.eta",
            "sweep.halving.eta = 1: must be at least 2.",
        ),
        (
            {"training": {"learning_rate": [1e-4]}},
            "sweep.training",
            "name one of them with its dots",
        ),
        ({"model": ["a", "b"]}, "sweep.model", "losses could not be compared"),
        ({"distributed.nnodes": [1, 2]}, "sweep.distributed.nnodes", "how fast a job runs"),
        ({"suffix": ["a", "b"]}, "sweep.suffix", "applies to the whole sweep"),
        ({"training.packing": [True, False]}, "sweep.training.packing", "how fast"),
        ({"halving": False}, "sweep", "names no option"),
        ({}, "sweep", "sweep is required"),
        ([], "sweep", "sweep is required"),
    ],
)
def test_a_fault_is_told_by_its_name_and_a_way_out(given: Any, param: str, words: str) -> None:
    error = refused(given)
    assert words in error.message
    assert (error.param or "").startswith(param)


def test_all_faults_are_told_at_once_each_one_once() -> None:
    error = refused(
        {"lora.r": [0, 8, 16], "training.learning_rate": [2.0, 1e-4]},
        lora={"lora_dropout": 2},
        suffix="a b",
    )
    lines = error.message.splitlines()
    assert len(lines) == 5, error.message
    assert sum("sweep.lora.r = 0" in line for line in lines) == 1
    for words in ("sweep.training.learning_rate = 2.0", "lora.lora_dropout = 2", "suffix = 'a b'"):
        assert words in error.message


def test_a_body_full_of_faults_is_not_read_for_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of them took the server a minute."""
    read: list[object] = []
    monkeypatch.setattr(
        search_space, "read_request", lambda body: read.append(body) or read_request(body)
    )
    refused({"lora.r": list(range(1, 65))}, **{f"option_{number}": 1 for number in range(1000)})
    assert len(read) == 1
    error = refused({f"option_{number}": [1, 2] for number in range(1100)})
    assert error.message.startswith("1000 options are invalid")


def test_a_value_that_only_fails_beside_another_is_refused_too() -> None:
    error = refused(
        {"training.lr_scheduler_type": ["linear", "cosine"]}, training={"decay_ratio": 0.2}
    )
    assert "decay_ratio" in error.message


def test_an_option_stands_in_one_place() -> None:
    assert "both given" in refused({"lora.r": [8, 16]}, lora={"r": 4}).message


def test_a_sweep_needs_something_to_compare_its_jobs_by() -> None:
    error = refused({"lora.r": [8, 16]}, validation_file=None)
    assert error.param == "validation_file"
    assert "compares its jobs by their loss" in error.message


def test_reinforcement_has_no_loss_to_compare_jobs_by() -> None:
    error = refused({"lora.r": [8, 16]}, method=method())
    assert error.param == "sweep"
    assert "compares jobs by validation loss" in error.message
    assert (
        "method.type = 'tinker' is not available"
        in refused({"lora.r": [8, 16]}, method={"type": "tinker"}).message
    )
    assert len(sweep({"lora.r": [8, 16]}, method={"type": "dpo"}).jobs) == 2


def test_a_job_refuses_a_sweep_and_says_where_it_belongs() -> None:
    with pytest.raises(SpecError) as error:
        parse_request({**BODY, "sweep": {"lora.r": [8, 16]}})
    assert error.value.param == "sweep"
    assert "ft sweep submit" in error.value.message
    assert "/v1/fine_tuning/sweeps" in error.value.message


def test_a_split_is_the_same_for_all_its_jobs() -> None:
    split = {"validation_file": None, "validation_split": 0.1}
    jobs = sweep({"lora.r": [8, 16]}, **split).jobs
    assert len({job.request.seed for job in jobs}) == 1
    assert {job.request.seed for job in sweep({"lora.r": [8, 16]}, seed=5).jobs} == {5}
    assert "sets other samples aside" in refused({"seed": [1, 2]}, **split).message
    assert "the same files" in refused({"validation_split": [0.1, 0.2], "lora.r": [8, 16]}).message
