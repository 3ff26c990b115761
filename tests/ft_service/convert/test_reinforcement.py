"""Reinforcement learning (GRPO) of TRL and verl as a SPEC.

The files have options and values of published ones.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.convert import Conversion, convert_file
from ft_service.convert.verdicts import Lost, NoEffect, ToCheck, ToDo, Verdict
from ft_service.data.formats.columns import Columns
from ft_service.data.prompt_line import parse_prompt
from ft_service.errors import SpecError
from ft_service.graders.grades import Sample
from ft_service.graders.grading import GraderContext, grade
from ft_service.spec import parse_request
from tests.support.command_line import Ft

SIMPLE: dict[str, Any] = {
    **{
        "model_name_or_path": "Qwen/Qwen2.5-Math-7B",
        "model_revision": "main",
        "torch_dtype": "bfloat16",
    },
    **{
        "attn_implementation": "flash_attention_2",
        "dataset_name": "DigitalLearningGmbH/MATH-lighteval",
    },
    **{
        "dataset_config": "default",
        "system_prompt": "You are a helpful math assistant.",
        "output_dir": "data/Simple-RL",
    },
    **{
        "reward_funcs": ["accuracy", "format"],
        "reward_weights": [1.0, 0.5],
        "learning_rate": 1.5e-6,
        "bf16": True,
    },
    **{
        "use_vllm": True,
        "vllm_device": "auto",
        "vllm_gpu_memory_utilization": 0.7,
        "do_eval": True,
        "eval_steps": 100,
    },
    **{
        "eval_strategy": "steps",
        "gradient_accumulation_steps": 8,
        "per_device_train_batch_size": 16,
        "num_generations": 7,
    },
    **{
        "gradient_checkpointing": True,
        "lr_scheduler_type": "cosine",
        "max_prompt_length": 650,
        "max_completion_length": 1024,
    },
    **{
        "max_steps": -1,
        "num_train_epochs": 1,
        "save_strategy": "epoch",
        "seed": 42,
        "warmup_ratio": 0.1,
        "log_level": "info",
    },
}
"""Open R1, recipes/Qwen2.5-Math-7B/grpo/config_simple_rl."""
CODE: dict[str, Any] = {
    **{
        "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "dataset_name": "open-r1/codeforces-verifiable",
    },
    **{
        "dataset_prompt_column": "prompt_c++17",
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "bf16": True,
    },
    **{
        "do_eval": False,
        "eval_strategy": "no",
        "use_vllm": True,
        "gradient_accumulation_steps": 16,
        "num_generations": 16,
    },
    **{
        "learning_rate": 1.0e-6,
        "lr_scheduler_type": "constant_with_warmup",
        "max_grad_norm": 0.2,
        "max_prompt_length": 2000,
    },
    **{
        "max_completion_length": 8192,
        "num_train_epochs": 40,
        "per_device_train_batch_size": 8,
        "save_strategy": "steps",
    },
    **{
        "reward_funcs": ["cf_code", "code_format"],
        "reward_weights": [1.0, 0.1],
        "save_steps": 0.05,
        "save_total_limit": 1,
    },
    **{
        "seed": 42,
        "temperature": 0.7,
        "warmup_ratio": 0.1,
        "mask_truncated_completions": True,
        "code_language": "cpp",
    },
    **{
        "callbacks": ["push_to_hub_revision"],
        "benchmarks": ["lcb_v4"],
        "wandb_project": "open-r1",
        "report_to": ["wandb"],
    },
    "code_eval_test_batch_size": 20,
}
"""Open R1, recipes/Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces."""
VERL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        **{
            "train_files": "gsm8k/train.parquet",
            "val_files": "gsm8k/test.parquet",
            "train_batch_size": 16,
        },
        **{
            "max_prompt_length": 512,
            "max_response_length": 1024,
            "filter_overlong_prompts": True,
            "truncation": "error",
        },
    },
    "actor_rollout_ref": {
        "model": {
            "path": "Qwen/Qwen2.5-3B-Instruct",
            "lora_rank": 64,
            "lora_alpha": 32,
            "use_remove_padding": True,
        },
        "actor": {
            **{
                "optim": {"lr": 3e-6},
                "ppo_mini_batch_size": 16,
                "ppo_micro_batch_size_per_gpu": 40,
                "use_kl_loss": True,
            },
            **{"kl_loss_coef": 0.002, "kl_loss_type": "low_var_kl", "entropy_coeff": 0},
            "fsdp_config": {"param_offload": False, "optimizer_offload": False},
        },
        "rollout": {
            **{
                "name": "vllm",
                "n": 5,
                "tensor_model_parallel_size": 2,
                "gpu_memory_utilization": 0.6,
            },
            **{
                "log_prob_micro_batch_size_per_gpu": 40,
                "load_format": "safetensors",
                "layered_summon": True,
            },
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 40, "fsdp_config": {"param_offload": True}},
    },
    "trainer": {
        **{
            "val_before_train": False,
            "critic_warmup": 0,
            "logger": ["console"],
            "project_name": "p",
            "experiment_name": "e",
        },
        **{"n_gpus_per_node": 2, "nnodes": 1, "save_freq": 20, "test_freq": 5, "total_epochs": 15},
    },
}
"""verl, examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora."""
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}


def converted(folder: Path, body: dict[str, Any], **asked: Any) -> Conversion:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    conversion = convert_file(path, **asked)
    printed = yaml.safe_load(conversion.spec_yaml())
    assert parse_request(printed).method.type == "reinforcement"
    assert printed == {"model": "MODEL", "training_file": "TRAINING.jsonl"} | conversion.body
    return conversion


def hyperparameters(conversion: Conversion) -> dict[str, Any]:
    return conversion.body["method"]["reinforcement"]["hyperparameters"]


def verdicts(conversion: Conversion) -> dict[str, Verdict]:
    return {decision.option: decision.verdict for decision in conversion.decisions}


def comments(conversion: Conversion) -> str:
    """The SPEC's text on one line, without line breaks in comments."""
    return " ".join(conversion.spec_yaml().replace("#", "").split())


