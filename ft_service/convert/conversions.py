"""Rules that need arithmetic or other options of the file. Tables name them with `rule:`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from ft_service.convert.verdicts import (
    NOT_SET,
    OFF,
    Lost,
    NoEffect,
    Refused,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Verdict,
    as_number,
    as_plain,
)
from ft_service.spec.methods import PREFERENCE_METHODS, SMOOTHED, DpoLoss, KtoLoss
from ft_service.spec.templates import TEMPLATES

# Steps and their samples
# ------------------------------------------------------------------------------

_MICRO = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")


def batch_size(value: Any, source: Source, micro: str = "") -> Verdict:
    """Micro-batch x accumulation x GPUs: training.batch_size is the number of a step's samples over
    all GPUs. `micro`: the option for the samples of a micro-batch, where it has a name of the
    tool's own.
    """
    if source.number("train_batch_size") is not None:
        return NoEffect("train_batch_size decides")
    names = (micro,) if micro else _MICRO
    size = source.number(*names) or (source.around or source).number(*names) or source.micro_batch
    rounds = source.number("gradient_accumulation_steps")
    if (
        rounds is None and size and not micro and (total := source.number("batch_size"))
    ):  # Axolotl's older name for the product of both
        rounds = total // size
    if rounds is None and size and source.least_batch:
        rounds = -(-source.least_batch // (size * (source.gpus or 1)))
    if size is None:
        return ToDo(
            f"set training.batch_size to the samples of a micro-batch x {rounds or value} x the "
            "number of your GPUs"
        )
    rounds = rounds or 1
    gpus = source.gpus
    said = (
        f"{size} x {rounds} x {gpus} GPUs"
        if gpus
        else f"{size} x {rounds} on one GPU; multiply by your number of GPUs"
    )
    return Taken({"training.batch_size": size * rounds * (gpus or 1)}, said)


def epochs(value: Any, source: Source, steps: str = "max_steps") -> Verdict:
    number = as_number(value)
    if (source.number(steps) or 0) > 0:
        return NoEffect(f"{steps} decides")
    if number is None or number != int(number):
        return ToDo("epochs are whole: set training.n_epochs, or training.max_steps")
    return Taken({"training.n_epochs": int(number)})


def positive(value: Any, source: Source, option: str) -> Verdict:
    number = as_number(value)
    if number is not None and number <= 0:
        return NOT_SET
    return Taken({option: int(number) if number is not None and number == int(number) else value})


def interval(value: Any, source: Source, option: str, *strategies: str) -> Verdict:
    """`eval_steps` and `save_steps`: integers, and only if the strategy is steps."""
    if any(source.get(name, "steps") != "steps" for name in strategies):
        return NoEffect(f"{strategies[0]} decides")
    number = as_number(value)
    if number is None or number < 1:
        return ToCheck(f"shares of all steps are not known here: set {option} to a number of steps")
    return Taken({option: int(number)})


def per_epoch(value: Any, source: Source, option: str, *needs: str) -> Verdict:
    """Validations or checkpoints per epoch.

    `needs`: options of which one must be set for them to happen.
    """
    if needs and not any(source.get(name) for name in needs):
        return NoEffect("without data for it validation does not run")
    return (
        NoEffect("it is so here too")
        if as_number(value) == 1
        else ToCheck(f"set {option} to a number of steps")
    )


# The optimizer and the schedule
# ------------------------------------------------------------------------------

_CONSTANT = NoEffect("constant does not warm up; constant_with_warmup would")


def _does_not_warm_up(source: Source) -> bool:
    return "constant" in (source.get("lr_scheduler_type"), source.get("lr_scheduler"))


def warmup(value: Any, source: Source) -> Verdict:
    steps = as_number(value)
    if _does_not_warm_up(source):
        return _CONSTANT
    if steps is None or steps < 0 or (steps >= 1 and steps != int(steps)):
        return ToDo(
            "it is a number of steps, or a share of them: set training.warmup_steps or "
            "training.warmup_ratio"
        )
    if steps >= 1:
        return Taken({"training.warmup_steps": int(steps)})
    decides = "warmup_ratio" in source and steps == 0 and source.tool != "Axolotl"
    return NoEffect("warmup_ratio decides") if decides else Taken({"training.warmup_ratio": steps})


def warmup_ratio(value: Any, source: Source) -> Verdict:
    if _does_not_warm_up(source):
        return _CONSTANT
    steps = source.get("warmup_steps")
    decides = steps is not None if source.tool == "Axolotl" else bool(as_number(steps))
    return (
        NoEffect("warmup_steps decides")
        if decides
        else Taken({"training.warmup_ratio": as_number(value)})
    )


def warmup_of_total(value: Any, source: Source) -> Verdict:
    total = source.number("scheduler.params.total_num_steps")
    steps = as_number(value)
    if total and steps is not None:
        return Taken({"training.warmup_ratio": round(steps / total, 6)})
    return ToDo(
        f"the number of steps is not in this file: set training.warmup_ratio to {value} / steps"
    )


def stable_decay(value: Any, source: Source) -> Verdict:
    """Transformers' decay is half a cosine unless it is asked for another."""
    linear = source.get("lr_scheduler_kwargs.decay_type") == "linear"
    note = (
        ""
        if linear
        else "the decay is linear here, and there a cosine unless decay_type says linear"
    )
    return Taken({"training.lr_scheduler_type": "warmup_stable_decay"}, note)


