from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import (
    DistributedOptions,
    JobRequest,
    parse_request,
)

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def asked(**distributed: Any) -> JobRequest:
    return parse_request({"model": "m", "training_file": "f", "distributed": distributed})


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"learning_rate": 1}, "learning_rate", "no such option"),
        ({"training": {"lr": 1}}, "training.lr", "no such option"),
        ({"lora": {"r": 0}}, "lora.r", "lora.r = 0: .*at least 1"),
        ({"lora": {"r": True}}, "lora.r", "must be a whole number"),
        (
            {"lora": {"lora_dropout": 1}},
            "lora.lora_dropout",
            "lora.lora_dropout = 1: .*less than 1",
        ),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "nothing would be trained"),
        (
            {"lora": {"target_modules": "(?=a)"}},
            "lora.target_modules",
            r"RE2 accepts \(invalid perl operator: \(\?=\)",
        ),
        (
            {"training": {"learning_rate": 10**400}},
            "training.learning_rate",
            "= 1000.*not infinite",
        ),
        (
            {"training": {"weight_decay": -(10**400)}},
            "training.weight_decay",
            "= -1000.*not infinite",
        ),
        ({"training": {"eval_steps": 10**13}}, "training.eval_steps", "at most 1000000000000"),
        ({"training": {"batch_size": "8"}}, "training.batch_size", "must be a whole number"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "finite"),
        ({"training": {"max_length": 7}}, "training.max_length", "at least 8"),
        (
            {"precision": {"default": "int3"}},
            "precision.default",
            "nf4_fp32, fp8_blocks, nvfp4, mxfp4, as_published or auto",
        ),
        ({"seed": -1}, "seed", "seed = -1"),
        ({"suffix": "x" * 65}, "suffix", "at most 64"),
        ({"suffix": "a:b"}, "suffix", "only letters, digits, dots"),
        ({"suffix": ".."}, "suffix", "must have a letter or a digit"),
        ({"suffix": "-_."}, "suffix", "must have a letter or a digit"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "at most 16"),
        ({"training_file": None}, "training_file", "must be text"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs", "at most 50"),
        ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size", "at most 256"),
        (
            {"method": {"type": "reinforcement"}},
            "method",
            "give method.reinforcement with a grader",
        ),
        ({"method": {"type": "tinker"}}, "method.type", "by Tinker's wire"),
        (
            {"method": {"type": "dpo"}, "training": {"train_on": "everything"}},
            "training.train_on",
            "only the answers are compared",
        ),
        ({"priority": 1001}, "priority", "at most 1000"),
        (
            {"training": {"early_stopping_patience": 0}},
            "training.early_stopping_patience",
            "at least 1",
        ),
        (
            {"training": {"warmup_steps": 1, "warmup_ratio": 0.1}},
            "training.warmup_steps",
            "are both given: keep one",
        ),
        ({"training": {"decay_ratio": 0.1}}, "training.decay_ratio", "warmup_stable_decay only"),
        (
            {"training": {"min_lr_ratio": 0.1, "lr_scheduler_type": "constant"}},
            "training.min_lr_ratio",
            "not of lr_scheduler_type constant",
        ),
        ({"training": {"min_lr_ratio": 1}}, "training.min_lr_ratio", "less than 1"),
        ({"training": {"group_by_length": True}}, "training.group_by_length", "packing: false"),
        ({"training": {"neftune_noise_alpha": 0}}, "training.neftune_noise_alpha", "more than 0"),
        (
            {"training": {"adam_beta1": -0.1}},
            "training.adam_beta1",
            "training.adam_beta1 = -0.1: .*at least 0",
        ),
        (
            {"training": {"adam_beta2": 1}},
            "training.adam_beta2",
            "training.adam_beta2 = 1: .*less than 1",
        ),
        (
            {"training": {"adam_epsilon": 0}},
            "training.adam_epsilon",
            "training.adam_epsilon = 0: .*at least 1e-30",
        ),
        (
            {"training": {"adam_epsilon": 1e-320}},
            "training.adam_epsilon",
            "training.adam_epsilon = 1e-320: .*at least 1e-30",
        ),
        (
            {"training": {"adam_epsilon": 1.1}},
            "training.adam_epsilon",
            "training.adam_epsilon = 1.1: .*at most 1",
        ),
        (
            {"training": {"early_stopping_patience": 2}},
            "training.early_stopping_patience",
            "give a validation_file",
        ),
        (
            {"training": {"load_best_model_at_end": True}},
            "training.load_best_model_at_end",
            "give a validation_file",
        ),
        ({"checkpoint": {"keep_best": True}}, "checkpoint.keep_best", "give a validation_file"),
        ({"validation_split": 1}, "validation_split", "less than 1"),
        ({"validation_split": 0}, "validation_split", "more than 0"),
        (
            {"training": {"early_stopping_threshold": 0.1}},
            "training.early_stopping_threshold",
            "no effect without",
        ),
        ({"checkpoint": {"keep_every": 0}}, "checkpoint.keep_every", "at least 1"),
        (
            {"training": {"tokens_per_micro_batch": 4}},
            "training.tokens_per_micro_batch",
            "at least 8",
        ),
        (
            {"training": {"tokens_per_micro_batch": "most"}},
            "training.tokens_per_micro_batch",
            "= 'most'",
        ),
        (
            {"training": {"per_device_train_batch_size": "auto"}},
            "training.per_device_train_batch_size",
            "must be a whole number",
        ),
        ({"training": {"packing": "auto"}}, "training.packing", "must be true or false"),
        (
            {"distributed": {"activation_checkpointing": "some"}},
            "distributed.activation_checkpointing",
            "tiled, offload or auto",
        ),
        (
            {
                "distributed": {"activation_checkpointing": "tiled"},
                "precision": {"served_as": "int4_g32"},
            },
            "distributed.activation_checkpointing",
            "precision.served_as",
        ),
        ({"distributed": {"compile": "yes"}}, "distributed.compile", "= 'yes'"),
        ({"distributed": {"replicate": "all"}}, "distributed.replicate", "= 'all'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    change: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parse_request(BODY | change)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("distributed", "param", "says"),
    [
        ({"replicate": 0}, "distributed.replicate", "at least 1"),
        (
            {"reshard_after_forward": 1},
            "distributed.reshard_after_forward",
            "distributed.reshard_after_forward = 1: ",
        ),
        ({"prefetch": {"forward": 0}}, "distributed.prefetch", "at least 1"),
        ({"wrap": {"min_params": 0}}, "distributed.wrap", "distributed.wrap"),
        ({"ignored": ["("]}, "distributed.ignored.0", "RE2"),
        (
            {"keep_unsharded": True, "reshard_after_forward": 2},
            "distributed.reshard_after_forward",
            "no effect with keep_unsh",
        ),
        (
            {"wrap": "none", "reshard_after_forward": 2},
            "distributed.reshard_after_forward",
            "no effect with wrap 'none'",
        ),
        ({"wrap": "none", "prefetch": {}}, "distributed.prefetch", "only one group"),
        (
            {"wrap": {"min_params": 9}, "compile": True},
            "distributed.compile",
            "whole decoder layers",
        ),
        ({"offload": True, "ignored": [".*"]}, "distributed.offload", "keep one"),
        (
            {"activation_checkpointing": "tiled", "compile": True},
            "distributed.activation_checkpointing",
            "distributed.compile: true",
        ),
        (
            {"activation_checkpointing": "offload", "wrap": {"min_params": 9}},
            "distributed.activation_checkpointing",
            "distributed.wrap",
        ),
    ],
)
def test_options_of_sharding_that_exclude_each_other_are_refused(
    distributed: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        parse_request(BODY | {"distributed": distributed})
    assert (refused.value.param or "").startswith(param)


@pytest.mark.parametrize("precision", [{"default": "nf4"}, {"overrides": {".*": "fp8"}}])
def test_resharding_to_a_number_of_ranks_is_refused_on_a_quantised_base(
    precision: dict[str, Any],
) -> None:
    with pytest.raises(
        SpecError,
        match=r"reshard_after_forward = 2: .* stores some as (nf4|fp8)\. Use true or false",
    ) as refused:
        parse_request(BODY | {"precision": precision, "distributed": {"reshard_after_forward": 2}})
    assert refused.value.param == "distributed.reshard_after_forward"


def test_a_compute_type_by_module_is_refused_with_the_reason() -> None:
    with pytest.raises(
        SpecError, match="one type for the whole job, not one for each module"
    ) as refused:
        parse_request(BODY | {"precision": {"compute": {".*norm": "fp32"}}})
    assert refused.value.param == "precision.compute"


def test_a_range_stands_for_two_options() -> None:
    options = asked(nnodes="1:4", nproc_per_node="2:8").distributed
    assert options == DistributedOptions(
        nnodes=1, max_nnodes=4, nproc_per_node=2, max_nproc_per_node=8
    )
    assert asked(nproc_per_node=2, max_nproc_per_node=8).distributed.max_nproc_per_node == 8


@pytest.mark.parametrize(
    ("distributed", "says"),
    [
        ({"nproc_per_node": "8:2"}, "distributed.nproc_per_node = 8 with max_nproc_per_node = 2"),
        ({"nproc_per_node": "0:2"}, "distributed.nproc_per_node = 0: must be at least 1"),
        ({"nproc_per_node": "2:65"}, "distributed.max_nproc_per_node = 65: must be at most 64"),
        ({"nproc_per_node": "2-8"}, "distributed.nproc_per_node = '2-8'"),
        ({"nnodes": "1:513"}, "distributed.max_nnodes = 513: must be at most 512"),
        ({"nnodes": "auto"}, "distributed.nnodes = 'auto': must be a whole number"),
        (
            {"max_nproc_per_node": 4},
            "distributed.nproc_per_node = 'auto' with max_nproc_per_node = 4",
        ),
    ],
)
def test_a_range_that_is_none_is_refused_with_field_value_and_limit(
    distributed: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        asked(**distributed)
