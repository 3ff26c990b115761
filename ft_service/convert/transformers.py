"""Transformers' TrainingArguments, and a `fsdp_config` file of its own."""

from __future__ import annotations

from typing import Any

from ft_service.convert.accelerate import TABLE as ACCELERATE
from ft_service.convert.adapters import TABLE as ADAPTERS
from ft_service.convert.deepspeed import TABLE as DEEPSPEED
from ft_service.convert.fsdp import strategy, with_prefix
from ft_service.convert.rules import (
    BY_LENGTH,
    NotNeeded,
    NotSupported,
    Rule,
    Source,
    Taken,
    Verdict,
    as_number,
    as_plain,
    choice,
    means,
    micro_batch,
    needless,
    refused,
    samples_per_step,
    switch,
    takes,
    unless,
    unless_off,
)

KNOWN_VERSION = "5.23.0"

_WHERE = needless("the service keeps what a job leaves in its own directories")
_LOGGING = needless("every step is reported, in the job's events and in metrics.csv")
_TRACKERS = refused(
    "metrics are in metrics.csv, in the job's events and at /metrics: read them from there. For Weights & Biases a server's "
    "jobs have integrations: [{type: wandb, wandb: {project: …}}]; mlflow and trackio go the same way",
    changes_result=False,
)
_HUB = unless_off("a job publishes nothing: `ft export ID --format peft --push hf://ORG/NAME` does", changes_result=False)
_DDP = needless("it belongs to DistributedDataParallel; training is sharded by FSDP2")
_LOADER = needless("tokens are in memory before the first step")
_COLUMNS = needless("a data file's columns are known by their names")
_EVALUATION = needless("validation reports the mean loss and accuracy over all target tokens")
_PRECISE = needless("validation computes as training does")
_FP16 = unless_off("there is no loss scaling here: bf16, with fp32 masters of what is trained, is the default")
_SCRIPT = needless("there is no training script")
_ADAM = "only AdamW with betas (0.9, 0.999) and eps 1e-8: leave it out"
_PACKING = switch(
    means(training__packing=True), needless("samples are packed without seeing each other: results are those of padded ones")
)
_CHECKPOINTING = switch(means(distributed__activation_checkpointing="full"))


def _tracker(value: Any) -> Rule:
    if value in ([], ["none"]):
        return _LOGGING
    return means(integrations=[{"type": "tensorboard"}]) if value in ("tensorboard", ["tensorboard"]) else _TRACKERS


def _positive(name: str) -> Rule:
    def pick(value: Any, source: Source) -> Verdict:
        number = as_number(value)
        if number is not None and number <= 0:
            return NotNeeded("it is not set")
        whole = number is not None and number == int(number)
        return Taken({name: int(number) if whole and number is not None else value})

    return pick


def _timeout(value: Any, source: Source) -> Verdict:
    seconds = as_number(value)
    if seconds is None:
        return NotNeeded("it is not set")
    taken = min(max(int(seconds), 10), 1800)
    return Taken({"distributed.collective_timeout_seconds": taken}, "" if taken == seconds else "10 to 1800 seconds")


def _epochs(value: Any, source: Source) -> Verdict:
    number, steps = as_number(value), source.number("max_steps")
    if steps is not None and steps > 0:
        return NotNeeded("max_steps decides")
    if number is None or number != int(number):
        return NotSupported("epochs are whole: set training.n_epochs, or training.max_steps")
    return Taken({"training.n_epochs": int(number)})


def _warmup(value: Any, source: Source) -> Verdict:
    steps = as_number(value)
    if steps is None or steps < 0 or (steps >= 1 and steps != int(steps)):
        return NotSupported("it is a number of steps, or a share of them: set training.warmup_steps or training.warmup_ratio")
    if steps >= 1:
        return Taken({"training.warmup_steps": int(steps)})
    decides = "warmup_ratio" in source and steps == 0
    return NotNeeded("warmup_ratio decides") if decides else Taken({"training.warmup_ratio": steps})


def _warmup_ratio(value: Any, source: Source) -> Verdict:
    steps = as_number(source.get("warmup_steps"))
    return NotNeeded("warmup_steps decides") if steps else Taken({"training.warmup_ratio": value})


def _interval(name: str, strategy_option: str) -> Rule:
    """Options for `eval_steps` and `save_steps`: whole numbers, and only where the strategy goes by steps."""

    def pick(value: Any, source: Source) -> Verdict:
        if source.get(strategy_option) not in (None, "steps"):
            return NotNeeded(f"{strategy_option} decides")
        number = as_number(value)
        if number is None or number < 1:
            return NotSupported(f"shares of all steps are not known here: set {name} to a number of steps")
        return Taken({name: int(number)})

    return pick


def _bf16(value: Any, source: Source) -> Verdict:
    if as_plain(value) is True or str(value).lower() == "full":  # Axolotl's
        return Taken({"precision.compute": "bf16"})
    if str(value).lower() == "auto":  # of the machine that trains, which is not this one
        return NotNeeded("precision.compute is bf16 unless set")
    if as_plain(source.get("fp16")) is True:
        return NotNeeded("fp16 decides")
    return Taken({"precision.compute": "fp32"})