def decay_steps(value: Any, source: Source) -> Verdict:
    """The steps of warmup_stable_decay's decay, which are a share here."""
    total = source.number("max_steps") or 0
    steps = as_number(value)
    if "warmup_stable_decay" not in (source.get("lr_scheduler_type"), source.get("lr_scheduler")):
        return NoEffect("it belongs to warmup_stable_decay")
    if total > 0 and steps:
        ratio = {"training.decay_ratio": round(steps / total, 6)}
        return Taken({"training.lr_scheduler_type": "warmup_stable_decay"} | ratio)
    return ToDo(
        f"the number of steps is not in this file: set training.decay_ratio to {value} / steps"
    )


_NO_FALL = NoEffect("a constant rate does not fall")
_NO_RATE = "learning_rate is not in this file: set training.min_lr_ratio to {} / learning_rate"
_LAST_RATE = 1e-7
"""Transformers' default of the rate at which polynomial ends."""


def _rate(source: Source) -> float | None:
    return as_number(source.get("learning_rate")) or None


def min_rate(value: Any, source: Source) -> Verdict:
    """The rate at which a schedule ends, which is a share of learning_rate here."""
    least = as_number(value)
    rate = _rate(source)
    if least is None or rate is None:
        return ToDo(_NO_RATE.format(value))
    return Taken(
        {"training.min_lr_ratio": round(least / rate, 6)}, f"{value} / {source['learning_rate']}"
    )


def polynomial(value: Any, source: Source) -> Verdict:
    """Transformers' polynomial, which falls linearly to lr_end unless it has another power."""
    last = min_rate(source.get("lr_scheduler_kwargs.lr_end", _LAST_RATE), source)
    said = "with power 1 it is linear, down to lr_end"
    return Taken(
        {
            "training.lr_scheduler_type": "linear",
            **(last.options if isinstance(last, Taken) else {}),
        },
        said,
    )


def cycles(value: Any, source: Source) -> Verdict:
    """How often a cosine falls: 1 is once for cosine_with_restarts, and half a period for
    others.
    """
    restarts = "cosine_with_restarts" in (
        source.get("lr_scheduler_type"),
        source.get("lr_scheduler"),
    )
    once = as_number(value) == (1 if restarts else 0.5)
    return (
        NoEffect("it falls once here too")
        if once
        else Lost("the cosine falls once here: leave it out")
    )


def min_rate_of_cosine(value: Any, source: Source) -> Verdict:
    """verl's min_lr_ratio, which its constant rate does not read."""
    names = ("lr_scheduler_type", "warmup_style")
    is_cosine = any(
        source.get(f"actor_rollout_ref.actor.optim.{name}") == "cosine" for name in names
    )
    return (
        Taken({"training.min_lr_ratio": value})
        if is_cosine and as_plain(value) not in OFF
        else _NO_FALL
    )


