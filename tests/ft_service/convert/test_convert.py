from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.convert import Conversion, convert_file
from ft_service.convert.convert import convert, yaml_text
from ft_service.convert.recognition import FORMATS
from ft_service.convert.rules import for_method, load_table
from ft_service.convert.verdicts import Lost, NoEffect, Taken, ToDo, Verdict
from ft_service.errors import SpecError
from ft_service.spec import parse_request
from tests.support.command_line import Ft

FSDP1 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        "fsdp_colour": "red",
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
}
FSDP2 = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": "true",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "mixed_precision": "no",
    "num_processes": 2,
}
ZERO = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_weights": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 200},
    },
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
}
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 2.0,
    "learning_rate": "1e-4",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "optim": "adamw_torch_fused",
    "bf16": True,
    "seed": 3,
    "eval_strategy": "steps",
    "eval_steps": 20,
    "save_strategy": "epoch",
    "save_steps": 500,
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": True,
    },
}
FSDP_CONFIG = {
    "reshard_after_forward": False,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "xla": False,
}


def converted(folder: Path, body: dict[str, Any], name: str = "config.yaml") -> Conversion:
    path = folder / name
    path.write_text(json.dumps(body) if name.endswith("json") else yaml.safe_dump(body))
    return convert_file(path)


def verdicts(conversion: Conversion) -> dict[str, Verdict]:
    return {decision.option: decision.verdict for decision in conversion.decisions}


@pytest.mark.parametrize(
    ("body", "name", "kind", "spec"),
    [
        (
            FSDP1,
            "fsdp1.yaml",
            "Accelerate",
            {
                "distributed": {"reshard_after_forward": False, "nproc_per_node": 4},
                "precision": {"compute": "bf16"},
            },
        ),
        (
            FSDP2,
            "fsdp2.yaml",
            "Accelerate",
            {
                "distributed": {"reshard_after_forward": True, "nproc_per_node": 2},
                "precision": {"compute": "fp32"},
            },
        ),
        (
            ZERO,
            "zero3.json",
            "DeepSpeed",
            {
                "precision": {"compute": "bf16"},
                "distributed": {"reshard_after_forward": True},
                "training": {
                    "optim": "adamw_torch",
                    "learning_rate": 1e-4,
                    "weight_decay": 0.01,
                    "adam_beta1": 0.9,
                    "adam_beta2": 0.999,
                    "adam_epsilon": 1e-8,
                    "lr_scheduler_type": "cosine",
                    "warmup_ratio": 0.05,
                    "max_steps": 200,
                    "max_grad_norm": 0.5,
                    "batch_size": 64,
                },
            },
        ),
        (
            ARGUMENTS,
            "arguments.json",
            "TrainingArguments",
            {
                "training": {
                    "batch_size": 16,
                    "n_epochs": 2,
                    "learning_rate": 1e-4,
                    "lr_scheduler_type": "cosine",
                    "warmup_ratio": 0.1,
                    "optim": "adamw_torch",
                    "eval_steps": 20,
                },
                "precision": {"compute": "bf16"},
                "seed": 3,
                "distributed": {"reshard_after_forward": True},
            },
        ),
        (
            FSDP_CONFIG,
            "fsdp_config.json",
            "fsdp_config",
            {"distributed": {"reshard_after_forward": False}},
        ),
    ],
)
def test_each_kind_of_file_is_recognised_and_taken_over(
    tmp_path: Path, body: dict[str, Any], name: str, kind: str, spec: dict[str, Any]
) -> None:
    conversion = converted(tmp_path, body, name)
    assert kind in conversion.format
    printed = yaml.safe_load(conversion.spec_yaml())
    parse_request(printed)
    assert printed == {"model": "MODEL", "training_file": "TRAINING.jsonl", **spec}


def test_every_option_of_a_file_is_in_what_is_printed(tmp_path: Path) -> None:
    text = converted(tmp_path, FSDP1).spec_yaml()
    for name in (*(name for name in FSDP1 if name != "fsdp_config"), *FSDP1["fsdp_config"]):
        assert name in text
    for part in (
        "reshard_after_forward: false # fsdp_config.fsdp_sharding_strategy",
        '#   fsdp_config.fsdp_colour: "red" → Accelerate has no known option of this name',
        "# No effect here:\n#   compute_environment, distributed_type, ",
    ):
        assert part in text, part


