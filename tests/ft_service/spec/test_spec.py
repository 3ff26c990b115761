"""Specs: every refusal names the field, and what is resolved leaves nothing open."""

from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import (
    LEARNING_RATE,
    NOT_YET,
    AdapterRef,
    BaseModelRef,
    DataFileRef,
    DpoOptions,
    JobSpec,
    match_pattern,
    parse_request,
    resolve,
)
from ft_service.sweeps.asked import parse_sweep

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def resolved(gpus: int = 0, parent: AdapterRef | None = None, **more: Any) -> JobSpec:
    return resolve(
        parse_request(BODY | more),
        job_id="ftjob-abc",
        organization="acme",
        model=BaseModelRef(name="meta/tiny", path="/models/meta/tiny"),
        training_data=DataFileRef(name="a.jsonl", path="/files/a", sha256="0"),
        validation_data=None,
        seed=99,
        gpus=gpus,
        parent=parent,
    )


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"learning_rate": 1}, "learning_rate", "no such option"),
        ({"training": {"lr": 1}}, "training.lr", "no such option"),
        ({"lora": {"r": 0}}, "lora.r", "lora.r = 0: .*at least 1"),
        ({"lora": {"r": True}}, "lora.r", "must be a whole number"),
        ({"lora": {"lora_dropout": 1}}, "lora.lora_dropout", "lora.lora_dropout = 1: .*less than 1"),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "nothing would be trained"),
        ({"lora": {"target_modules": "(?=a)"}}, "lora.target_modules", r"RE2 accepts \(invalid perl operator: \(\?=\)"),
        ({"training": {"learning_rate": 10**400}}, "training.learning_rate", "= 1000.*not infinite"),
        ({"training": {"weight_decay": -(10**400)}}, "training.weight_decay", "= -1000.*not infinite"),
        ({"training": {"eval_steps": 10**13}}, "training.eval_steps", "at most 1000000000000"),
        ({"training": {"batch_size": "8"}}, "training.batch_size", "must be a whole number"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "finite"),
        ({"training": {"max_length": 7}}, "training.max_length", "at least 8"),
        ({"precision": {"default": "int3"}}, "precision.default", "bf16, fp8, nf4, nf4_fp32, fp8_blocks or auto"),
        ({"seed": -1}, "seed", "seed = -1"),
        ({"suffix": "x" * 65}, "suffix", "at most 64"),
        ({"suffix": "a:b"}, "suffix", "only letters, digits, dots"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "at most 16"),
        ({"training_file": None}, "training_file", "must be text"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs", "at most 50"),
        ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size", "at most 256"),
        ({"method": {"type": "reinforcement"}}, "method.type", "not available in this version: use 'supervised' or 'dpo'"),
        ({"method": {"type": "dpo"}, "training": {"train_on": "everything"}}, "training.train_on", "only the answers are"),
        ({"priority": 1001}, "priority", "at most 1000"),
        ({"training": {"early_stopping_patience": 0}}, "training.early_stopping_patience", "at least 1"),
        ({"training": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "training.warmup_steps", "are both given: keep one"),
        ({"training": {"decay_ratio": 0.1}}, "training.decay_ratio", "warmup_stable_decay only"),
        ({"training": {"group_by_length": True}}, "training.group_by_length", "packing: false"),
        ({"training": {"neftune_noise_alpha": 0}}, "training.neftune_noise_alpha", "more than 0"),
        ({"training": {"early_stopping_patience": 2}}, "training.early_stopping_patience", "give a validation_file"),
        ({"training": {"load_best_model_at_end": True}}, "training.load_best_model_at_end", "give a validation_file"),
        ({"checkpoint": {"keep_best": True}}, "checkpoint.keep_best", "give a validation_file"),
        ({"validation_split": 1}, "validation_split", "less than 1"),
        ({"validation_split": 0}, "validation_split", "more than 0"),
        ({"training": {"early_stopping_threshold": 0.1}}, "training.early_stopping_threshold", "no effect without"),
        ({"checkpoint": {"keep_every": 0}}, "checkpoint.keep_every", "at least 1"),
        ({"training": {"tokens_per_micro_batch": 4}}, "training.tokens_per_micro_batch", "at least 8"),
        ({"training": {"tokens_per_micro_batch": "most"}}, "training.tokens_per_micro_batch", "= 'most'"),
        (
            {"training": {"per_device_train_batch_size": "auto"}},
            "training.per_device_train_batch_size",
            "must be a whole number",
        ),
        ({"training": {"packing": "auto"}}, "training.packing", "must be true or false"),
        (
            {"distributed": {"activation_checkpointing": "some"}},
            "distributed.activation_checkpointing",
            "selective or auto",
        ),
        ({"distributed": {"compile": "yes"}}, "distributed.compile", "= 'yes'"),
        ({"distributed": {"replicate": "all"}}, "distributed.replicate", "= 'all'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(change: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parse_request(BODY | change)
    assert refused.value.param == param


def test_validation_is_by_a_file_or_by_a_share_of_the_training_file() -> None:
    with pytest.raises(SpecError, match="validation_file and validation_split are both given: keep one"):
        parse_request(BODY | {"validation_split": 0.1, "validation_file": "file-1"})
    shared = parse_request(BODY | {"validation_split": 0.1, "checkpoint": {"keep_best": True}})
    assert shared.validation_split == 0.1


@pytest.mark.parametrize(
    ("distributed", "param", "says"),
    [
        ({"replicate": 0}, "distributed.replicate", "at least 1"),
        ({"reshard_after_forward": 1}, "distributed.reshard_after_forward", "distributed.reshard_after_forward = 1: "),
        ({"prefetch": {"forward": 0}}, "distributed.prefetch", "at least 1"),
        ({"wrap": {"min_params": 0}}, "distributed.wrap", "distributed.wrap"),
        ({"ignored": ["("]}, "distributed.ignored.0", "RE2"),
        ({"keep_unsharded": True, "reshard_after_forward": 2}, "distributed.reshard_after_forward", "no effect with keep_unsh"),
        ({"wrap": "none", "reshard_after_forward": 2}, "distributed.reshard_after_forward", "no effect with wrap 'none'"),
        ({"wrap": "none", "prefetch": {}}, "distributed.prefetch", "only one group"),
        ({"wrap": {"min_params": 9}, "compile": True}, "distributed.compile", "whole decoder layers"),
        ({"offload": True, "ignored": [".*"]}, "distributed.offload", "keep one"),
    ],
)
def test_options_of_sharding_that_exclude_each_other_are_refused(distributed: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parse_request(BODY | {"distributed": distributed})
    assert (refused.value.param or "").startswith(param)


@pytest.mark.parametrize("precision", [{"default": "nf4"}, {"overrides": {".*": "fp8"}}])
def test_resharding_to_a_number_of_ranks_is_refused_on_a_quantised_base(precision: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match=r"reshard_after_forward = 2: .* stores some as (nf4|fp8)\. Use true or false"
    ) as refused:
        parse_request(BODY | {"precision": precision, "distributed": {"reshard_after_forward": 2}})
    assert refused.value.param == "distributed.reshard_after_forward"


def test_a_compute_type_by_module_is_refused_with_the_reason() -> None:
    with pytest.raises(SpecError, match="one type for the whole job, not one by module") as refused:
        parse_request(BODY | {"precision": {"compute": {".*norm": "fp32"}}})
    assert refused.value.param == "precision.compute"


@pytest.mark.parametrize(
    ("gpus", "distributed", "param", "says"),
    [
        (4, {"replicate": 3}, "distributed.replicate", "4 ranks cannot be divided into 3"),
        (4, {"reshard_after_forward": 3}, "distributed.reshard_after_forward", "Use 2, true or false"),
        (4, {"reshard_after_forward": 2, "replicate": 2}, "distributed.reshard_after_forward", "Use true or false"),
        (0, {"offload": True}, "distributed.offload", "has no GPU"),
        (1, {"offload": True}, "distributed.offload", "nothing is sharded"),
        (4, {"offload": True, "replicate": -1}, "distributed.offload", "nothing is sharded"),
    ],
)
def test_options_of_sharding_must_fit_the_ranks(gpus: int, distributed: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        resolved(gpus, distributed=distributed)
    assert refused.value.param == param


def test_options_of_sharding_that_fit_are_kept() -> None:
    distributed = {"replicate": 2, "reshard_after_forward": 2, "prefetch": {"forward": 2}, "wrap": {"min_params": 9}}
    assert resolved(8, distributed=distributed).distributed.reshard_size == 2
    assert resolved(1, distributed={"reshard_after_forward": 2}).distributed.reshard_size == 2, "ignored: nothing is sharded"
    assert resolved(2, distributed={"offload": True}).distributed.offload


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(SpecError, match="must be an object"):
        parse_request(body)


@pytest.mark.parametrize("missing", ["model", "training_file"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(SpecError, match=f"{missing} is required") as refused:
        parse_request({key: value for key, value in BODY.items() if key != missing})
    assert refused.value.param == missing


@pytest.mark.parametrize("dotted", NOT_YET)
def test_what_is_not_available_is_refused_by_name_with_a_way_out(dotted: str) -> None:
    section, key = dotted.split(".")
    with pytest.raises(SpecError, match=rf"{dotted} = .* is not available in this version: \w+") as refused:
        parse_request(BODY | {section: {key: 1}})
    assert (refused.value.param, refused.value.code) == (dotted, "not_available")


@pytest.mark.parametrize("place", ["hyperparameters", "method"])
def test_openai_hyperparameters_become_training_options(place: str) -> None:
    given = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    change = {place: given if place == "hyperparameters" else {"type": "supervised", "supervised": {"hyperparameters": given}}}
    training = parse_request(BODY | change).resolved_training()
    assert (training.n_epochs, training.batch_size, training.learning_rate) == (2, 4, 0.5 * LEARNING_RATE)


def test_auto_leaves_the_choice_to_training() -> None:
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    request = parse_request(BODY | {"hyperparameters": auto, "training": {"n_epochs": 7}})
    assert request.resolved_training().n_epochs == 7


@pytest.mark.parametrize(
    "change",
    [
        {"hyperparameters": {"batch_size": 4}, "training": {"batch_size": 4}},
        {"hyperparameters": {"learning_rate_multiplier": 2}, "training": {"learning_rate": 1e-4}},
        {"hyperparameters": {"n_epochs": 1}, "method": {"supervised": {"hyperparameters": {"n_epochs": 1}}}},
    ],
)
def test_a_value_in_two_places_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"are both given: keep one"):
        parse_request(BODY | change)


def test_yaml_numbers_are_numbers() -> None:
    assert parse_request(BODY | {"training": {"learning_rate": "2e-4"}}).resolved_training().learning_rate == 2e-4


def test_resolving_leaves_nothing_open() -> None:
    spec = resolved(suffix="mine")
    assert spec.seed == 99
    assert spec.tuned_name == "ft:tiny:acme:mine:abc"
    assert spec.world_size == 1
    assert resolved(gpus=4).world_size == 4
    assert resolved(gpus=4, distributed={"nproc_per_node": 2}).world_size == 2
    assert resolved(seed=5).seed == 5
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_patterns_match_whole_names_in_linear_time() -> None:
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert match_pattern(r".*up_proj", names) == names[:1]
    assert match_pattern(r"up_proj", names) == []
    assert match_pattern("(a*)*b", ["a" * 5000]) == []
    with pytest.raises(SpecError, match="RE2") as refused:
        parse_request(BODY | {"precision": {"overrides": {"(": "nf4"}}})
    assert (refused.value.param or "").startswith("precision.overrides")


@pytest.mark.parametrize(
    ("distributed", "copies", "ranks"),
    [
        ({"nnodes": 2, "nproc_per_node": 4}, "auto", 8),
        ({"nnodes": 2, "nproc_per_node": 4, "replicate": 1}, 1, 8),
        ({"nnodes": 3}, "auto", 6),
        ({"nproc_per_node": 4}, "auto", 4),
    ],
)
def test_how_many_copies_there_are_is_for_the_plan_to_choose(distributed: dict[str, Any], copies: Any, ranks: int) -> None:
    spec = resolved(gpus=2, distributed=distributed)
    assert (spec.distributed.replicate, spec.world_size) == (copies, ranks)


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
    assert caught.value.message == "method = 'supervised': must be an object with options of its own."


def test_nineteen_faults_are_all_told_and_what_is_required_first(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"lora": {f"odd{number}": 1 for number in range(14)}, "seed": -1, "modle": "tiny", "training_flie": "a.jsonl"}
    with pytest.raises(SpecError) as caught:
        parse_request(body)
    head, *lines = caught.value.message.splitlines()
    assert (head, len(lines)) == ("19 options are invalid:", 19)
    assert lines[:2] == ["model is required.", "training_file is required."]
    assert "did you mean model?" in lines[2]
    assert "did you mean training_file?" in lines[3]
    assert caught.value.param == "model"
    guessed: list[str] = []
    monkeypatch.setattr("ft_service.spec.faults.name_for", lambda place, model: guessed.append(place))
    with pytest.raises(SpecError, match="… and 936 more"):
        parse_request({**BODY, "lora": {f"odd{number}": 1 for number in range(1000)}})
    assert len(guessed) <= 100, "guessing takes time, and a body may have any number"


@pytest.mark.parametrize(("name", "meant"), [("rr", "r"), ("dropuot", "lora_dropout"), ("alpha", "lora_alpha")])
def test_a_short_name_and_one_without_its_prefix_are_guessed(name: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean lora.{meant}[?]"):
        parse_request({**BODY, "lora": {name: 1}})
    with pytest.raises(SpecError, match=f"sweep.lora.{name}: .* did you mean lora.{meant}[?]"):
        parse_sweep({**BODY, "validation_split": 0.5, "sweep": {f"lora.{name}": [1, 2]}})


def preferring(**hyperparameters: Any) -> dict[str, Any]:
    return {"method": {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}}


def test_preference_pairs_have_rates_and_epochs_of_their_own() -> None:
    request = parse_request({**BODY, **preferring()})
    assert request.method.dpo_options() == DpoOptions(beta=0.1, loss_type="sigmoid")
    assert (request.resolved_training().learning_rate, request.resolved_training().n_epochs) == (5e-6, 1)
    request = parse_request({**BODY, **preferring(learning_rate_multiplier=2, n_epochs=2, batch_size=4, beta="auto")})
    training = request.resolved_training()
    assert (training.learning_rate, training.n_epochs, training.batch_size) == (1e-5, 2, 4)
    given = parse_request({**BODY, **preferring(), "training": {"learning_rate": 1e-3}})
    assert given.resolved_training().learning_rate == 1e-3
    lengths = parse_request({**BODY, **preferring(loss_type="sigmoid_norm", rpo_alpha=1)}).method.dpo_options()
    assert lengths == DpoOptions(beta=5.0, loss_type="sigmoid_norm", rpo_alpha=1.0)
    assert parse_request(BODY).method.dpo_options() is None


def test_a_section_of_another_method_is_refused() -> None:
    with pytest.raises(SpecError, match=r"method\.dpo is given and method\.type is 'supervised'"):
        parse_request({**BODY, "method": {"dpo": {"hyperparameters": {"beta": 0.1}}}})


@pytest.mark.parametrize("before", [True, False])
def test_shared_experts_are_meant_by_all_linear_unless_a_parent_or_dropout_is_against_it(before: bool) -> None:
    parent = AdapterRef(name="ft:before", job_id="ftjob-0", path="/runs/0", shared_experts=before)
    assert resolved().shared_experts
    assert not resolved(lora={"lora_dropout": 0.1}).shared_experts
    assert resolved(parent=parent).shared_experts == before
    assert resolved(parent=parent, lora={"lora_dropout": 0.1}).shared_experts == before