def betas(value: Any, source: Source) -> Verdict:
    """AdamW's two betas in one list."""
    numbers = [as_number(beta) for beta in value] if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        return ToDo("they are two numbers: set training.adam_beta1 and training.adam_beta2")
    return Taken(dict(zip(("training.adam_beta1", "training.adam_beta2"), numbers, strict=True)))


# The adapter and the base
# ------------------------------------------------------------------------------


_NO_LINEAR_LAYERS = (
    "lm_head",
    "embed_out",
    "output",
    "embed_tokens",
    "embed_in",
    "wte",
    "word_embeddings",
    "embedding",
)
"""Ends of names of output heads and embeddings, which "all-linear" does not have."""


def target_modules(value: Any, source: Source) -> Verdict:
    names = [value] if isinstance(value, str) else value
    if as_plain(source.get("lora_target_linear")) is True:
        ends = [str(name).rpartition(".")[2] for name in names] if isinstance(names, list) else []
        if beside := [name for name in ends if name in _NO_LINEAR_LAYERS]:
            return Lost(
                "embeddings and output heads get no LoRA matrices, only linear layers do: "
                f"{', '.join(beside)}"
            )
        return NoEffect("lora_target_linear has all of them")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return ToDo("expected names of modules: set lora.target_modules")
    names = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names in (["all"], ["all-linear"]):
        return Taken({"lora.target_modules": "all-linear"})
    pattern = len(names) == 1 and isinstance(value, str) and re.search(r"[^\w.]", names[0])
    return Taken({"lora.target_modules": names[0] if pattern else names})


def modules_to_save(value: Any, source: Source) -> Verdict:
    if not value:
        return NoEffect("there are none")
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ToDo("expected names of modules: set lora.modules_to_save")
    return Taken({"lora.modules_to_save": [name.strip() for name in names if name.strip()]})


def target_parameters(value: Any, source: Source) -> Verdict:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return ToDo("expected names of stacks of experts: set lora.target_parameters")
    return Taken({"lora.target_parameters": value})


def twice_rank(value: Any, source: Source) -> Verdict:
    return Taken({"lora.lora_alpha": 2 * (source.number("lora_rank") or 8)})


ALL_WEIGHTS = (
    "THIS TRAINS ALL WEIGHTS THERE, and here a LoRA adapter: choose lora.r, and a learning rate "
    "about ten times as high, as "
    "LoRA needs it"
)
_BUILDER = re.compile(r"(q?)(lora|dora)_")
_TUNE_NAMES = {"output_proj": "o_proj"}
"""torchtune's names of modules → Hugging Face's."""


def torchtune_model(value: Any, source: Source) -> Verdict:
    """The function that builds torchtune's model.

    Those of lora_…, dora_…, qlora_… and qdora_… have adapters.
    """
    builder = _BUILDER.match(str(value).rpartition(".")[2])
    if builder is None:
        return Lost(ALL_WEIGHTS)
    taken = ({"precision.default": "nf4"} if builder[1] else {}) | (
        {"lora.use_dora": True} if builder[2] == "dora" else {}
    )
    return Taken(taken) if taken else NoEffect("every job trains an adapter")


