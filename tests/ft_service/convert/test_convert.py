from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.convert import Conversion, convert_file
from ft_service.convert.convert import FORMATS, ConfigFormat, convert
from ft_service.convert.rules import CHOSEN, NotNeeded, NotSupported, Taken, Verdict
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
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "true", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
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
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 200}},
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
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": True},
}
FSDP_CONFIG = {"reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "xla": False}


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
            {"distributed": {"reshard_after_forward": False, "nproc_per_node": 4}, "precision": {"compute": "bf16"}},
        ),
        (
            FSDP2,
            "fsdp2.yaml",
            "Accelerate",
            {"distributed": {"reshard_after_forward": True, "nproc_per_node": 2}, "precision": {"compute": "fp32"}},
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
                    "n_epochs": 2,
                    "learning_rate": "1e-4",
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
        (FSDP_CONFIG, "fsdp_config.json", "fsdp_config", {"distributed": {"reshard_after_forward": False}}),
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


def test_every_option_of_a_file_has_its_line(tmp_path: Path) -> None:
    lines = [line for line in converted(tmp_path, FSDP1).spec_yaml().splitlines() if "→" in line]
    assert len(lines) == len(FSDP1) - 1 + len(FSDP1["fsdp_config"])
    for start in (
        '# fsdp_config.fsdp_sharding_strategy: "SHARD_GRAD_OP" → taken over as distributed.reshard_after_forward: false',
        "# fsdp_config.fsdp_use_orig_params: true → not needed because FSDP2",
        '# fsdp_config.fsdp_colour: "red" → not supported because no option of that name is known',
    ):
        assert any(line.startswith(start) for line in lines), start


def test_what_is_not_supported_says_what_to_do_instead(tmp_path: Path) -> None:
    found = verdicts(converted(tmp_path, ZERO, "zero.json"))
    assert found["zero_optimization.zero_quantized_weights"] == NotSupported(
        "choose precision.default: fp8 or nf4, which the base is then also gathered in"
    )
    assert isinstance(found["gradient_accumulation_steps"], NotNeeded), "auto"
    rounds = verdicts(converted(tmp_path, ARGUMENTS, "arguments.json"))["gradient_accumulation_steps"]
    assert rounds == NotSupported("a step is defined by its samples over all ranks: set training.batch_size to 2 x 8 x ranks")


def test_two_options_that_disagree_are_not_both_taken_over(tmp_path: Path) -> None:
    body = {**FSDP1, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False}}
    taken, refused = [v for name, v in verdicts(converted(tmp_path, body)).items() if name.startswith("fsdp_config")]
    assert sorted([type(taken), type(refused)], key=str) == [NotSupported, Taken]


def test_a_value_that_our_own_spec_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    found = verdicts(converted(tmp_path, {**ARGUMENTS, "learning_rate": 5, "weight_decay": "much"}, "arguments.json"))
    for option in ("learning_rate", "weight_decay"):
        verdict = found[option]
        assert isinstance(verdict, NotSupported)
        assert verdict.reason.startswith(f"training.{option} = ")


def test_deepspeed_inside_of_training_arguments_is_judged_as_its_own_file(tmp_path: Path) -> None:
    inner = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 32}
    found = verdicts(converted(tmp_path, {"output_dir": "x", "learning_rate": 1e-4, "deepspeed": inner}))
    assert found["deepspeed.train_batch_size"] == Taken({"training.batch_size": 32})
    assert isinstance(found["deepspeed.gradient_accumulation_steps"], NotNeeded), "train_batch_size says it"


@pytest.mark.parametrize(
    ("section", "distributed"),
    [
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
            {"wrap": {"min_params": 2000}},
        ),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_offload_params": "true"}, {"wrap": "none", "offload": True}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"replicate": -1}),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_forward_prefetch": True},
            {"activation_checkpointing": "full", "prefetch": {"forward": 1, "backward": 1}},
        ),
        ({"fsdp_ignored_modules": r"model\.embed_tokens"}, {"ignored": [r"(?:model\.embed_tokens)\..*"]}),
    ],
)
def test_sharding_options_keep_their_meaning(tmp_path: Path, section: dict[str, Any], distributed: dict[str, Any]) -> None:
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
        assert converted(tmp_path, {"zero_optimization": zero}, "zero.json").body["distributed"] == distributed


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


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.title)
def test_whatever_a_file_says_the_spec_that_comes_out_is_valid(kind: ConfigFormat) -> None:
    for value in VALUES:
        body: dict[str, Any] = {}
        for name in kind.table:
            target = body
            *sections, last = name.removesuffix(".*").split(".")
            for section in sections:
                below = target.setdefault(section, {})
                if not isinstance(below, dict):
                    below = target[section] = {}
                target = below
            target.setdefault(last, deepcopy(value))
        conversion = convert(body, kind, "file")
        parse_request(yaml.safe_load(conversion.spec_yaml()))
        for decision in conversion.decisions:
            assert "→" in decision.line()