def test_what_is_not_supported_says_what_to_do_instead(tmp_path: Path) -> None:
    found = verdicts(converted(tmp_path, ZERO, "zero.json"))
    assert found["zero_optimization.zero_quantized_weights"] == Lost(
        "choose precision.default: fp8 or nf4, which the frozen base is then also gathered in"
    )
    assert isinstance(found["gradient_accumulation_steps"], NoEffect), "auto"


def test_defaults_of_a_file_that_is_part_of_another_are_its_own(tmp_path: Path) -> None:
    assert converted(tmp_path, {"zero_optimization": {"stage": 3}}).body["training"] == {
        "max_grad_norm": 0.0
    }
    assert (
        "training"
        not in converted(
            tmp_path, {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
        ).body
    )
    assert converted(tmp_path, FSDP1).defaults == converted(tmp_path, FSDP_CONFIG).defaults == []


def test_two_options_that_disagree_are_not_both_taken_over(tmp_path: Path) -> None:
    body = {
        **FSDP1,
        "fsdp_config": {
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_reshard_after_forward": False,
        },
    }
    taken, refused = [
        v
        for name, v in verdicts(converted(tmp_path, body)).items()
        if name.startswith("fsdp_config")
    ]
    assert {type(taken), type(refused)} == {ToDo, Taken}


def test_a_value_that_our_own_spec_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    found = verdicts(
        converted(
            tmp_path, {**ARGUMENTS, "learning_rate": 5, "weight_decay": "much"}, "arguments.json"
        )
    )
    for option in ("learning_rate", "weight_decay"):
        verdict = found[option]
        assert isinstance(verdict, Lost)
        assert verdict.reason.startswith(f"training.{option} = ")


TRAINED: dict[str, dict[str, Any]] = {
    "transformers": {"output_dir": "out", "learning_rate": 1e-4},
    "trl": {"model_name_or_path": "base", "dataset_name": "org/data", "use_peft": True},
    "axolotl": {
        "base_model": "base",
        "adapter": "lora",
        "micro_batch_size": 1,
        "optimizer": "adamw_torch_fused",
    },
    "llama_factory": {
        "model_name_or_path": "base",
        "stage": "sft",
        "finetuning_type": "lora",
        "dataset": "mine",
    },
    "unsloth": {"model_name": "base", "r": 16, "random_state": 7},
    "ms_swift": {"model": "base", "train_type": "lora", "dataset": "mine"},
}
"""Tool → a short file of it."""


@pytest.mark.parametrize("tool", TRAINED)
def test_the_options_of_adamw_keep_their_names(tmp_path: Path, tool: str) -> None:
    """LLaMA-Factory's, Axolotl's, TRL's and Unsloth's are those of TrainingArguments."""
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": "1e-6"}
    conversion = converted(tmp_path, TRAINED[tool] | adam)
    assert conversion.tool == load_table(tool).tool
    assert conversion.body["training"].items() >= {**adam, "adam_epsilon": 1e-6}.items()
    for name, value in (("adam_beta2", 1), ("adam_epsilon", 0)):
        verdict = verdicts(converted(tmp_path, TRAINED[tool] | {name: value}))[name]
        assert isinstance(verdict, Lost), "no AdamW of this service"
        assert verdict.reason.startswith(f"training.{name} = {value}: ")


def test_the_options_of_adamw_in_deepspeeds_optimizer(tmp_path: Path) -> None:
    def of(**params: Any) -> Conversion:
        return converted(
            tmp_path, {**ZERO, "optimizer": {"type": "AdamW", "params": params}}, "zero.json"
        )

    training = of(betas=[0.8, 0.95], eps=1e-6).body["training"]
    assert (training["adam_beta1"], training["adam_beta2"], training["adam_epsilon"]) == (
        0.8,
        0.95,
        1e-6,
    )
    for betas in ("auto", [0.9], [0.9, "high"], 0.9, [0.9, 1.5]):
        conversion = of(betas=betas)
        verdict = verdicts(conversion)["optimizer.params.betas"]
        assert isinstance(
            verdict, NoEffect if betas == "auto" else Lost if betas == [0.9, 1.5] else ToDo
        ), betas
        assert "adam_beta1" not in conversion.body["training"]


def test_deepspeed_inside_of_training_arguments_is_judged_as_its_own_file(tmp_path: Path) -> None:
    inner = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 32,
    }
    found = verdicts(
        converted(tmp_path, {"output_dir": "x", "learning_rate": 1e-4, "deepspeed": inner})
    )
    assert found["deepspeed.train_batch_size"] == Taken({"training.batch_size": 32})
    assert isinstance(found["deepspeed.gradient_accumulation_steps"], NoEffect), (
        "train_batch_size says it"
    )


