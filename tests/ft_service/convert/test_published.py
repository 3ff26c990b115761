"""Configurations as the tools publish them, by their options and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.convert import Conversion, convert_file
from ft_service.convert.verdicts import NoEffect, Taken, ToCheck
from ft_service.errors import SpecError
from ft_service.spec import KtoOptions, OrpoOptions, SimpoOptions, parse_request

FACTORY: dict[str, Any] = {
    **{
        "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
        "trust_remote_code": True,
        "stage": "sft",
        "do_train": True,
    },
    **{
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "dataset": "identity,alpaca_en_demo",
    },
    **{
        "template": "qwen3_nothink",
        "cutoff_len": 2048,
        "max_samples": 1000,
        "preprocessing_num_workers": 16,
    },
    **{
        "dataloader_num_workers": 4,
        "output_dir": "saves/qwen3-4b/lora/sft",
        "logging_steps": 10,
        "save_steps": 500,
    },
    **{
        "plot_loss": True,
        "overwrite_output_dir": True,
        "save_only_model": False,
        "report_to": "none",
    },
    **{
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1.0e-4,
        "num_train_epochs": 3.0,
    },
    **{"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000},
    "resume_from_checkpoint": None,
}
"""LLaMA-Factory, examples/train_lora/qwen3_lora_sft."""
FACTORY_DPO = FACTORY | {
    "stage": "dpo",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "dataset": "dpo_en_demo",
    "learning_rate": 5.0e-6,
}
"""LLaMA-Factory, examples/train_lora/qwen3_lora_dpo."""
_NO_WANDB = dict.fromkeys(
    ("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model")
)
AXOLOTL: dict[str, Any] = {
    **{"base_model": "Qwen/Qwen3-32B", "strict": False, "chat_template": "qwen3"},
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    "datasets": [
        {
            "path": "mlabonne/FineTome-100k",
            "type": "chat_template",
            "split": "train[:20%]",
            "field_messages": "conversations",
        }
        | {"message_property_mappings": {"role": "from", "content": "value"}}
    ],
    **{
        "val_set_size": 0.0,
        "output_dir": "./outputs/out",
        "dataset_prepared_path": "last_run_prepared",
        "sequence_len": 2048,
    },
    **{
        "sample_packing": True,
        "eval_sample_packing": True,
        "load_in_4bit": True,
        "adapter": "qlora",
        "lora_r": 16,
    },
    **{
        "lora_alpha": 32,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"],
    },
    **{"lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True, **_NO_WANDB},
    **{
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "optimizer": "adamw_torch_4bit",
    },
    **{
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": "auto",
        "tf32": True,
        "gradient_checkpointing": "offload",
    },
    **{
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "resume_from_checkpoint": None,
        "logging_steps": 1,
    },
    **{
        "flash_attention": True,
        "warmup_ratio": 0.1,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "weight_decay": 0.0,
    },
    "special_tokens": None,
}
"""Axolotl, examples/qwen3/32b-qlora."""
GPT_OSS: dict[str, Any] = {
    **{
        "base_model": "openai/gpt-oss-20b",
        "use_kernels": True,
        "model_quantization_config": "Mxfp4Config",
    },
    "model_quantization_config_kwargs": {"dequantize": True},
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    "experimental_skip_move_to_device": True,
    "datasets": [
        {"path": "HuggingFaceH4/Multilingual-Thinking", "type": "chat_template"}
        | {"field_thinking": "thinking", "template_thinking_key": "thinking"}
    ],
    **{
        "val_set_size": 0,
        "output_dir": "./outputs/gpt-oss-out/",
        "sequence_len": 4096,
        "sample_packing": True,
    },
    **{
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        **_NO_WANDB,
    },
    **{
        "gradient_accumulation_steps": 8,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "optimizer": "adamw_torch_8bit",
    },
    **{
        "lr_scheduler": "constant_with_warmup",
        "learning_rate": "2e-4",
        "bf16": True,
        "tf32": True,
        "flash_attention": True,
    },
    **{"attn_implementation": "kernels-community/vllm-flash-attn3", "gradient_checkpointing": True},
    **{
        "activation_offloading": True,
        "logging_steps": 1,
        "saves_per_epoch": 1,
        "warmup_ratio": 0.1,
    },
    **{"special_tokens": None, "eot_tokens": ["<|end|>"]},
}
"""Axolotl, examples/gpt-oss/gpt-oss-20b-sft-lora-singlegpu."""
LLAMA_DPO: dict[str, Any] = {
    **{
        "base_model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "model_type": "LlamaForCausalLM",
        "tokenizer_type": "AutoTokenizer",
    },
    "special_tokens": {"pad_token": "<|finetune_right_pad_id|>", "eos_token": "<|eot_id|>"},
    **{"load_in_8bit": True, "load_in_4bit": False, "chat_template": "llama3", "rl": "dpo"},
    "datasets": [
        {"path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default"}
        | {"field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected"}
    ],
    **{
        "val_set_size": 0.05,
        "sequence_len": 4096,
        "sample_packing": False,
        "pad_to_sequence_len": True,
        "adapter": "lora",
    },
    **{
        "lora_model_dir": None,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        **_NO_WANDB,
    },
    **{
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 2,
        "num_epochs": 4,
        "optimizer": "adamw_bnb_8bit",
    },
    **{
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": "auto",
        "tf32": False,
        "gradient_checkpointing": True,
    },
    **{
        "flash_attention": True,
        "warmup_steps": 10,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "weight_decay": 0.0,
    },
}
"""Axolotl, examples/llama-3/instruct-dpo-lora-8b."""
TRL: dict[str, Any] = {
    **{
        "model_name_or_path": "Qwen/Qwen2.5-0.5B",
        "dataset_name": "stanfordnlp/imdb",
        "report_to": "none",
    },
    **{"learning_rate": 0.0001, "lr_scheduler_type": "cosine"},
}
"""TRL, examples/cli_configs/example_config."""
ZEPHYR: dict[str, Any] = {
    **{
        "model_name_or_path": "alignment-handbook/zephyr-7b-sft-qlora",
        "torch_dtype": "float16",
        "use_peft": True,
    },
    **{
        "load_in_4bit": True,
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "k_proj"],
    },
    **{
        "dataset_mixer": {"HuggingFaceH4/ultrafeedback_binarized": 1.0},
        "dataset_splits": ["train_prefs", "test_prefs"],
    },
    **{
        "preprocessing_num_workers": 12,
        "bf16": True,
        "beta": 0.01,
        "do_eval": True,
        "evaluation_strategy": "steps",
    },
    **{
        "eval_steps": 100,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "hub_model_id": "zephyr-7b-dpo-qlora",
    },
    **{
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": 5.0e-6,
        "log_level": "info",
    },
    **{
        "lr_scheduler_type": "cosine",
        "max_length": 1024,
        "max_prompt_length": 512,
        "num_train_epochs": 1,
    },
    **{
        "optim": "paged_adamw_32bit",
        "output_dir": "data/zephyr-7b-dpo-qlora",
        "per_device_train_batch_size": 4,
    },
    **{
        "per_device_eval_batch_size": 8,
        "push_to_hub": True,
        "save_strategy": "steps",
        "save_steps": 100,
    },
    **{"save_total_limit": 1, "seed": 42, "warmup_ratio": 0.1},
}
"""alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora."""
ORPO: dict[str, Any] = {
    **{
        "model_name_or_path": "mistral-community/Mixtral-8x22B-v0.1",
        "dataset_name": "argilla/distilabel-capybara-dpo-7k-binarized",
    },
    **{
        "bf16": True,
        "beta": 0.05,
        "learning_rate": 5.0e-6,
        "max_length": 2048,
        "max_prompt_length": 1792,
    },
    **{
        "hub_model_id": "zephyr-orpo-141b-A35b",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 1,
    },
}
"""alignment-handbook, recipes/zephyr-141b-A35b/orpo/config_full: its options are not specific to
ORPO.
"""
ACCELERATE: dict[str, Any] = {
    **{
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "downcast_bf16": "no",
    },
    "fsdp_config": {
        **{
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
        },
        **{
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
        "fsdp_version": 2,
    },
    **{
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 2,
    },
    **{
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
    },
}
"""Accelerate's FSDP2, as LLaMA-Factory publishes it (examples/accelerate/fsdp2_config)."""
ZERO_3: dict[str, Any] = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "auto",
    ),
    **{
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    },
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "zero_optimization": {
        **{
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
        },
        **{
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
        },
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""DeepSpeed's ZeRO 3, as LLaMA-Factory publishes it (examples/deepspeed/ds_z3_config)."""


def converted(folder: Path, body: dict[str, Any], **asked: Any) -> Conversion:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    conversion = convert_file(path, **asked)
    printed = yaml.safe_load(conversion.spec_yaml())
    parse_request(printed)
    assert printed == {"model": "MODEL", "training_file": "TRAINING.jsonl"} | conversion.body
    return conversion


@pytest.mark.parametrize(
    ("body", "tool", "lost"),
    [
        (FACTORY, "a config of LLaMA-Factory, stage: sft", ["dataset", "max_samples"]),
        (FACTORY_DPO, "a config of LLaMA-Factory, stage: dpo", ["max_samples"]),
        (
            AXOLOTL,
            "a config of Axolotl, supervised, since rl is not given",
            ["datasets", "sample_packing"],
        ),
        (
            GPT_OSS,
            "a config of Axolotl, supervised, since rl is not given",
            ["datasets", "sample_packing", "eot_tokens"],
        ),
        (LLAMA_DPO, "a config of Axolotl, rl: dpo", ["special_tokens.eos_token", "datasets"]),
        (
            TRL,
            "a config of TRL, taken as supervised, since it says nothing of DPO, KTO or GRPO",
            ["use_peft"],
        ),
        (
            ZEPHYR,
            "a config of TRL, taken as DPO's, since it says beta",
            ["dataset_splits", "max_prompt_length"],
        ),
        (ACCELERATE, "Accelerate's config file", []),
        (ZERO_3, "DeepSpeed's config file", []),
    ],
)
def test_the_tool_is_named_and_what_may_change_the_result(
    tmp_path: Path, body: dict[str, Any], tool: str, lost: list[str]
) -> None:
    conversion = converted(tmp_path, body)
    assert conversion.format.startswith(tool)
    assert conversion.open() == lost
    listed = {decision.option.split(".")[0] for decision in conversion.decisions}
    assert not [name for name, value in body.items() if value is None and name in listed], (
        "what is not set is not listed"
    )
    assert {name for name, value in body.items() if value is not None} <= listed


def test_defaults_of_the_source_are_written_out_with_their_tool(tmp_path: Path) -> None:
    text = converted(tmp_path, FACTORY).spec_yaml()
    assert "  lora_alpha: 16 # LLaMA-Factory's default (2 x rank)\n" in text
    assert converted(tmp_path, FACTORY | {"lora_rank": 64}).body["lora"]["lora_alpha"] == 128
    assert converted(tmp_path, FACTORY | {"lora_alpha": 7}).body["lora"]["lora_alpha"] == 7
    bare = {
        name: FACTORY[name]
        for name in ("model_name_or_path", "stage", "finetuning_type", "dataset", "template")
    }
    assert converted(tmp_path, bare).body == {
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "training": {"batch_size": 8, "learning_rate": 5e-5, "warmup_ratio": 0.0},
        "lora": {"r": 8, "lora_alpha": 16},
        "seed": 42,
    }
    with_dpo = converted(tmp_path, bare | {"stage": "dpo"}).body
    assert with_dpo["method"] == {"type": "dpo"}
    assert with_dpo["training"] == {
        "batch_size": 8,
        "learning_rate": 5e-5,
        "warmup_ratio": 0.0,
        "n_epochs": 3,
    }


def test_the_defaults_of_trl_and_of_axolotl_are_their_own(tmp_path: Path) -> None:
    trl = {"model_name_or_path": "base", "dataset_name": "org/data", "use_peft": True}
    supervised = converted(tmp_path, trl)
    assert supervised.open() == []
    assert supervised.body["training"] == {
        **{
            "batch_size": 8,
            "warmup_ratio": 0.0,
            "learning_rate": 2e-5,
            "max_length": 1024,
            "train_on": "everything",
        },
        "packing": False,
    }
    assert supervised.body["lora"] == {"lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    dpo = converted(tmp_path, trl, method="dpo")
    assert (dpo.body["method"], dpo.body["training"]["learning_rate"]) == ({"type": "dpo"}, 1e-6)
    assert "train_on" not in dpo.body["training"]
    mean = converted(tmp_path, trl | {"loss_type": "sigmoid_norm"})
    assert mean.body["method"]["dpo"]["hyperparameters"] == {
        "loss_type": "sigmoid_norm",
        "beta": 0.1,
    }, "5 is usual here"
    axolotl = converted(
        tmp_path,
        {"base_model": "base", "adapter": "lora", "learning_rate": 1e-4, "sample_packing": True},
    )
    assert axolotl.body["training"] == {
        **{"learning_rate": 1e-4, "n_epochs": 1, "batch_size": 1, "lr_scheduler_type": "cosine"},
        "max_length": 512,
    }


def test_training_of_all_weights_is_said_before_anything_else(tmp_path: Path) -> None:
    for body in (
        TRL,
        FACTORY | {"finetuning_type": "full"},
        {name: value for name, value in GPT_OSS.items() if name != "adapter"},
        ZEPHYR | {"use_peft": False},
    ):
        conversion = converted(tmp_path, body)
        first = next(line for line in conversion.spec_yaml().splitlines() if "→" in line)
        assert "THIS TRAINS ALL WEIGHTS THERE" in first
        defaults = {default.option for default in conversion.defaults}
        assert not {name for name in defaults if name.startswith("lora.")}, "they are no adapter's"


@pytest.mark.parametrize(
    ("body", "hyperparameters"),
    [
        (FACTORY_DPO, {"beta": 0.1, "loss_type": "sigmoid"}),
        (
            FACTORY_DPO | {"pref_loss": "ipo", "pref_ftx": 0.5},
            {"beta": 0.1, "loss_type": "ipo", "rpo_alpha": 0.5},
        ),
        (LLAMA_DPO | {"rl_beta": 0.3}, {"beta": 0.3}),
        (LLAMA_DPO | {"rl": "ipo", "trl": {"beta": 0.2}}, {"loss_type": "ipo", "beta": 0.2}),
        (
            LLAMA_DPO | {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.2]},
            {"loss_type": "sigmoid", "rpo_alpha": 0.2},
        ),
        (ZEPHYR, {"beta": 0.01}),
        (
            ZEPHYR | {"loss_type": "robust", "label_smoothing": 0.1},
            {"beta": 0.01, "loss_type": "robust", "label_smoothing": 0.1},
        ),
        (ZEPHYR | {"loss_type": "robust"}, {"beta": 0.01, "loss_type": "sigmoid"}),
        (
            ZEPHYR | {"loss_type": "apo_zero", "label_smoothing": 0.1},
            {"beta": 0.01, "loss_type": "apo_zero"},
        ),
        (FACTORY_DPO | {"pref_loss": "hinge"}, {"beta": 0.1, "loss_type": "hinge"}),
        (
            ZEPHYR | {"loss_type": "sigmoid_norm", "rpo_alpha": 1.0},
            {"beta": 0.01, "loss_type": "sigmoid_norm", "rpo_alpha": 1.0},
        ),
    ],
)
def test_direct_preference_optimisation_stays_that(
    tmp_path: Path, body: dict[str, Any], hyperparameters: dict[str, Any]
) -> None:
    assert converted(tmp_path, body).body["method"] == {
        "type": "dpo",
        "dpo": {"hyperparameters": hyperparameters},
    }


@pytest.mark.parametrize(
    ("given", "packing"), [({}, None), ({"packing": True}, True), ({"packing": False}, False)]
)
def test_pre_training_of_llama_factory_learns_documents(
    tmp_path: Path, given: dict[str, Any], packing: bool | None
) -> None:
    """It packs them unless the file says otherwise, and so do we."""
    training = converted(tmp_path, FACTORY | {"stage": "pt"} | given).body["training"]
    assert training["train_on"] == "everything"
    assert training.get("packing") is packing


def test_documents_that_are_not_packed_there_are_not_packed_here(tmp_path: Path) -> None:
    training = converted(tmp_path, FACTORY | {"train_on_prompt": True, "packing": False}).body[
        "training"
    ]
    assert training["packing"] is False


def test_a_program_is_told_apart_from_settings(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from unsloth import FastLanguageModel\n")
    with pytest.raises(SpecError, match="is a program, and none of Unsloth's"):
        convert_file(path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        *((FACTORY | {"stage": stage}, f'stage: "{stage}"') for stage in ("rm", "ppo", "other")),
        *((LLAMA_DPO | {"rl": rl}, f'rl: "{rl}"') for rl in ("grpo", "gdpo", "ebft")),
        (GPT_OSS | {"reward_model": True}, "reward_model: true"),
        (TRL | {"loss_type": "cpo"}, "loss_type=cpo is for CPO"),
        (TRL | {"center_rewards_coefficient": 0.01}, "is for reward modelling"),
        (TRL | {"output_dir": "out/qwen-cpo", "beta": 0.1}, "seems to be for CPO"),
        (TRL | {"output_dir": "out/qwen-rloo", "num_generations": 8}, "seems to be for RLOO"),
    ],
)
def test_other_methods_are_refused_and_never_become_supervised(
    tmp_path: Path, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        converted(tmp_path, body)
    assert says in caught.value.message


WEIGHTS: dict[str, Any] = {"desirable_weight": 1.0, "undesirable_weight": 1.5}


@pytest.mark.parametrize(
    ("body", "beta"),
    [
        (TRL | {"loss_type": "kto", **WEIGHTS}, 0.1),
        (TRL | {"beta": 0.3, **WEIGHTS}, 0.3),
        (FACTORY | {"stage": "kto", "kto_chosen_weight": 1.0, "kto_rejected_weight": 1.5}, 0.1),
        (
            LLAMA_DPO
            | {
                "rl": "kto",
                "rl_beta": 0.2,
                "kto_desirable_weight": 1.0,
                "kto_undesirable_weight": 1.5,
            },
            0.2,
        ),
    ],
)
def test_kto_is_taken_over_with_its_weights(
    body: dict[str, Any], beta: float, tmp_path: Path
) -> None:
    found = converted(tmp_path, body).body["method"]
    options = parse_request({"model": "a", "training_file": "b", "method": found}).method
    assert options.loss_options() == KtoOptions(beta=beta, loss_type="kto", **WEIGHTS)


SWIFT: dict[str, Any] = {"model": "org/base", "train_type": "lora", "dataset": "mine"}


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (
            TRL | {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.4},
            SimpoOptions(beta=2.5, gamma=1.4),
        ),
        (TRL | {"simpo_gamma": 0.3}, SimpoOptions(beta=0.1, gamma=0.3)),
        (LLAMA_DPO | {"rl": "simpo", "rl_beta": 2.0}, SimpoOptions(beta=2.0, gamma=0.5)),
        (FACTORY_DPO | {"pref_loss": "simpo", "pref_beta": 2.0}, SimpoOptions(beta=2.0, gamma=0.5)),
        (SWIFT | {"rlhf_type": "simpo"}, SimpoOptions(beta=2.0, gamma=1.0)),
        (ORPO, OrpoOptions(beta=0.05)),
        (TRL | {"orpo_alpha": 0.2}, OrpoOptions(beta=0.2)),
        (LLAMA_DPO | {"rl": "orpo", "orpo_alpha": 0.3}, OrpoOptions(beta=0.3)),
        (FACTORY_DPO | {"pref_loss": "orpo", "pref_beta": 0.4}, OrpoOptions(beta=0.4)),
        (SWIFT | {"rlhf_type": "orpo"}, OrpoOptions(beta=0.1)),
    ],
)
def test_simpo_and_orpo_are_taken_over(
    body: dict[str, Any], options: SimpoOptions | OrpoOptions, tmp_path: Path
) -> None:
    found = converted(tmp_path, body).body["method"]
    request = parse_request({"model": "a", "training_file": "b", "method": found})
    assert request.method.loss_options() == options