def torchtune_modules(value: Any, source: Source) -> Verdict:
    """torchtune's modules with adapters: those of attention, and by two switches the feed-forward's
    and the output head.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return ToDo("expected names of modules: set lora.target_modules")
    names = [_TUNE_NAMES.get(name, name) for name in value]
    if as_plain(source.get("model.apply_lora_to_mlp")) is True:
        names += ["gate_proj", "up_proj", "down_proj"]
    if as_plain(source.get("model.apply_lora_to_output")) is True:
        names.append("lm_head")
    return Taken(
        {"lora.target_modules": names}, "Hugging Face's names, for Llama, Mistral, Qwen and Gemma"
    )


def eight_bits(value: Any, source: Source) -> Verdict:
    """A base in 8-bit integers."""
    if as_plain(value) in OFF:
        return NoEffect("it is off here too")
    return ToCheck(
        "the base is kept in bf16 here, which is nearer to the original; precision.default: fp8 "
        "takes as little memory"
    )


_COMPUTE = {"bf16": "bf16", "bfloat16": "bf16", "no": "fp32", "fp32": "fp32", "float32": "fp32"}
_NOT_SCALED = (
    "there is not loss scaling here: bf16, with fp32 masters of what is trained, is the default"
)


def compute_dtype(value: Any, source: Source) -> Verdict:
    name = "no" if as_plain(value) is False else str(value).lower().removeprefix("torch.")
    if name in _COMPUTE:
        return Taken({"precision.compute": _COMPUTE[name]})
    if name in ("fp16", "float16"):
        return Lost(_NOT_SCALED)
    return Lost(
        "precision.compute is bf16 or fp32, and precision.default: fp8 stores and gathers the "
        "frozen weights in FP8"
    )


def dtype_policy(value: Any, source: Source) -> Verdict:
    """`mixed_precision_policy`: a name, or a mapping with `param_dtype`."""
    return compute_dtype(value.get("param_dtype") if isinstance(value, dict) else value, source)


def dtype(value: Any, source: Source) -> Verdict:
    """The type of the base's weights in memory; bf16 or fp16, if given, decide the type of
    computation.
    """
    if (
        str(value) == "auto"
        or as_plain(source.get("bf16")) is True
        or (source.tool == "TRL" and not source.get("fp16"))
    ):
        return NoEffect(
            "precision.default says how weights are stored, and precision.compute in what they "
            "multiply"
        )
    return compute_dtype(value, source)


def bf16(value: Any, source: Source) -> Verdict:
    if as_plain(value) is True or str(value).lower() == "full":  # Axolotl's
        return Taken({"precision.compute": "bf16"})
    if str(value).lower() == "auto":  # of the machine that trains, which is not this one
        return NoEffect(
            "precision.compute is bf16 unless set, where the processor has instructions for it"
        )
    if as_plain(source.get("fp16")) is True:
        return NoEffect("fp16 decides")
    return Taken({"precision.compute": "fp32"})


# What is learned, and the rows of a batch
# ------------------------------------------------------------------------------

_ANSWERS_ONLY = ("assistant_only_loss", "completion_only_loss", "train_on_responses_only")


def _is_on(source: Source, *names: str) -> bool:
    return any(as_plain(source.get(name)) not in OFF for name in names)


def learned(value: Any, source: Source) -> Verdict:
    """TRL's two options, and Unsloth's: if one is on only answers are learned, whatever the others
    say.
    """
    if _is_on(source, *_ANSWERS_ONLY):
        return NoEffect(
            "the assistant's tokens are what is learnt; messages with weight: 0 are left out"
        )
    return Taken({"training.train_on": "everything"})


def _learns_whole(source: Source) -> bool:
    """Whether samples are learned as a whole, which are documents here."""
    if source.method != "supervised":
        return False
    if _is_pretraining(source):
        return True
    if source.tool == "ms-swift":
        return source.get("loss_scale") == "all"
    if source.tool in ("TRL", "Unsloth"):
        return not _is_on(source, *_ANSWERS_ONLY)
    data = source.get("datasets")
    kinds = (
        [one.get("type") if isinstance(one, Mapping) else None for one in data]
        if isinstance(data, list)
        else []
    )
    return _is_on(source, "train_on_inputs", "train_on_prompt", "dataset.train_on_input") or (
        bool(kinds) and all(kind == "completion" for kind in kinds)
    )


def _is_pretraining(source: Source) -> bool:
    """Whether it is LLaMA-Factory's training on plain text, which packs unless it says
    otherwise.
    """
    return source.get("stage") == "pt"


def packing(value: Any, source: Source) -> Verdict:
    """A packed row counts as one sample of a batch there, and here only if it holds documents."""
    if as_plain(value) in OFF and not _learns_whole(source):
        return NoEffect(
            "samples are packed without seeing each other: results are those of padded ones"
        )
    if source.method == "supervised" and not _learns_whole(source):
        return ToDo(
            "a packed row counted as one sample of the batch there, and here every sample in it "
            "counts: multiply "
            "training.batch_size by the samples that fill a row (training.max_length by their "
            "mean length in `ft data stats`)"
        )
    return Taken({"training.packing": as_plain(value) not in OFF})


def unpacked(value: Any, source: Source) -> Verdict:
    """The tools' default, which is stated for documents: packed ones count as rows in a batch."""
    return (
        Taken({"training.packing": False})
        if _learns_whole(source) and not _is_pretraining(source)
        else NOT_SET
    )