@pytest.mark.parametrize(
    ("section", "distributed"),
    [
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
            {"wrap": {"min_params": 2000}},
        ),
        (
            {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_offload_params": "true"},
            {"wrap": "none", "offload": True},
        ),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"replicate": -1}),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_forward_prefetch": True},
            {"activation_checkpointing": "full", "prefetch": {"forward": 1, "backward": 1}},
        ),
        (
            {"fsdp_ignored_modules": r"model\.embed_tokens"},
            {"ignored": [r"(?:model\.embed_tokens)\..*"]},
        ),
    ],
)
def test_sharding_options_keep_their_meaning(
    tmp_path: Path, section: dict[str, Any], distributed: dict[str, Any]
) -> None:
    conversion = converted(tmp_path, {"distributed_type": "FSDP", "fsdp_config": section})
    assert conversion.body["distributed"] == distributed


def test_zero_stages_and_their_inner_groups(tmp_path: Path) -> None:
    for zero, distributed in (
        ({"stage": 0}, {"replicate": -1}),
        ({"stage": 2}, {"reshard_after_forward": False}),
        ({"stage": 3, "zero_hpz_partition_size": 4}, {"reshard_after_forward": 4}),
        (
            {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
            {"reshard_after_forward": True, "offload": True},
        ),
    ):
        assert (
            converted(tmp_path, {"zero_optimization": zero}, "zero.json").body["distributed"]
            == distributed
        )


VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    3,
    1e9,
    -1,
    0.5,
    "auto",
    "no",
    "cpu",
    "FULL_SHARD",
    "text",
    [],
    [1, 2],
    {"a": 1},
)


REFUSING = {"stage", "rl", "rlhf_type", "pref_loss", "reward_model"}
"""Options for the sake of which a whole file is refused, as it is by those that only another method
has.
"""


@pytest.mark.parametrize("kind", ["axolotl", "llama_factory", "trl"])
def test_whatever_an_option_of_a_method_says_the_file_is_refused_or_valid(kind: str) -> None:
    table = load_table(kind)
    refusals: list[str] = []
    valid = 0
    for name in sorted(
        REFUSING | {mark.partition("=")[0] for marks in table.methods.values() for mark in marks}
    ):
        for value in (True, 0.5, "dpo", "text", ["sigmoid"], {"a": 1}):
            try:
                parse_request(
                    yaml.safe_load(convert({name: deepcopy(value)}, table, "file").spec_yaml())
                )
            except SpecError as error:
                refusals.append(error.message)
            else:
                valid += 1
    assert valid
    assert refusals
    assert [text for text in refusals if "not converted" not in text] == []


FILES = [
    (name, None) for name in FORMATS if name not in ("transformers", "trl")
]  # others extend these
FILES += [("trl", "dpo"), ("trl", "reinforcement")]


TOLD_APART = (None, 0, -1, 0.5, "text", {"a": 1})
"""Of the values those on which most conversions decide."""


