"""Rules for reinforcement learning (GRPO) that need arithmetic or other options of the file.

Tables name them with `rule:`.
"""

from __future__ import annotations

import math
from typing import Any

from ft_service.convert.conversions import ALL_WEIGHTS, batch_size
from ft_service.convert.verdicts import (
    OFF,
    Lost,
    NoEffect,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Verdict,
    as_number,
    as_plain,
)

HYPERPARAMETERS = "method.reinforcement.hyperparameters."
_GROUP = 8
"""TRL's default of num_generations."""
_ANSWER = 512
"""Tokens of an answer, and of a prompt, at most: the default of TRL and of verl."""
_BATCH = 1024
_KL_WEIGHT = 0.001
"""verl's defaults of data.train_batch_size and of both weights of the KL divergence."""
_IN_ADVANTAGES = "here it is subtracted from each token's advantage"


def prompts_of_step(value: Any, source: Source) -> Verdict:
    """TRL's batch counts answers; training.batch_size counts prompts, of num_generations answers
    each.
    """
    counted = batch_size(value, source)
    if not isinstance(counted, Taken):
        return counted
    group = source.number("num_generations") or _GROUP
    prompts, rest = divmod(counted.options["training.batch_size"], max(1, group))
    if rest or not prompts:
        return ToDo(
            "training.batch_size counts prompts: set it to the answers of a step divided by "
            "num_generations. Their number is "
            f"{counted.remark}"
        )
    return Taken(
        {"training.batch_size": prompts}, f"prompts, each with {group} answers: {counted.remark}"
    )


def answer_length(value: Any, source: Source) -> Verdict:
    """Tokens of an answer at most. training.max_length, for prompt and answer, has to leave room
    for it.
    """
    if not _is_length(value):
        return ToDo(f"it is a number of tokens: set {HYPERPARAMETERS}max_completion_length")
    whole = _whole_length(source)
    remark = (
        "" if "max_prompt_length" in source or "data.max_prompt_length" in source else whole.remark
    )
    return Taken(
        {f"{HYPERPARAMETERS}max_completion_length": int(float(value)), **whole.options}, remark
    )


def prompt_length(value: Any, source: Source) -> Verdict:
    """Tokens of a prompt at most: what training.max_length leaves beside the answer.

    `value`: None: the tool's default.
    """
    if value is not None and not _is_length(value):
        return ToDo(
            "it is a number of tokens: set training.max_length to those of prompt and answer"
        )
    return _whole_length(source)


def _is_length(value: Any) -> bool:
    number = as_number(value)
    return number is not None and number >= 1 and number == int(number)


def _whole_length(source: Source) -> Taken:
    """training.max_length. Later versions of TRL do not limit prompts."""
    answer = source.number("max_completion_length", "data.max_response_length") or _ANSWER
    prompt = source.number("max_prompt_length", "data.max_prompt_length") or (
        _ANSWER if source.tool == "verl" else None
    )
    context = source.number("vllm_max_model_length", "vllm_max_model_len") or 0
    whole = source.number("max_seq_length", "max_length") or (
        answer + prompt if prompt else context
    )
    if whole > answer or prompt:
        return Taken({"training.max_length": whole}, "prompt and answer together")
    return Taken(
        {"training.max_length": max(2048, answer + 1024)},
        "room for prompt and answer: the file has no limit",
    )


def updates_of_answers(value: Any, source: Source) -> Verdict:
    """TRL's steps_per_generation: micro-batches whose answers are sampled at once."""
    rounds = source.number("gradient_accumulation_steps") or 1
    if (as_number(value) or 0) <= rounds:
        return NoEffect("all answers of a step are sampled before it")
    return Lost(
        f"answers are sampled for one step at a time, and here for {value} / {rounds} steps: "
        "leave it out"
    )


def ratio_cap(value: Any, source: Source, default_mode: str) -> Verdict:
    """The highest ratio of the trainer's probability to the sampler's.

    `default_mode`: TRL's mode if the file has none.
    """
    mode = str(source.get("vllm_importance_sampling_mode", default_mode))
    if mode == "token_truncate":
        return Taken({f"{HYPERPARAMETERS}importance_sampling_cap": as_number(value)})
    return ToCheck(
        f"it is the limit of {mode}; here each token's ratio is cut at importance_sampling_cap"
    )