def test_simpo_with_cpos_supervised_term_says_that_it_is_lost(tmp_path: Path) -> None:
    for weight, lost in ((0.0, False), (1.0, True)):
        found = converted(tmp_path, LLAMA_DPO | {"rl": "simpo", "cpo_alpha": weight})
        assert ("cpo_alpha" in found.open()) == lost


def test_a_loss_without_z0_and_a_name_say_kto_too(tmp_path: Path) -> None:
    unpaired = converted(tmp_path, TRL | {"loss_type": "apo_zero_unpaired"}).body["method"]
    assert unpaired["kto"]["hyperparameters"]["loss_type"] == "apo_zero_unpaired"
    assert converted(tmp_path, TRL | {"output_dir": "out/a-kto"}).body["method"]["type"] == "kto"
    assert converted(tmp_path, TRL, method="kto").body["method"]["type"] == "kto"
    assert "method" not in converted(tmp_path, FACTORY | {"kto_chosen_weight": 2.0}).body


def test_a_method_that_is_asked_for_must_be_that_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--method dpo: the file is for supervised \(stage: sft\)"):
        converted(tmp_path, FACTORY, method="dpo")
    assert converted(tmp_path, ORPO, method="dpo").body["method"]["type"] == "dpo"
    assert "method" not in converted(tmp_path, TRL | {"beta": 0.1}, method="supervised").body