@pytest.mark.parametrize(
    "values", [TOLD_APART, pytest.param(VALUES, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize(("kind", "method"), FILES)
def test_whatever_a_file_says_the_spec_that_comes_out_is_valid(
    kind: str, method: Any, values: tuple[Any, ...]
) -> None:
    table = load_table(kind)
    for value in values:
        body: dict[str, Any] = {}
        for name in for_method(table, method).rules:
            target = body
            *sections, last = name.removesuffix(".*").split(".")
            for section in sections:
                below = target.setdefault(section, {})
                if not isinstance(below, dict):
                    below = target[section] = {}
                target = below
            target.setdefault(last, deepcopy(value))
        for name in REFUSING | {
            mark.partition("=")[0] for marks in table.methods.values() for mark in marks
        }:
            body.pop(name, None)
        if kind == "verl":
            body["algorithm"]["adv_estimator"] = "grpo"
        if kind == "torchtune":
            body["loss"].pop("_component_")
        if method == "reinforcement":
            body["num_generations"] = deepcopy(value)
        conversion = convert(body, table, "file", method=method)
        parse_request(yaml.safe_load(conversion.spec_yaml()))
        for decision in conversion.decisions:
            assert "→" in decision.line()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red\nsize: 3\n", "is not one of the files that can be converted"),
        ("[1, 2]", "expected options"),
        ("a: [", "line 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        convert_file(tmp_path / "other.yaml")


def test_options_whose_names_are_no_text_to_yaml_are_options_as_others(
    ft: Ft, tmp_path: Path
) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump(ARGUMENTS) + "on: push\n7: 2\n2026-01-01: {3: 4}\nnull: x\n")
    options = {
        option["option"]: option
        for option in json.loads(ft("convert", path, "--json").out)["options"]
    }
    assert {options[name]["outcome"] for name in ("True", "7", "2026-01-01", "None")} == {
        "not supported"
    }
    (tmp_path / "unknown.yaml").write_text("on: push\n1: 2\n")
    with pytest.raises(SpecError, match="is not one of the files that can be converted"):
        convert_file(tmp_path / "unknown.yaml")


def test_the_command_prints_a_spec_file_or_json(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(FSDP1))
    printed = ft("convert", path)
    assert printed.code == 1
    assert (
        "an option is not taken over, and the result may differ: fsdp_config.fsdp_colour."
        in printed.err
    )
    parse_request(yaml.safe_load(printed.out))
    document = json.loads(ft("convert", path, "--json").out)
    assert document["tool"] == "Accelerate"
    assert document["spec"]["distributed"]["nproc_per_node"] == 4
    assert {option["outcome"] for option in document["options"]} == {
        "taken over",
        "no effect",
        "not supported",
    }
    sources = {option["option"]: option["source"] for option in document["options"]}
    assert [name for name, source in sources.items() if source is None] == [
        "fsdp_config.fsdp_colour"
    ]


def test_the_exit_code_says_whether_anything_is_lost(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL))
    printed = ft("convert", path)
    assert (printed.code, printed.err) == (0, "")
    path.write_text(yaml.safe_dump(AXOLOTL | {"rl": "gdpo"}))
    refused = ft("convert", path, "--out", tmp_path / "spec.yaml")
    assert (refused.code, refused.out) == (64, "")
    assert 'rl: "gdpo": supervised, dpo, simpo, orpo and kto are taken over.' in refused.err
    assert not (tmp_path / "spec.yaml").exists()
    assert ft("convert", tmp_path / "absent.yaml").code == 64


def test_a_file_is_written_and_not_overwritten_unasked(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    out = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL))
    written = ft("convert", path, "--out", out, "--gpus", "4")
    assert (written.code, written.out, written.err) == (0, "", f"Wrote {out}.\n")
    assert yaml.safe_load(out.read_text())["training"]["batch_size"] == 4
    again = ft("convert", path, "--out", out)
    assert (again.code, yaml.safe_load(out.read_text())["training"]["batch_size"]) == (64, 4)
    assert "overwrite it with --force" in again.err
    assert ft("convert", path, "--out", out, "--force").code == 0
    assert yaml.safe_load(out.read_text())["training"]["batch_size"] == 1
    assert ft("convert", path, "--out", tmp_path / "absent" / "spec.yaml").code == 64
    assert ft("convert", path, "--force").code == 64


TRL = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "trl-lib/Capybara",
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_modules": ["q_proj", "v_proj"],
    "load_in_4bit": True,
    "learning_rate": 2e-4,
    "report_to": "wandb",
}
AXOLOTL = {
    "base_model": "Qwen/Qwen3-0.6B",
    "adapter": "qlora",
    "load_in_4bit": True,
    "datasets": [{"path": "data.jsonl", "type": "chat_template"}],
    "sequence_len": 512,
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_modules": "q_proj, v_proj",
    "num_epochs": 2,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch",
}
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 32,
    "lora_alpha": 64,
    "lora_target": "q_proj,v_proj",
    "quantization_bit": 4,
    "dataset": "identity",
    "cutoff_len": 512,
    "num_train_epochs": 2.0,
}