def _legacy_fsdp(value: Any, source: Source) -> Verdict:
    """Options for `fsdp`: a truth value, or the older list of words."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    if isinstance(as_plain(value), bool) or not words:
        return NotNeeded("training is always sharded over all ranks")
    taken: dict[str, Any] = {}
    for word in words:
        if word == "offload":
            taken["distributed.offload"] = True
        elif word != "auto_wrap":
            verdict = strategy(word, source)
            if not isinstance(verdict, Taken):
                return verdict
            taken.update(verdict.options)
    return Taken(taken) if taken else NotNeeded("each decoder layer is one group")


def _inside(section: str, rule: Rule) -> Rule:
    """A rule of a separate file, where that file is a section of this one."""

    def pick(value: Any, source: Source) -> Verdict:
        inner = {name.removeprefix(section): given for name, given in source.items() if name.startswith(section)}
        return rule(value, Source(inner))

    return pick


def _every(names: tuple[str, ...], rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


TABLE: dict[str, Rule] = {
    **ADAPTERS,
    "output_dir": _WHERE,
    "per_device_train_batch_size": lambda value, source: micro_batch(value, source, "gradient_accumulation_steps"),
    **_every(("packing", "padding_free", "neat_packing", "sample_packing"), _PACKING),
    **_every(("eval_packing", "eval_sample_packing"), needless("validation packs as training does")),
    "packing_strategy": needless("samples are packed whole, and those of one step only"),
    **_every(("pad_to_sequence_len", "pad_to_multiple_of"), needless("packed rows are not padded")),
    **_every(("max_length", "max_seq_length", "cutoff_len", "sequence_len"), takes("training.max_length")),
    "num_train_epochs": _epochs,
    "max_steps": _positive("training.max_steps"),
    "learning_rate": takes("training.learning_rate"),
    "lr_scheduler_type": choice(
        {name: takes("training.lr_scheduler_type") for name in ("linear", "cosine", "constant", "warmup_stable_decay")}
        | {"constant_with_warmup": means(training__lr_scheduler_type="constant")},
        refused("schedules are linear, cosine, constant and warmup_stable_decay"),
    ),
    "lr_scheduler_kwargs": unless_off("schedules have no further options: leave it out"),
    "lr_scheduler_kwargs.*": refused("schedules have no further options: leave it out"),
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio,
    "optim": choice(
        {"adamw_torch": takes("training.optim"), "adamw_torch_fused": means(training__optim="adamw_torch")},
        refused("training.optim is adamw_torch: the adapters' optimizer is small"),
    ),
    "optim_args": unless_off(_ADAM),
    "optim_target_modules": unless_off("GaLore and APOLLO are not supported: LoRA keeps optimizer states small"),
    "weight_decay": takes("training.weight_decay"),
    "adam_beta1": unless((0.9,), "it is the same here", _ADAM),
    "adam_beta2": unless((0.999,), "it is the same here", _ADAM),
    "adam_epsilon": unless((1e-8, "1e-8", "1e-08"), "it is the same here", _ADAM),
    "gradient_accumulation_steps": lambda value, source: samples_per_step(
        value, source, "micro_batch_size" if "micro_batch_size" in source else "per_device_train_batch_size"
    ),
    "average_tokens_across_devices": unless(
        (True,), "every step's loss is the mean over all its target tokens", "it always is"
    ),
    "max_grad_norm": takes("training.max_grad_norm"),
    "label_smoothing_factor": unless_off("the loss is plain cross entropy: leave it out"),
    "bf16": _bf16,
    "fp16": _FP16,
    "bf16_full_eval": _PRECISE,
    "fp16_full_eval": _FP16,
    "tf32": needless("products run in precision.compute"),
    "activation_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing": _CHECKPOINTING,
    **_every(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        unless_off("whole decoder layers are recomputed, without reentrance: leave it out"),
    ),
    **_every(
        ("activation_checkpointing_kwargs.*", "gradient_checkpointing_kwargs.*"),
        refused("whole decoder layers are recomputed, without reentrance: leave it out"),
    ),
    **_every(
        ("activation_checkpointing_kwargs.use_reentrant", "gradient_checkpointing_kwargs.use_reentrant"),
        needless("it never is"),
    ),
    "torch_compile": switch(means(distributed__compile=True)),
    "torch_compile_backend": ACCELERATE["dynamo_config.dynamo_backend"],
    "torch_compile_mode": ACCELERATE["dynamo_config.dynamo_mode"],
    "use_liger_kernel": unless_off("no other kernels are patched in: leave it out", changes_result=False),
    "liger_kernel_config": unless_off("no other kernels are patched in: leave it out", changes_result=False),
    "liger_kernel_config.*": refused("no other kernels are patched in: leave it out"),
    "use_cache": needless("nothing is generated while training"),
    "neftune_noise_alpha": takes("training.neftune_noise_alpha"),
    "loraplus_lr_ratio": takes("training.loraplus_lr_ratio"),
    "torch_empty_cache_steps": needless("layers are gathered into memory that is used again"),
    "auto_find_batch_size": needless("training.tokens_per_micro_batch: auto takes what fits"),
    **_every(
        (
            *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
            *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "run_name", "logging_dir"),
        ),
        _LOGGING,
    ),
    "report_to": choice({"none": _LOGGING}, lambda value, source: _tracker(value)(value, source)),
    **_every(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), needless("no tracker is used")),
    "eval_strategy": choice(
        {
            "no": refused("validation runs whenever there is a validation_file: leave that out"),
            "epoch": needless("without training.eval_steps it is at the end of every epoch"),
            "steps": needless("training.eval_steps decides"),
        },
        refused("validation runs every training.eval_steps steps, or at the end of every epoch"),
    ),
    "eval_steps": _interval("training.eval_steps", "eval_strategy"),
    "eval_delay": unless_off("validation starts with the first interval: leave it out"),
    "per_device_eval_batch_size": needless("validation uses training.tokens_per_micro_batch"),
    "eval_on_start": unless_off("the first validation is after the first interval: leave it out"),
    **_every(
        (
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
            *("include_for_metrics", "batch_eval_metrics"),
        ),
        _EVALUATION,
    ),
    "save_only_model": unless_off("checkpoints always hold what a resume needs; it is small"),
    "save_strategy": choice(
        {
            "steps": needless("checkpoint.save_steps decides"),
            "epoch": needless("without checkpoint.save_steps it is at the end of every epoch"),
            "no": refused("there is at least one checkpoint an epoch: leave it out"),
            "best": means(checkpoint__keep_best=True),
        },
        refused("checkpoints are written every checkpoint.save_steps steps, or at the end of every epoch"),
    ),
    "save_steps": _interval("checkpoint.save_steps", "save_strategy"),
    "save_on_each_node": _WHERE,
    "save_total_limit": takes("checkpoint.save_total_limit"),
    "enable_jit_checkpoint": needless("SIGTERM always checkpoints and leaves"),
    **_every(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_always_push", "hub_revision"),
        _HUB,
    ),
    "hub_strategy": needless("a job publishes nothing"),
    "load_best_model_at_end": switch(means(training__load_best_model_at_end=True)),
    "metric_for_best_model": unless(
        (None, "loss", "eval_loss"), "it is validation loss", "it is validation loss: leave it out"
    ),
    "greater_is_better": unless((None, False), "it is validation loss", "it is validation loss: leave it out"),
    "ignore_data_skip": unless_off("a resume goes on with the very next sample"),
    "restore_callback_states_from_checkpoint": needless("there are no callbacks; a resume restores everything"),
    "full_determinism": needless("on CPUs kernels are deterministic; nothing random depends on the number of ranks"),
    "seed": takes("seed"),
    "data_seed": unless_off("one seed decides adapters and order: seed"),
    "use_cpu": needless("GPUs are used where there are any"),
    "accelerator_config": unless_off("write its options out, or convert Accelerate's own file"),
    "accelerator_config.*": needless("batches are split over ranks by the worker itself"),
    "parallelism_config": unless_off("write its options out, or convert Accelerate's own file"),
    "dataloader_drop_last": unless_off("every sample is used once an epoch; the last batch may be smaller"),
    **_every(
        (
            *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("dataloader_multiprocessing_context", "dataloader_in_order"),
        ),
        _LOADER,
    ),
    "remove_unused_columns": _COLUMNS,
    "label_names": _COLUMNS,
    "length_column_name": _COLUMNS,
    "train_sampling_strategy": choice(
        {
            "random": needless("every epoch is an order drawn from the seed"),
            "group_by_length": BY_LENGTH,
        },
        refused("every epoch is an order drawn from the seed: leave it out"),
    ),
    **_every(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), _DDP),
    "ddp_backend": needless("NCCL between GPUs, gloo between CPUs"),
    "ddp_timeout": _timeout,
    "fsdp": _legacy_fsdp,
    "fsdp_config": unless_off("it is another file: run `ft convert` on that one too"),
    "deepspeed": unless_off("it is another file: run `ft convert` on that one too"),
    "debug": needless("a loss that is not finite ends the job with its step named"),
    "skip_memory_metrics": _LOGGING,
    **_every(("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank"), _SCRIPT),
    **with_prefix("fsdp_config."),
    **{f"deepspeed.{name}": _inside("deepspeed.", rule) for name, rule in DEEPSPEED.items()},
    **{name: rule for name, rule in ACCELERATE.items() if name.startswith("parallelism_config.")},
    **{
        name.replace("parallelism_config.parallelism_config_", "parallelism_config."): rule
        for name, rule in ACCELERATE.items()
        if name.startswith("parallelism_config.parallelism_config_")
    },
}

FSDP_CONFIG: dict[str, Rule] = with_prefix("")