@pytest.mark.parametrize(
    ("text", "message"),
    [("colour: red\nsize: 3\n", "none of the files that can be converted"), ("[1, 2]", "expected options"), ("a: [", "line 1")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        convert_file(tmp_path / "other.yaml")


def test_the_command_prints_a_spec_file_or_json(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(FSDP1))
    printed = ft("convert", path)
    assert printed.code == 1
    assert "an option was not taken over, and the result may differ: fsdp_config.fsdp_colour." in printed.err
    parse_request(yaml.safe_load(printed.out))
    document = json.loads(ft("convert", path, "--json").out)
    assert document["spec"]["distributed"]["nproc_per_node"] == 4
    assert {option["outcome"] for option in document["options"]} == {"taken over", "not needed", "not supported"}
    assert ft("convert", tmp_path / "absent.yaml").code == 64


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
def test_base_adapter_and_format_of_other_tools_are_taken_over(ft: Ft, tmp_path: Path, body: dict[str, Any]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(body))
    printed = ft("convert", path)
    assert (printed.code, printed.err) == (0, "")
    spec = yaml.safe_load(printed.out)
    assert spec["model"] == "Qwen/Qwen3-0.6B"
    assert spec["lora"] == {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    assert spec["precision"] == {"default": "nf4"}


def test_what_changes_the_result_and_is_not_taken_over_is_named(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**TRL, "use_dora": True}))
    printed = ft("convert", path)
    assert printed.code == 1
    assert printed.err.startswith("ft: an option was not taken over, and the result may differ: use_dora. ")
    assert ft("convert", path, "--json").code == 1


def test_the_size_of_a_micro_batch_is_left_to_be_chosen(tmp_path: Path) -> None:
    """It counts in a step's samples; packing has one name here and four elsewhere."""
    alone = verdicts(converted(tmp_path, {"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 1e-4}))
    assert alone["per_device_train_batch_size"] == NotSupported(
        f"{CHOSEN}; a step is defined by its samples over all ranks: set training.batch_size to 4 x ranks"
    )
    both = verdicts(converted(tmp_path, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True}))
    assert both["per_device_train_batch_size"] == NotNeeded(f"{CHOSEN}; gradient_accumulation_steps tells of a step")
    assert both["gradient_accumulation_steps"] == NotSupported(
        "a step is defined by its samples over all ranks: set training.batch_size to 4 x 2 x ranks"
    )


@pytest.mark.parametrize("name", ["packing", "sample_packing", "neat_packing", "padding_free"])
def test_packing_is_known_by_the_names_of_other_tools(name: str, tmp_path: Path) -> None:
    found = converted(tmp_path, {"output_dir": "out", "learning_rate": 1e-4, "bf16": True, name: True, "cutoff_len": 512})
    assert found.body["training"] == {"learning_rate": 1e-4, "packing": True, "max_length": 512}
    off = verdicts(converted(tmp_path, {"output_dir": "out", "learning_rate": 1e-4, "bf16": True, name: False}))
    assert isinstance(off[name], NotNeeded)


@pytest.mark.parametrize(
    ("option", "value", "verdict"),
    [
        ("val_set_size", 0.05, Taken({"validation_split": 0.05})),
        ("val_size", "0.05", Taken({"validation_split": 0.05})),
        ("val_set_size", 0, NotNeeded("nothing is set aside here either")),
        ("chat_template", "chatml", Taken({"chat_template": "chatml"})),
        ("chat_template", "llama3", Taken({"chat_template": "llama-3"})),
        ("chat_template", "{{ messages[0]['content'] }}", Taken({"chat_template": "{{ messages[0]['content'] }}"})),
        ("chat_template", "tokenizer_default", NotNeeded("it is the base's")),
        ("train_on_inputs", True, Taken({"training.train_on": "everything"})),
        ("assistant_only_loss", False, Taken({"training.train_on": "everything"})),
        ("bf16", "auto", NotNeeded("precision.compute is bf16 unless set")),
        ("bf16", "full", Taken({"precision.compute": "bf16"})),
        ("bf16", False, Taken({"precision.compute": "fp32"})),
        ("eos_token", "<|im_end|>", NotSupported("the base's tokenizer is used as it is")),
    ],
)
def test_what_is_learned_of_which_data_is_taken_over(option: str, value: Any, verdict: Verdict, tmp_path: Path) -> None:
    assert verdicts(converted(tmp_path, {"learning_rate": 1e-4, "bf16": True, option: value}))[option] == verdict


def test_a_number_of_samples_for_validation_is_no_share_of_them(tmp_path: Path) -> None:
    found = verdicts(converted(tmp_path, {"learning_rate": 1e-4, "bf16": True, "val_set_size": 200}))["val_set_size"]
    assert isinstance(found, NotSupported)
    assert "set validation_split to the share that they are" in found.reason