@pytest.mark.parametrize("body", [TRL, AXOLOTL, FACTORY], ids=["trl", "axolotl", "factory"])
def test_base_adapter_and_format_of_other_tools_are_taken_over(
    ft: Ft, tmp_path: Path, body: dict[str, Any]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(body))
    printed = ft("convert", path)
    assert (printed.code, printed.err) == (0, "")
    spec = yaml.safe_load(printed.out)
    assert spec["model"] == "Qwen/Qwen3-0.6B"
    assert spec["lora"] == {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]} | (
        {"lora_dropout": 0.05} if body is TRL else {}
    )
    assert spec["precision"] == {"default": "nf4"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lora_modules_to_save", ["embed_tokens", "lm_head"]),
        ("modules_to_save", ["embed_tokens", "lm_head"]),
    ],
)
def test_modules_that_are_trained_whole_are_taken_over(
    option: str, value: Any, ft: Ft, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**TRL, option: value}))
    printed = ft("convert", path)
    assert printed.code == 0, printed.err
    assert yaml.safe_load(printed.out)["lora"]["modules_to_save"] == ["embed_tokens", "lm_head"]


def test_what_changes_the_result_and_is_not_taken_over_is_named(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**TRL, "label_smoothing_factor": 0.1}))
    printed = ft("convert", path)
    assert printed.code == 1
    assert printed.err.startswith(
        "ft: an option is not taken over, and the result may differ: label_smoothing_factor. "
    )
    assert ft("convert", path, "--json").code == 1


def test_a_batch_that_the_file_does_not_say_whole_is_to_be_done(tmp_path: Path) -> None:
    assert verdicts(
        converted(tmp_path, {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4})
    )["gradient_accumulation_steps"] == ToDo(
        "set training.batch_size to the samples of a micro-batch x 4 x the number of your GPUs"
    )
    outer = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "learning_rate": 1e-4,
    }
    both = converted(
        tmp_path, outer | {"deepspeed": {"gradient_accumulation_steps": 4}}, "arguments.json"
    )
    assert both.body["training"]["batch_size"] == 8
    assert isinstance(verdicts(both)["deepspeed.gradient_accumulation_steps"], Taken)


@pytest.mark.parametrize(
    ("tool", "option", "whole", "answers"),
    [
        ("trl", "packing", {}, {"assistant_only_loss": True}),
        ("unsloth", "packing", {"completion_only_loss": False}, {"completion_only_loss": True}),
        ("axolotl", "sample_packing", {"train_on_inputs": True}, {"train_on_inputs": False}),
        (
            "axolotl",
            "sample_packing",
            {"datasets": [{"path": "d", "type": "completion"}]},
            {"datasets": [{"path": "d"}]},
        ),
        ("llama_factory", "packing", {"train_on_prompt": True}, {}),
        ("llama_factory", "neat_packing", {"train_on_prompt": True}, {}),
    ],
)
def test_a_batch_has_as_many_samples_as_there(
    tool: str, option: str, whole: dict[str, Any], answers: dict[str, Any], tmp_path: Path
) -> None:
    """Packed rows count as samples there, whatever they hold; here only those of what is learned
    whole do.
    """
    file = TRAINED[tool] | {"learning_rate": 1e-4}
    assert converted(tmp_path, file | whole | {option: True}).body["training"]["packing"] is True
    for off in ({}, {option: False}):
        assert converted(tmp_path, file | whole | off).body["training"]["packing"] is False
        assert "packing" not in converted(tmp_path, file | answers | off).body["training"]
    packed = verdicts(converted(tmp_path, file | answers | {option: True}))[option]
    assert isinstance(packed, ToDo)
    assert "multiply training.batch_size by the samples that fill a row" in packed.reason