@pytest.mark.parametrize(
    ("body", "one", "four"),
    [
        (FACTORY, "1 x 8", 32),
        (AXOLOTL, "1 x 2", 8),
        (LLAMA_DPO, "2 x 4", 32),
        (ZEPHYR, "4 x 1", 16),
        (TRL, "8 x 1", 32),
    ],
)
def test_the_batch_size_is_the_product(
    tmp_path: Path, body: dict[str, Any], one: str, four: int
) -> None:
    alone = converted(tmp_path, body)
    together = converted(tmp_path, body, gpus=4)
    assert (
        alone.body["training"]["batch_size"] * 4 == together.body["training"]["batch_size"] == four
    )
    said = {
        text.strip()
        for text in (*alone.spec_yaml().splitlines(), *together.spec_yaml().splitlines())
        if "batch_size: " in text
    }
    assert any(f"{one} on one GPU; multiply by your number of GPUs" in line for line in said)
    assert any(f"{one} x 4 GPUs" in line for line in said)


def test_a_number_of_gpus_that_says_nothing_is_refused(tmp_path: Path) -> None:
    for body in (ACCELERATE, ZERO_3, ZERO_3 | {"train_batch_size": 64}):
        with pytest.raises(
            SpecError, match="--gpus 4: the file does not say the batch size of one GPU"
        ):
            converted(tmp_path, body, gpus=4)
    assert (
        converted(tmp_path, ZERO_3 | {"train_micro_batch_size_per_gpu": 2}, gpus=4).body[
            "training"
        ]["batch_size"]
        == 8
    )