# Preferences
# ------------------------------------------------------------------------------

_LOSSES = (
    f"for losses on pairs, dpo has {', '.join(get_args(DpoLoss))}, and sft as rpo_alpha in addition"
)
_TRL_DROPOUT = 0.05
"""Of ModelConfig."""
_OTHER_METHODS = ("kto", "simpo", "orpo", "cpo", "kto_pair", "apo_zero_unpaired")
_KTO_LOSSES = " and ".join(get_args(KtoLoss))
_KTO_LOSS = "method.kto.hyperparameters.loss_type"


def adapter_dropout(value: Any, source: Source) -> Verdict:
    """DPO's and KTO's trainers set every dropout to 0, the adapter's too, unless disable_dropout is
    false.

    None: TRL's default.
    """
    of_answers = source.method in PREFERENCE_METHODS
    if of_answers and as_plain(source.get("disable_dropout", True)) is not False:
        return NoEffect(
            f"in {str(source.method).upper()} {source.tool} turns all dropout off, unless disable_dropout says false"
        )
    return Taken({"lora.lora_dropout": _TRL_DROPOUT if value is None else value})


def dpo_loss(value: Any, source: Source, weights: str) -> Verdict:
    """TRL's loss_type: one loss, or one loss and "sft", whose weight is rpo_alpha here; or
    KTO's.
    """
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    if source.method == "kto":
        known = len(names) == 1 and names[0] in get_args(KtoLoss)
        return Taken({_KTO_LOSS: names[0]}) if known else Lost(f"KTO here has {_KTO_LOSSES}")
    if source.method in ("simpo", "orpo"):
        return NoEffect("the method says it")
    if source.method != "dpo":
        plain = names in (["nll"], ["chunked_nll"])
        return (
            NoEffect("it is the mean cross entropy")
            if plain
            else Lost("the loss is plain cross entropy: leave it out")
        )
    if other := next((name for name in names if name in _OTHER_METHODS), None):
        return Refused(f"{other} is not dpo: {_LOSSES}")
    first, *more = names or [""]
    wrong = as_number(source.get("label_smoothing") or source.get("dpo_label_smoothing") or 0)
    if first == "robust" and not wrong:
        first = "sigmoid"  # the same without wrong labels
    given = source.get(weights)
    shares = (
        [as_number(weight) for weight in given] if isinstance(given, list) else [1.0] * len(names)
    )
    if (
        first not in get_args(DpoLoss)
        or more not in ([], ["sft"])
        or shares[:1] != [1.0]
        or len(shares) != len(names)
    ):
        return Lost(_LOSSES)
    taken: dict[str, Any] = {"method.dpo.hyperparameters.loss_type": first}
    if first == "robust":  # one is not valid without the other
        taken["method.dpo.hyperparameters.label_smoothing"] = wrong
    return Taken(taken | {"method.dpo.hyperparameters.rpo_alpha": shares[1]} if more else taken)


def no_cpo(value: Any, source: Source) -> Verdict:
    """CPO's weight of the cross entropy of preferred answers, 1 there unless it is given; SimPO has
    none.
    """
    if as_number(value) == 0:
        return NoEffect("SimPO has no supervised term here")
    return Lost("SimPO has no supervised term here, which CPO weights by it: orpo has one")


def pair_method(value: Any, source: Source, loss: str) -> Verdict:
    """LLaMA-Factory's stage dpo, which is SimPO or ORPO by the option `loss`."""
    named = str(source.get(loss))
    return Taken({"method.type": named if named in ("simpo", "orpo") else "dpo"})