def test_the_decay_of_warmup_stable_decay_is_a_share_of_the_steps(tmp_path: Path) -> None:
    def of(**options: Any) -> Conversion:
        schedule = {
            "lr_scheduler_kwargs": {
                "num_decay_steps": 100,
                "min_lr_ratio": 0,
                **options.pop("more", {}),
            }
        }
        return converted(
            tmp_path,
            {**ARGUMENTS, **schedule, "lr_scheduler_type": "warmup_stable_decay", **options},
        )

    known = of(max_steps=400, more={"decay_type": "linear"})
    assert known.open() == []
    assert (
        known.body["training"].items()
        >= {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.25}.items()
    )
    assert "there a cosine" not in known.spec_yaml()
    assert "there a cosine" in of(max_steps=400).spec_yaml()
    found = verdicts(of())["lr_scheduler_kwargs.num_decay_steps"]
    assert found == ToDo(
        "the number of steps is not in this file: set training.decay_ratio to 100 / steps"
    )
    other = of(max_steps=400, more={"decay_type": "cosine", "min_lr_ratio": 0.1})
    assert (other.open(), other.body["training"]["min_lr_ratio"]) == (
        ["lr_scheduler_kwargs.decay_type"],
        0.1,
    )


@pytest.mark.parametrize(
    ("schedule", "rate", "training", "lost"),
    [
        (
            {"cosine_with_min_lr": {"min_lr_rate": 0.1}},
            1e-4,
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
            [],
        ),
        (
            {"cosine_with_min_lr": {"min_lr": 1e-5}},
            "1e-4",
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
            [],
        ),
        (
            {"cosine_with_min_lr": {"min_lr": 1e-5}},
            None,
            {"lr_scheduler_type": "cosine"},
            ["lr_scheduler_kwargs.min_lr"],
        ),
        ({"cosine_with_restarts": {}}, 1e-4, {"lr_scheduler_type": "cosine"}, []),
        ({"cosine_with_restarts": {"num_cycles": 1}}, 1e-4, {"lr_scheduler_type": "cosine"}, []),
        (
            {"cosine_with_restarts": {"num_cycles": 3}},
            1e-4,
            {"lr_scheduler_type": "cosine"},
            ["lr_scheduler_kwargs.num_cycles"],
        ),
        ({"cosine": {"num_cycles": 0.5}}, 1e-4, {"lr_scheduler_type": "cosine"}, []),
        (
            {"cosine": {"num_cycles": 1}},
            1e-4,
            {"lr_scheduler_type": "cosine"},
            ["lr_scheduler_kwargs.num_cycles"],
        ),
        ({"polynomial": {"lr_end": 1e-5}}, 1e-4, {"min_lr_ratio": 0.1}, []),
        ({"polynomial": {}}, 1e-4, {"min_lr_ratio": 0.001}, []),
        (
            {"polynomial": {"power": 2.0}},
            1e-4,
            {"min_lr_ratio": 0.001},
            ["lr_scheduler_kwargs.power"],
        ),
        ({"inverse_sqrt": {}}, 1e-4, {}, ["lr_scheduler_type"]),
    ],
)
def test_schedules_keep_their_rates_or_the_nearest(
    tmp_path: Path, schedule: dict[str, Any], rate: Any, training: dict[str, Any], lost: list[str]
) -> None:
    (name, options), *_ = schedule.items()
    given = {
        "learning_rate": rate,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": options,
        "output_dir": "x",
    }
    found = converted(
        tmp_path,
        {key: value for key, value in given.items() if value not in (None, {})} | {"max_steps": 9},
    )
    assert found.open() == lost
    taken = found.body["training"]
    assert {
        key: taken[key]
        for key in ("lr_scheduler_type", "min_lr_ratio")
        if key in taken and key != "linear"
    } == {
        **({"lr_scheduler_type": "linear"} if name == "polynomial" else {}),
        **training,
    }