def test_what_changes_the_data_is_to_be_done_with_what_it_was(tmp_path: Path) -> None:
    text = " ".join(converted(tmp_path, AXOLOTL).spec_yaml().replace("#", "").split())
    assert "this was mlabonne/FineTome-100k (split: train[:20%])" in text, (
        "ShareGPT's names of columns are known"
    )
    mixed = converted(tmp_path, ZEPHYR | {"dataset_mixer": {"a/a": 1.0, "b/b": 0.5}})
    assert "dataset_mixer" in mixed.open()
    assert "this was a/a; b/b (a share of 0.5)" in mixed.spec_yaml()
    mixture = {
        "datasets": [
            {
                "id": "org/a",
                "config": "all",
                "split": "train",
                "columns": ["messages"],
                "weight": 0.5,
            }
        ],
        "seed": 0,
    }
    again = converted(tmp_path, ZEPHYR | {"dataset_mixer": None, "dataset_mixture": mixture})
    assert "dataset_mixture" in again.open()
    for body, name in (
        (TRL | {"dataset_train_split": "train[:10%]"}, "dataset_train_split"),
        (FACTORY | {"val_size": 200}, "val_size"),
        (AXOLOTL | {"val_set_size": 500}, "val_set_size"),
        (AXOLOTL | {"datasets": [{"path": "a"}, {"path": "b"}]}, "datasets"),
        (AXOLOTL | {"datasets": [{"path": "a", "type": "alpaca"}]}, "datasets"),
        (
            AXOLOTL
            | {
                "datasets": [{"path": "a", "type": {"field_instruction": "q", "field_output": "a"}}]
            },
            "datasets",
        ),
    ):
        assert name in converted(tmp_path, body).open()
    plain = converted(
        tmp_path, AXOLOTL | {"datasets": [{"path": "org/data", "type": "chat_template"}]}
    )
    assert plain.open() == ["sample_packing"]
    assert plain.body["training_file"] == "hf://org/data"