def mini_batch(value: Any, source: Source) -> Verdict:
    """verl's ppo_mini_batch_size: prompts of one update, of which a step has several."""
    batch = source.number("data.train_batch_size") or _BATCH
    size = as_number(value)
    if size is None or size < 1:
        return ToDo("it is a number of prompts: set training.batch_size")
    if size >= batch:
        return NoEffect("a step is one update here too")
    return Lost(
        f"a step's {batch} prompts were trained on in {math.ceil(batch / size)} updates there, "
        "and are in one here: for as "
        f"many updates set training.batch_size: {int(size)}"
    )


def kl_weight(value: Any, source: Source, weight: str, other: str) -> Verdict:
    """verl's switches of its two penalties for leaving the model that training starts from.

    `weight`: the option that says how strong this one is; `other`: the other one's switch.
    """
    if as_plain(value) in OFF:
        return NoEffect("it is off here too")
    if as_plain(source.get(other)) not in OFF:
        return ToDo(
            f"with {other} there are two penalties: set {HYPERPARAMETERS}beta to one weight for "
            "both"
        )
    given = as_number(source.get(weight))
    strength = _KL_WEIGHT if given is None else given
    return Taken({f"{HYPERPARAMETERS}beta": strength}, f"{weight}; {_IN_ADVANTAGES}")


def lora_rank(value: Any, source: Source) -> Verdict:
    """verl's lora_rank, where 0 trains all weights, unless its section for Megatron has a rank."""
    if as_plain(value) not in OFF:
        return Taken({"lora.r": value})
    inner = source.number("actor_rollout_ref.model.lora.rank")
    return NoEffect("the section lora has the rank") if inner else Lost(ALL_WEIGHTS)


def with_rank(
    value: Any, source: Source, option: str, rank: str = "actor_rollout_ref.model.lora_rank"
) -> Verdict:
    """An option of the adapter whose rank is in `rank`, of verl's two."""
    return Taken({option: value}) if source.number(rank) else NoEffect(f"{rank} is 0")


def megatron_modules(value: Any, source: Source) -> Verdict:
    """Megatron has its own names of modules."""
    if not source.number("actor_rollout_ref.model.lora.rank"):
        return NoEffect("actor_rollout_ref.model.lora.rank is 0")
    return ToDo("these are Megatron's names of modules: name the base's own in lora.target_modules")


def group(value: Any, source: Source) -> Verdict:
    """verl's rollout.n."""
    if (as_number(value) or 0) < 2:
        return ToDo(
            f"a single answer to a prompt has no advantage: set {HYPERPARAMETERS}num_generations, "
            "which is 8 unless set"
        )
    return Taken({f"{HYPERPARAMETERS}num_generations": value})


def kl_estimator(value: Any, source: Source) -> Verdict:
    """verl's kl_loss_type. The gradient of the mean of k1 is zero; those of k2, and of all with a
    +, are the divergence's.
    """
    if as_plain(source.get("actor_rollout_ref.actor.use_kl_loss")) in OFF:
        return NoEffect("use_kl_loss is off")
    name = str(value)
    if name.endswith("+") or name in ("k2", "mse"):
        return NoEffect("its gradient is that of the KL divergence, as here")
    if name in ("k1", "kl"):
        return Lost(
            "its gradient is zero on average, and here beta has an effect: leave use_kl_loss out"
        )
    return ToCheck(
        "here the gradient is that of the KL divergence, which is nearly the same while the model "
        "has changed little"
    )


def rollout_correction(value: Any, source: Source) -> Verdict:
    """verl's correction for differences of the trainer's and the sampler's probabilities, and its
    threshold.
    """
    threshold = as_number(source.get("algorithm.rollout_correction.rollout_is_threshold", 2.0))
    if value == "token" and threshold is not None:
        return Taken(
            {f"{HYPERPARAMETERS}importance_sampling_cap": threshold}, "rollout_is_threshold"
        )
    return ToCheck("here the ratio of each token is cut at importance_sampling_cap")


def hydra_defaults(value: Any, source: Source) -> Verdict:
    """The files of which Hydra composes a config. What is not in this file has verl's defaults."""
    names = value if isinstance(value, list) else [value]
    other = [name for name in names if name not in ("ppo_trainer", "_self_")]
    if not other:
        return NoEffect("verl's own defaults are known")
    return ToDo(
        "options of other files are not in this one: convert the whole config, which Hydra writes "
        "to .hydra/config.yaml"
    )