@pytest.mark.parametrize(
    ("options", "dropout"),
    [
        ({"assistant_only_loss": True}, 0.05),
        ({"assistant_only_loss": True, "lora_dropout": 0.1}, 0.1),
        ({"beta": 0.1}, None),
        ({"beta": 0.1, "lora_dropout": 0.1, "disable_dropout": True}, None),
        ({"beta": 0.1, "disable_dropout": False}, 0.05),
        ({"beta": 0.1, "lora_dropout": 0.1, "disable_dropout": False}, 0.1),
    ],
)
def test_dropout_is_off_in_dpo_as_in_trls(
    options: dict[str, Any], dropout: float | None, tmp_path: Path
) -> None:
    assert converted(tmp_path, TRAINED["trl"] | options).body["lora"].get("lora_dropout") == dropout


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("llama_factory", {"stage": "dpo"}),
        ("axolotl", {"rl": "dpo"}),
        ("axolotl", {"rl": "ipo"}),
        ("unsloth", {"beta": 0.1}),
        ("ms_swift", {"rlhf_type": "dpo"}),
    ],
)
def test_dropout_is_off_in_every_tools_dpo(
    tool: str, options: dict[str, Any], tmp_path: Path
) -> None:
    file = TRAINED[tool] | {"lora_dropout": 0.1}
    assert converted(tmp_path, file).body["lora"]["lora_dropout"] == 0.1
    assert "lora_dropout" not in converted(tmp_path, file | options).body.get("lora", {})


@pytest.mark.parametrize("tool", ["trl", "unsloth"])
@pytest.mark.parametrize(
    ("options", "train_on"),
    [
        ({}, "everything"),
        ({"assistant_only_loss": False}, "everything"),
        ({"assistant_only_loss": False, "completion_only_loss": False}, "everything"),
        ({"assistant_only_loss": False, "completion_only_loss": True}, None),
        ({"assistant_only_loss": True, "completion_only_loss": False}, None),
    ],
)
def test_answers_alone_are_learned_if_either_option_says_so(
    tool: str, options: dict[str, bool], train_on: str | None, tmp_path: Path
) -> None:
    assert converted(tmp_path, TRAINED[tool] | options).body["training"].get("train_on") == train_on


@pytest.mark.parametrize(
    ("table", "option", "value", "verdict"),
    [
        ("axolotl", "val_set_size", 0.05, Taken({"validation_split": 0.05})),
        ("llama_factory", "val_size", "0.05", Taken({"validation_split": 0.05})),
        ("axolotl", "val_set_size", 0, NoEffect("nothing is set aside here either")),
        ("axolotl", "chat_template", "chatml", Taken({"chat_template": "chatml"})),
        ("axolotl", "chat_template", "llama3", Taken({"chat_template": "llama-3"})),
        (
            "trl",
            "chat_template",
            "{{ messages[0]['content'] }}",
            Taken({"chat_template": "{{ messages[0]['content'] }}"}),
        ),
        (
            "axolotl",
            "chat_template",
            "tokenizer_default",
            NoEffect("it is the base's, or the template that is given"),
        ),
        ("llama_factory", "template", "chatml", Taken({"chat_template": "chatml"})),
        ("axolotl", "chat_template", "alpaca", Taken({"chat_template": "alpaca"})),
        ("axolotl", "train_on_inputs", True, Taken({"training.train_on": "everything"})),
        ("llama_factory", "mask_history", True, Taken({"training.train_on": "last_assistant"})),
        ("trl", "assistant_only_loss", False, Taken({"training.train_on": "everything"})),
        (
            "axolotl",
            "bf16",
            "auto",
            NoEffect(
                "precision.compute is bf16 unless set, where the processor has instructions for it"
            ),
        ),
        ("axolotl", "bf16", "full", Taken({"precision.compute": "bf16"})),
        ("transformers", "bf16", False, Taken({"precision.compute": "fp32"})),
        ("trl", "num_train_epochs", 2.0, Taken({"training.n_epochs": 2})),
        (
            "trl",
            "num_train_epochs",
            2.5,
            ToDo("epochs are whole: set training.n_epochs, or training.max_steps"),
        ),
        ("trl", "eos_token", "<|im_end|>", ToDo("the base's tokenizer is used as it is")),
        ("axolotl", "special_tokens", {"pad_token": "<pad>"}, None),
        (
            "axolotl",
            "load_best_model_at_end",
            True,
            ToDo("set training.load_best_model_at_end, with a validation_file or validation_split"),
        ),
    ],
)
def test_what_is_learned_of_which_data_is_taken_over(
    table: str, option: str, value: Any, verdict: Verdict | None
) -> None:
    conversion = convert({"learning_rate": 1e-4, option: value}, load_table(table), "file")
    found = verdicts(conversion)
    if verdict is None:
        assert isinstance(found[f"{option}.{next(iter(value))}"], NoEffect)
    else:
        assert found[option] == verdict