def test_options_of_kernels_are_known_and_have_no_effect(tmp_path: Path) -> None:
    found = {
        d.option: d.verdict
        for body in (AXOLOTL, GPT_OSS)
        for d in converted(tmp_path, body).decisions
    }
    for name in (
        *(
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "plugins",
            "activation_offloading",
            "use_kernels",
        ),
        *(
            "experimental_skip_move_to_device",
            "model_quantization_config",
            "model_quantization_config_kwargs.dequantize",
        ),
    ):
        assert isinstance(found[name], NoEffect), name
    other = converted(tmp_path, AXOLOTL | {"plugins": ["axolotl.integrations.kd.KDPlugin"]})
    assert "plugins" in other.open()


def test_schedules_that_warm_up_and_that_do_not(tmp_path: Path) -> None:
    assert converted(tmp_path, GPT_OSS).body["training"]["lr_scheduler_type"] == "constant"
    assert converted(tmp_path, GPT_OSS).body["training"]["warmup_ratio"] == 0.1
    for name in ("lr_scheduler", "lr_scheduler_type"):
        flat = converted(tmp_path, {**GPT_OSS, "lr_scheduler": None, name: "constant"})
        assert (
            flat.body["training"]["lr_scheduler_type"],
            flat.body["training"]["warmup_ratio"],
        ) == ("constant", 0.0)