def with_options(body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The body with these dotted options, of which None is left out."""
    body = deepcopy(body)
    for name, value in options.items():
        target = body
        *sections, last = name.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return body


def test_a_published_file_of_trl_becomes_a_spec_with_a_grader_to_write(tmp_path: Path) -> None:
    conversion = converted(tmp_path, SIMPLE | LORA, gpus=7)
    assert conversion.format.startswith(
        "a config of TRL's GRPO, taken as GRPO's, since it says num_generations"
    )
    assert conversion.open() == ["reward_funcs", "system_prompt", "reward_weights"]
    assert hyperparameters(conversion) == {
        **{
            "eval_interval": 100,
            "num_generations": 7,
            "max_completion_length": 1024,
            "scale_rewards": "group",
        },
    }
    assert conversion.body["training"] == {
        **{
            "learning_rate": 1.5e-6,
            "batch_size": 128,
            "lr_scheduler_type": "cosine",
            "max_length": 1674,
            "n_epochs": 1,
        },
        "warmup_ratio": 0.1,
    }
    assert conversion.body["data"] == {"messages": "prompt"}
    assert "lora_dropout" not in conversion.body["lora"]
    assert isinstance(verdicts(conversion)["lora_dropout"], ToCheck), (
        "TRL's default has an effect there"
    )
    text = conversion.spec_yaml()
    for part in (
        "grader: # to fill in: what gives an answer its reward (docs/graders.md)",
        "batch_size: 128 # prompts, each with 7 answers: 16 x 8 x 7 GPUs",
        "scale_rewards: group # TRL's default",
    ):
        assert part in text, part


def test_the_losses_of_dr_grpo_and_dapo_keep_their_meaning(tmp_path: Path) -> None:
    conversion = converted(tmp_path, CODE | LORA, gpus=8)
    assert hyperparameters(conversion) == {
        **{
            "beta": 0.0,
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "num_generations": 16,
            "temperature": 0.7,
        },
        **{"max_completion_length": 8192, "mask_truncated_completions": True},
    }
    assert conversion.body["training"]["max_length"] == 10192
    assert conversion.body["training"]["batch_size"] == 64
    assert conversion.body["data"] == {"messages": "prompt_c++17"}


def test_published_files_train_all_weights_and_it_is_said_first(tmp_path: Path) -> None:
    conversion = converted(tmp_path, SIMPLE, gpus=7)
    assert conversion.open()[0] == "use_peft"
    assert "THIS TRAINS ALL WEIGHTS THERE" in next(
        line for line in conversion.spec_yaml().splitlines() if "→" in line
    )
    assert "lora_dropout" not in verdicts(conversion), "it is an adapter's"


def test_a_published_file_of_verl_becomes_a_spec(tmp_path: Path) -> None:
    conversion = converted(tmp_path, VERL)
    assert (
        conversion.format == "verl's config, algorithm.adv_estimator: grpo (options of verl 0.9.1)"
    )
    assert conversion.open() == ["custom_reward_function.path", "data.filter_overlong_prompts"]
    assert hyperparameters(conversion) == {
        **{
            "max_completion_length": 1024,
            "beta": 0.002,
            "num_generations": 5,
            "eval_interval": 5,
            "scale_rewards": "group",
        },
    }
    assert conversion.body["lora"] == {"r": 64, "lora_alpha": 32}
    assert conversion.body["training"] == {
        **{
            "batch_size": 16,
            "max_length": 1536,
            "learning_rate": 3e-6,
            "n_epochs": 15,
            "lr_scheduler_type": "constant",
        },
        **{"warmup_ratio": 0.0, "weight_decay": 0.01},
    }
    assert conversion.body["checkpoint"] == {"save_steps": 20}
    grader = conversion.body["method"]["reinforcement"]["grader"]
    assert grader["reference"] == "{{ item.reward_model.ground_truth }}", (
        "where verl's data have it"
    )
    assert "it was data.train_files: gsm8k/train.parquet" in conversion.spec_yaml()


@pytest.mark.parametrize(("answer", "reward"), [("1 + 1 = 2", 1.0), ("3", 0.0)])
def test_a_line_of_verls_data_is_read_and_graded_as_the_spec_says(
    tmp_path: Path, answer: str, reward: float
) -> None:
    line = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
    }
    line |= {
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    request = parse_request(yaml.safe_load(converted(tmp_path, VERL).spec_yaml()))
    prompt = parse_prompt(Columns(request.data.pairs, of_prompts=True).record(line))
    options = request.method.reinforcement
    assert options is not None
    assert options.grader is not None
    assert (
        grade(
            options.grader,
            Sample(answer),
            prompt.item,
            GraderContext(project="p"),
        ).reward
        == reward
    )


def test_defaults_of_verl_are_written_out(tmp_path: Path) -> None:
    bare = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "base", "lora_rank": 8}},
    }
    conversion = converted(tmp_path, bare)
    assert conversion.body["training"] == {
        **{
            "n_epochs": 30,
            "batch_size": 1024,
            "max_length": 1024,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
        },
        **{"warmup_ratio": 0.0, "weight_decay": 0.01},
    }
    assert conversion.body["lora"] == {"r": 8, "lora_alpha": 16}
    assert hyperparameters(conversion) == {"max_completion_length": 512, "scale_rewards": "group"}
    assert conversion.open() == [
        "custom_reward_function.path",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    ]
    assert "in 4 updates there" in comments(conversion), "256 of 1024 prompts"


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}, 8),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": None}, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, None),
        ({"per_device_train_batch_size": None, "gradient_accumulation_steps": None}, 1),
    ],
)
def test_the_batch_of_trl_counts_answers(
    tmp_path: Path, options: dict[str, Any], batch: int | None
) -> None:
    conversion = converted(tmp_path, SIMPLE | LORA | options | {"num_generations": 8})
    assert conversion.body["training"].get("batch_size") == batch
    if batch is None:
        assert "4 x 3 on one GPU; multiply by your number of GPUs" in comments(conversion)
        assert (
            converted(tmp_path, SIMPLE | LORA | options, gpus=7).body["training"]["batch_size"]
            == 12
        )
        left = verdicts(converted(tmp_path, SIMPLE | LORA | options, gpus=5))[
            "per_device_train_batch_size"
        ]
        assert isinstance(left, ToDo), "60 answers are not groups of 7"


@pytest.mark.parametrize(
    ("option", "value", "verdict"),
    [
        ("max_prompt_length", "long", ToDo),
        ("max_completion_length", -1, ToDo),
        ("lora_dropout", 0.1, ToCheck),
        ("lora_dropout", 0, NoEffect),
        ("num_iterations", 1, NoEffect),
        ("num_iterations", 2, Lost),
        ("steps_per_generation", 8, NoEffect),
        ("steps_per_generation", 16, Lost),
        ("epsilon", 0.2, NoEffect),
        ("epsilon_high", 0.28, NoEffect),
        ("top_p", 1.0, NoEffect),
        ("top_p", 0.95, Lost),
        ("top_k", 50, Lost),
        ("min_p", 0.1, Lost),
        ("repetition_penalty", 1.1, Lost),
        ("loss_type", "bnpo", Lost),
        ("scale_rewards", "batch", Lost),
        ("sync_ref_model", True, Lost),
        ("vllm_importance_sampling_clip_max", 3.0, ToCheck),
        ("chat_template_kwargs", {"enable_thinking": False}, ToDo),
        ("reward_model_name_or_path", "org/reward", ToDo),
        ("use_vllm", True, NoEffect),
        ("neftune_noise_alpha", 5, Lost),
        ("dataset_train_split", "train[:10%]", ToDo),
    ],
)
def test_what_has_no_place_here_is_said(
    tmp_path: Path, option: str, value: Any, verdict: type
) -> None:
    found = verdicts(converted(tmp_path, SIMPLE | LORA | {option: value}))
    said = next(
        each for name, each in found.items() if name == option or name.startswith(f"{option}.")
    )
    assert isinstance(said, verdict), said


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"beta": 0.04}, {"beta": 0.04}),
        (
            {"loss_type": "grpo", "scale_rewards": True},
            {"loss_type": "grpo", "scale_rewards": "group"},
        ),
        ({"scale_rewards": "none"}, {"scale_rewards": "none"}),
        ({"loss_type": "cispo"}, {"loss_type": "dapo"}),
        ({"vllm_importance_sampling_cap": 3.0}, {"importance_sampling_cap": 3.0}),
        (
            {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 5,
            },
            {"importance_sampling_cap": 5},
        ),
        ({"num_generations_eval": 2}, {"eval_samples": 2}),
    ],
)
def test_options_of_trl_that_are_taken_over(
    tmp_path: Path, options: dict[str, Any], taken: dict[str, Any]
) -> None:
    found = hyperparameters(converted(tmp_path, SIMPLE | LORA | options))
    assert {name: found.get(name) for name in taken} == taken


def test_prompts_without_a_limit_leave_room_for_the_longest_answer(tmp_path: Path) -> None:
    free = SIMPLE | LORA | {"max_prompt_length": None}
    assert converted(tmp_path, free).body["training"]["max_length"] == 2048
    assert (
        converted(tmp_path, free | {"max_completion_length": 8192}).body["training"]["max_length"]
        == 9216
    )
    assert (
        converted(tmp_path, free | {"vllm_max_model_length": 4096}).body["training"]["max_length"]
        == 4096
    )
    short = converted(tmp_path, SIMPLE | LORA | {"max_completion_length": None})
    assert (
        hyperparameters(short)["max_completion_length"],
        short.body["training"]["max_length"],
    ) == (512, 1162)


ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({f"{ACTOR}use_kl_loss": False}, {"beta": None}),
        ({f"{ACTOR}use_kl_loss": False, "algorithm.use_kl_in_reward": True}, {"beta": 0.001}),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss_type": "dr_grpo"}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"scale_rewards": "none"}),
        (
            {"algorithm.rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 4.0}},
            {"importance_sampling_cap": 4.0},
        ),
        ({f"{ROLLOUT}val_kwargs": {"n": 4}}, {"eval_samples": 4}),
    ],
)
def test_options_of_verl_that_are_taken_over(
    tmp_path: Path, options: dict[str, Any], taken: dict[str, Any]
) -> None:
    found = hyperparameters(converted(tmp_path, with_options(VERL, options)))
    assert {name: found.get(name) for name in taken} == taken


@pytest.mark.parametrize(
    ("option", "value", "verdict"),
    [
        (f"{ACTOR}ppo_mini_batch_size", 16, NoEffect),
        (f"{ACTOR}ppo_mini_batch_size", 8, Lost),
        (f"{ACTOR}ppo_epochs", 2, Lost),
        (f"{ACTOR}clip_ratio_high", 0.28, NoEffect),
        (f"{ACTOR}entropy_coeff", 0.001, Lost),
        (f"{ACTOR}kl_loss_type", "kl", Lost),
        (f"{ACTOR}kl_loss_type", "k3+", NoEffect),
        (f"{ACTOR}policy_loss.loss_mode", "clip_cov", Lost),
        (f"{ACTOR}clip_ratoi", 0.2, Lost),
        ("algorithm.use_kl_in_reward", True, ToDo),
        ("algorithm.filter_groups.enable", True, Lost),
        ("reward_model.enable", True, ToDo),
        ("data.truncation", "left", ToDo),
        (f"{ROLLOUT}n", 1, ToDo),
        (f"{ROLLOUT}top_p", 0.9, Lost),
        (f"{ROLLOUT}multi_turn.enable", True, Lost),
        ("trainer.v1.trainer_mode", "separate_async", ToDo),
        ("actor_rollout_ref.model.lora_rank", 0, Lost),
        ("defaults", ["ppo_trainer", "_self_"], NoEffect),
        ("defaults", ["mine", "_self_"], ToDo),
    ],
)
def test_what_has_no_place_here_is_said_of_verl(
    tmp_path: Path, option: str, value: Any, verdict: type
) -> None:
    found = verdicts(converted(tmp_path, with_options(VERL, {option: value})))
    assert isinstance(found[option], verdict), found[option]


@pytest.mark.parametrize(
    "optim",
    [
        {"betas": [0.8, 0.95], "eps": 1e-6},
        {"override_optimizer_config": {"betas": [0.8, 0.95], "eps": 1e-6}},
        {"override_optimizer_config": {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}},
    ],
)
def test_the_options_of_adamw_in_verls_places(tmp_path: Path, optim: dict[str, Any]) -> None:
    """Those that FSDP's optimizer has, as options and as ones that override them, and those of
    Megatron's.
    """
    training = converted(tmp_path, with_options(VERL, {f"{ACTOR}optim": optim})).body["training"]
    assert (training["adam_beta1"], training["adam_beta2"], training["adam_epsilon"]) == (
        0.8,
        0.95,
        1e-6,
    )


def test_the_options_of_adamw_in_a_file_for_grpo(tmp_path: Path) -> None:
    conversion = converted(
        tmp_path, SIMPLE | LORA | {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6}
    )
    assert (
        conversion.body["training"].items()
        >= {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6}.items()
    )


def test_the_rank_of_megatrons_section_counts_too(tmp_path: Path) -> None:
    section = {"path": "base", "lora": {"rank": 32, "alpha": 64, "target_modules": ["linear_qkv"]}}
    conversion = converted(tmp_path, with_options(VERL, {"actor_rollout_ref.model": section}))
    assert conversion.body["lora"] == {"r": 32, "lora_alpha": 64}
    assert "actor_rollout_ref.model.lora.target_modules" in conversion.open()


def test_values_that_refer_to_others_have_their_values(tmp_path: Path) -> None:
    options = {
        "data.max_response_length": "${oc.select:shared.length,256}",
        f"{ROLLOUT}n": "${oc.select:actor_rollout_ref.actor.rollout_n,4}",
        f"{ROLLOUT}name": "???",
        f"{ROLLOUT}prompt_length": "${data.max_prompt_length}",
        f"{ROLLOUT}temperature": "${.top_p}",
        f"{ROLLOUT}top_p": "${.temperature}",
        f"{ACTOR}_target_": "verl.workers.config.FSDPActorConfig",
        f"{ACTOR}rollout_n": 6,
        f"{ACTOR}grad_clip": "${oc.env:CLIP}",
    }
    conversion = converted(tmp_path, with_options(VERL, options))
    found = hyperparameters(conversion)
    assert (found["max_completion_length"], found["num_generations"]) == (256, 6)
    assert "temperature" not in found, "a circle is no value"
    listed = verdicts(conversion)
    assert f"{ROLLOUT}name" not in listed
    assert f"{ACTOR}_target_" not in listed
    assert isinstance(listed[f"{ROLLOUT}prompt_length"], NoEffect)
    assert isinstance(listed[f"{ACTOR}grad_clip"], Lost), (
        "what only the machine knows is not left out silently"
    )


@pytest.mark.parametrize("estimator", ["gae", "rloo", "reinforce_plus_plus", "remax", "gdpo", None])
def test_other_estimators_of_verl_are_refused_by_name(
    tmp_path: Path, estimator: str | None
) -> None:
    with pytest.raises(
        SpecError,
        match=f'algorithm.adv_estimator: "{estimator or "gae"}": method reinforcement is GRPO',
    ):
        converted(tmp_path, with_options(VERL, {"algorithm.adv_estimator": estimator}))


def test_files_of_other_methods_are_not_taken_for_grpo(tmp_path: Path) -> None:
    for options, says in (
        (
            {"normalize_advantages": True},
            "says normalize_advantages is for RLOO, PPO or online DPO",
        ),
        ({"output_dir": "out/rloo"}, "seems to be for RLOO"),
    ):
        with pytest.raises(SpecError, match=says):
            converted(tmp_path, SIMPLE | options)
    for asked in ("dpo", "supervised"):
        with pytest.raises(SpecError, match=f"--method {asked}: the file is for reinforcement"):
            converted(tmp_path, SIMPLE, method=asked)
    with pytest.raises(
        SpecError, match="--method reinforcement: Transformers' TrainingArguments does not say"
    ):
        converted(tmp_path, {"output_dir": "out", "learning_rate": 1e-4}, method="reinforcement")


def test_a_file_of_trl_without_its_marks_is_grpos_by_its_name_or_if_asked(tmp_path: Path) -> None:
    plain = {"model_name_or_path": "base", "dataset_name": "org/data", "beta": 0.1, **LORA}
    assert (
        converted(tmp_path, plain | {"output_dir": "out/qwen-grpo"}).format.count(
            "since it says output_dir"
        )
        == 1
    )
    conversion = converted(tmp_path, plain, method="reinforcement")
    assert hyperparameters(conversion)["beta"] == 0.1
    assert conversion.body["training"]["learning_rate"] == 1e-6


def test_arguments_of_unsloth_for_grpo_keep_its_defaults(tmp_path: Path) -> None:
    body = {
        "model_name": "unsloth/Qwen3-4B",
        "max_seq_length": 4096,
        "r": 32,
        "target_modules": ["q_proj"],
        "random_state": 7,
    }
    conversion = converted(
        tmp_path,
        body | {"num_generations": 4, "max_completion_length": 1536, "max_prompt_length": 512},
    )
    assert conversion.tool == "Unsloth"
    assert conversion.body["precision"] == {"default": "nf4"}
    assert conversion.body["training"]["max_length"] == 4096
    assert hyperparameters(conversion)["num_generations"] == 4
    assert not {"max_prompt_length", "max_completion_length"} & set(conversion.open())


def test_deep_names_without_effect_stand_together(tmp_path: Path) -> None:
    text = converted(tmp_path, VERL).spec_yaml()
    assert (
        "#   actor_rollout_ref.rollout: name, tensor_model_parallel_size, gpu_memory_utilization,"
        in text
    )


def test_the_command_converts_verls_file_and_says_what_is_left(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(VERL))
    printed = ft("convert", path)
    assert printed.code == 1
    assert "2 options are not taken over" in printed.err
    assert parse_request(yaml.safe_load(printed.out)).method.type == "reinforcement"
    document = json.loads(ft("convert", path, "--json").out)
    assert document["spec"]["method"]["reinforcement"]["grader"]["type"] == "string_check"
    outcomes = {option["option"]: option["outcome"] for option in document["options"]}
    assert (outcomes["actor_rollout_ref.rollout.n"], outcomes["custom_reward_function.path"]) == (
        "taken over",
        "to do",
    )
    refused = ft("convert", path, "--gpus", "2")
    assert (
        refused.code,
        "--gpus 2: the file does not say the batch size of one GPU" in refused.err,
    ) == (64, True)