def test_what_goes_by_validation_is_taken_where_there_is_some(tmp_path: Path) -> None:
    body = {
        **AXOLOTL,
        "early_stopping_patience": 3,
        "load_best_model_at_end": True,
        "val_set_size": 0.1,
    }
    conversion = converted(tmp_path, body)
    assert conversion.open() == []
    assert conversion.body["validation_split"] == 0.1
    assert (
        conversion.body["training"]["early_stopping_patience"],
        conversion.body["training"]["load_best_model_at_end"],
    ) == (
        3,
        True,
    )


def test_a_number_of_samples_for_validation_is_no_share_of_them(tmp_path: Path) -> None:
    found = verdicts(converted(tmp_path, {**AXOLOTL, "val_set_size": 200}))["val_set_size"]
    assert isinstance(found, ToDo)
    assert "set validation_split to the share that they are" in found.reason


@pytest.mark.parametrize(
    "text",
    [
        "a\nb",
        "a\nb\n",
        "a\n\n\n",
        "\n",
        "\n\na",
        "  a\n b",
        "a \n\tb\n",
        "a\n#b: c\n---\n...\n",
        "a\r\nb",
        "a\u2028\nb",
        "\x07\n",
        "x",
    ],
)
def test_text_reads_back_as_it_was(text: str) -> None:
    body = {
        "chat_template": text,
        "evaluation": {"prompts": text, "more": {"deep": text}},
        "seed": 1,
    }
    assert (
        yaml.safe_load(
            yaml_text(
                body, {"chat_template": "one", "evaluation": "two", "evaluation.more.deep": "three"}
            )
        )
        == body
    )


def test_a_comment_stands_behind_its_option() -> None:
    body = {"lora": {"r": 8, "target_modules": ["q", "v"]}, "chat_template": "a\nb"}
    assert yaml_text(body, {"lora.r": "its", "chat_template": "text"}) == (
        "lora:\n  r: 8 # its\n  target_modules: [q, v]\nchat_template: |2- # text\n  a\n  b\n"
    )


def test_long_values_stay_on_one_line() -> None:
    body = {"name": "word " * 100, "names": ["name"] * 100}
    assert len(yaml_text(body, {}).splitlines()) == 2
    assert yaml.safe_load(yaml_text(body, {})) == body


def test_modules_beside_all_linear_layers_are_named(tmp_path: Path) -> None:
    body = {"base_model": "b", "adapter": "lora", "lora_target_linear": True}
    inside = converted(
        tmp_path, body | {"lora_target_modules": ["q_proj", "model.layers.0.mlp.down_proj"]}
    )
    assert inside.open() == []
    beside = converted(
        tmp_path, body | {"lora_target_modules": ["q_proj", "model.embed_tokens", "lm_head"]}
    )
    assert beside.open() == ["lora_target_modules"]
    assert "only linear layers do: embed_tokens, lm_head" in " ".join(
        beside.spec_yaml().replace("#", "").split()
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("vicuna", "set chat_template: vicuna"),
        ("default", "give its text as chat_template"),
        ("mistral", "compare what"),
    ],
)
def test_templates_that_differ_from_those_of_their_name_here_are_not_taken(
    template: str, said: str, tmp_path: Path
) -> None:
    body = {"stage": "sft", "dataset": "d", "template": template}
    found = converted(tmp_path, body)
    assert "chat_template" not in found.body
    assert found.open() == ([] if template == "mistral" else ["template"])
    assert said in " ".join(found.spec_yaml().replace("#", "").split())


def test_a_system_prompt_of_the_file_replaces_that_of_the_template(tmp_path: Path) -> None:
    found = converted(
        tmp_path,
        {"stage": "sft", "dataset": "d", "template": "vicuna", "default_system": "Be kind."},
    )
    assert found.body["chat_template"] == "vicuna"
    assert found.open() == ["default_system"]