def smoothing(value: Any, source: Source, loss: str = "") -> Verdict:
    """The share of wrong labels, for the losses that read it. `loss`: the option that names the
    loss; empty: it is sigmoid.
    """
    given = source.get(loss, "sigmoid") if loss else "sigmoid"
    first = given[0] if isinstance(given, list) and given else given
    if first not in SMOOTHED:
        return NoEffect(f"{first} does not read it")
    if first == "robust":
        return NoEffect(f"{loss} takes it over")
    return Taken({"method.dpo.hyperparameters.label_smoothing": value})


# The data
# ------------------------------------------------------------------------------


def share(value: Any, source: Source) -> Verdict:
    part = as_number(value)
    if part is not None and part <= 0:
        return NoEffect("nothing is set aside here either")
    if part is None or part >= 1:
        return ToDo(
            "it is a number of samples: set validation_split to the share that they are, or name "
            "a validation_file"
        )
    return Taken({"validation_split": part})


def needs_validation(value: Any, source: Source, option: str) -> Verdict:
    """Options that use the validation loss, which a SPEC accepts only with validation data."""
    part = as_number(source.get("val_set_size") or source.get("val_size")) or 0
    if 0 < part < 1:
        here = value if isinstance(value, int) and not isinstance(value, bool) else True
        return Taken({option: here, "validation_split": part})
    return ToDo(f"set {option}, with a validation_file or validation_split")


_STANDARD = {"llama3": "llama-3"}
"""Other tools' names of standard chat templates → ours."""


def chat_template(value: Any, source: Source) -> Verdict:
    name = _STANDARD.get(str(value), str(value))
    if name in ("tokenizer_default", "jinja", "default"):
        return NoEffect("it is the base's, or the template that is given")
    if name in TEMPLATES or "{{" in name or "{%" in name:
        return Taken({"chat_template": name})
    return base_template(value, source)


def template_with_system(value: Any, source: Source) -> Verdict:
    """A template that begins chats without a system prompt with one of its own, as that of the same
    name here does not.
    """
    if source.get("default_system"):
        return chat_template(value, source)
    return ToDo(
        f"chats without a system prompt begin with {source.tool}'s own there: write it into the "
        "data, "
        f"and set chat_template: {value}"
    )


def base_template(value: Any, source: Source) -> Verdict:
    """A template that is not one of those here."""
    return ToCheck(
        f"the base's own chat template is used, of which {source.tool}'s is a copy: compare what "
        "`ft data show` prints. "
        f"Else chat_template takes {', '.join(TEMPLATES)}, or a template's text"
    )


# Around training
# ------------------------------------------------------------------------------

_KERNELS = ("cut_cross_entropy", "liger", "kernels", "swanlab", "expert_parallel")


def plugins(value: Any, source: Source) -> Verdict:
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    other = [name for name in names if not any(known in name.lower() for known in _KERNELS)]
    if other:
        return Lost(
            f"{', '.join(other)}: plugins are not run, and it may change what is learnt: leave it "
            "out"
        )
    return NoEffect("kernels are chosen by the workers, and compute the same")


def tracker(value: Any, source: Source) -> Verdict:
    names = [value] if not isinstance(value, list) else value
    if all(as_plain(name) in OFF for name in names):
        return NoEffect("every step is reported, in the job's events and in metrics.csv")
    if names == ["tensorboard"]:
        return Taken({"integrations": [{"type": "tensorboard"}]})
    return ToCheck(
        "metrics are in metrics.csv, in the job's events and at /metrics. For Weights & Biases a "
        "server's jobs have "
        "integrations: [{type: wandb, wandb: {project: …}}]; mlflow and trackio go the same way"
    )


def timeout(value: Any, source: Source) -> Verdict:
    seconds = as_number(value)
    if seconds is None:
        return NOT_SET
    taken = min(max(int(seconds), 10), 1800)
    return Taken(
        {"distributed.collective_timeout_seconds": taken},
        "" if taken == seconds else f"{seconds:.0f} there, 10 to 1800 seconds here",
    )


# Machines and sharding
# ------------------------------------------------------------------------------