def test_what_was_not_taken_comes_first_and_what_has_no_effect_is_one_list(tmp_path: Path) -> None:
    conversion = converted(tmp_path, LLAMA_DPO | {"relora": True})
    lines = conversion.spec_yaml().splitlines()
    headings = [
        line
        for line in lines
        if line.startswith("# ") and line.endswith(":") and not line.startswith("#  ")
    ]
    assert headings == [
        "# Not supported here, and the result may differ:",
        "# To do, or the result may differ:",
        "# To check:",
        "# Axolotl's defaults that differ from those here, written out below:",
        "# No effect here:",
    ]
    assert max(len(line) for line in lines if line.startswith("#")) <= 120
    idle = " ".join(
        line.strip("# ") for line in lines[lines.index(headings[-1]) + 1 : lines.index("")]
    )
    assert idle.split(", ") == [
        d.option for d in conversion.decisions if isinstance(d.verdict, NoEffect)
    ]


def test_options_of_which_the_same_is_said_stand_together(tmp_path: Path) -> None:
    text = converted(
        tmp_path, GPT_OSS | {"wandb_project": "mine", "wandb_entity": "us"}
    ).spec_yaml()
    assert '#   wandb_project: "mine", wandb_entity: "us" → ' in text


def test_a_template_of_several_lines_is_a_block_and_a_name_is_the_bases_own(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n  {{ m['content'] }} \n\n{% endfor %}\n"
    conversion = converted(tmp_path, ZEPHYR | {"chat_template": template})
    assert (
        "chat_template: |2\n  {% for m in messages %}\n    {{ m['content'] }} \n\n  {% endfor %}\n"
        in conversion.spec_yaml()
    )
    named = {d.option: d.verdict for d in converted(tmp_path, FACTORY).decisions}["template"]
    assert isinstance(named, ToCheck)
    standard = {d.option: d.verdict for d in converted(tmp_path, LLAMA_DPO).decisions}[
        "chat_template"
    ]
    assert standard == Taken({"chat_template": "llama-3"})


def test_names_of_a_file_stay_in_its_comments(tmp_path: Path) -> None:
    odd = {
        "a\u2028model: b": 1,
        "c\nmodel: d": "e\u0085f\x07",
        "datasets": [{"path": "g\nmodel: h\x07"}],
    }
    assert converted(tmp_path, GPT_OSS | odd).body["model"] == "openai/gpt-oss-20b"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FACTORY | odd))
    assert yaml.safe_load(convert_file(path).spec_yaml())["model"] == FACTORY["model_name_or_path"]