def processes(value: Any, source: Source) -> Verdict:
    """`num_processes` is the number over all machines, nproc_per_node that of one machine."""
    total = source.number("num_processes")
    machines = source.number("num_machines") or 1
    if total is None or total % machines:
        return ToDo(
            f"it must be a multiple of num_machines = {machines}: set distributed.nproc_per_node"
        )
    return Taken({"distributed.nproc_per_node": total // machines})


def machines(value: Any, source: Source) -> Verdict:
    return (
        NoEffect("one host is the default")
        if as_number(value) == 1
        else Taken({"distributed.nnodes": value})
    )


def replicas(value: Any, source: Source) -> Verdict:
    return (
        NoEffect("all ranks shard")
        if as_number(value) in (None, 1)
        else Taken({"distributed.replicate": value})
    )


def zero_stage(value: Any, source: Source) -> Verdict:
    """DeepSpeed's stages: 3 shards everything, 1 and 2 keep whole weights on each rank, 0 keeps
    everything.
    """
    stage = as_number(value)
    if stage == 3:
        inner = source.number("zero_optimization.zero_hpz_partition_size") or 1
        return Taken({"distributed.reshard_after_forward": inner if inner > 1 else True})
    if stage in (1, 2):
        return Taken(
            {"distributed.reshard_after_forward": False},
            "weights stay gathered from forward to backward",
        )
    if stage == 0:
        return Taken({"distributed.replicate": -1}, "every rank keeps the whole base")
    return ToCheck("such a ZeRO stage is not known")


def offload_device(value: Any, source: Source) -> Verdict:
    if str(value).lower() == "cpu":
        return Taken({"distributed.offload": True})
    if as_plain(value) in OFF:
        return NoEffect("it is off here too")
    return ToCheck(
        "only the CPU's memory can be offloaded to; adapters and their optimizer are small"
    )


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_MIN_PARAMS = 100_000_000
"""Accelerate's default size for wrapping by size."""


def strategy(value: Any, source: Source) -> Verdict:
    """FSDP1's sharding strategy (a name, or a number from 1), or FSDP2's bool."""
    plain = as_plain(value)
    if isinstance(plain, bool):
        return Taken({"distributed.reshard_after_forward": plain})
    text = str(plain)
    name = _STRATEGIES[int(text) - 1] if re.fullmatch("[1-5]", text) else text.upper()
    if name == "NO_SHARD":
        return Taken({"distributed.replicate": -1}, "every rank keeps the whole base")
    if name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return Taken({"distributed.reshard_after_forward": name == "FULL_SHARD"})
    if name not in _STRATEGIES:
        return ToCheck(f"such a sharding strategy is not known: one of {', '.join(_STRATEGIES)}")
    # Sharded inside a machine, replicated between machines.
    machines = source.number("num_machines")
    if machines is None:
        return ToCheck(
            "this file does not say on how many machines: set distributed.replicate to that number"
        )
    also = {"distributed.reshard_after_forward": name == "HYBRID_SHARD"}
    if machines == 1:
        return Taken(also, "there is one machine only")
    return Taken({"distributed.replicate": machines, **also}, "one copy a machine")


def wrap_by_size(value: Any, source: Source) -> Verdict:
    given = [as_number(size) for name, size in source.items() if name.endswith("min_num_params")]
    return Taken(
        {"distributed.wrap": {"min_params": int(given[0] if given and given[0] else _MIN_PARAMS)}}
    )


def ignored_modules(value: Any, source: Source) -> Verdict:
    """A pattern of modules there, of weights here."""
    if not isinstance(value, str):
        return ToCheck(
            "modules that Python code chose do not have names here: write patterns into "
            "distributed.ignored"
        )
    return Taken({"distributed.ignored": [rf"(?:{value})\..*"]})


def legacy_fsdp(value: Any, source: Source) -> Verdict:
    """`fsdp` of TrainingArguments: a bool, or the older list of words."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    if isinstance(as_plain(value), bool) or not words:
        return NoEffect("training is always sharded over all ranks")
    taken: dict[str, Any] = {}
    for word in words:
        if word == "offload":
            taken["distributed.offload"] = True
        elif word != "auto_wrap":
            verdict = strategy(word, source)
            if not isinstance(verdict, Taken):
                return verdict
            taken.update(verdict.options)
    return Taken(taken) if taken else NoEffect("each decoder layer is one group")
