"""What TRL, Axolotl, LLaMA-Factory and Unsloth write beside Transformers' TrainingArguments: base, adapter, format, data."""

from __future__ import annotations

import re
from typing import Any

from ft_service.convert.rules import (
    BY_LENGTH,
    NotNeeded,
    NotSupported,
    Rule,
    Source,
    Taken,
    Verdict,
    as_number,
    choice,
    means,
    micro_batch,
    needless,
    refused,
    switch,
    takes,
    unless,
    unless_off,
)
from ft_service.spec.templates import TEMPLATES

_DATA = needless("training_file names the data, in whichever format")
_ATTENTION = needless("the workers choose the attention kernel")
_NF4 = means(precision__default="nf4")
_EIGHT = "8-bit integers are not supported: the nearest is precision.default: fp8"
_FOUR = needless("precision.default: nf4 says it")
_TRACKER = refused("a server's jobs have integrations: [{type: wandb, wandb: {project: …}}]", changes_result=False)
_OTHER_FILE = "name it as validation_file"
_TARGETS = "the assistant's tokens are what is learnt; messages with weight: 0 are left out"
_TEMPLATES = {"llama3": "llama-3"}
"""Standard chat templates elsewhere → ours."""
_OPTIM = "training.optim is adamw_torch: the adapters' optimizer is small"


def _target_modules(value: Any, source: Source) -> Verdict:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return NotSupported("expected names of modules: set lora.target_modules")
    names = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names in (["all"], ["all-linear"]):
        return Taken({"lora.target_modules": "all-linear"})
    pattern = len(names) == 1 and isinstance(value, str) and re.search(r"[^\w.]", names[0])
    return Taken({"lora.target_modules": names[0] if pattern else names})


def _target_parameters(value: Any, source: Source) -> Verdict:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return NotSupported("expected names of stacks of experts: set lora.target_parameters")
    return Taken({"lora.target_parameters": value})


def _chat_template(value: Any, source: Source) -> Verdict:
    if value in ("default", "tokenizer_default"):
        return NotNeeded("it is the base's")
    name = _TEMPLATES.get(str(value), str(value))
    if name in TEMPLATES or "{{" in name or "{%" in name:
        return Taken({"chat_template": name})
    return NotSupported(f"the base's own is used; chat_template takes {', '.join(TEMPLATES)}, or a template's text")


def _share(value: Any, source: Source) -> Verdict:
    share = as_number(value)
    if not share:
        return NotNeeded("nothing is set aside here either")
    if not 0 < share < 1:
        return NotSupported(
            "it is a number of samples: set validation_split to the share that they are, or name a validation_file"
        )
    return Taken({"validation_split": share})


def _per_epoch(what: str, option: str) -> Rule:
    return unless((1, "1"), f"{what} at the end of every epoch", f"set {option} to a number of steps")


def _epochs(value: Any, source: Source) -> Verdict:
    steps = source.number("max_steps")
    if steps is not None and steps > 0:
        return NotNeeded("max_steps decides")
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    return Taken({"training.n_epochs": int(value)}) if whole else NotSupported("epochs are whole: set training.n_epochs")


def _every(names: tuple[str, ...], rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


TABLE: dict[str, Rule] = {
    **_every(("model_name_or_path", "base_model", "model_name"), takes("model")),
    **_every(("model_revision",), unless(("main",), "it is the usual one", "name the folder of that one")),
    **_every(("model_type", "tokenizer_type", "tokenizer_config", "base_model_config"), needless("its files say it")),
    "trust_remote_code": unless_off("code of a base is never run"),
    **_every(
        ("torch_dtype", "dtype"),
        choice(
            {
                "auto": needless("precision.compute is bf16 unless set"),
                **_every(("bfloat16", "bf16"), means(precision__compute="bf16")),
                **_every(("float32", "fp32"), means(precision__compute="fp32")),
            },
            refused("precision.compute is bf16 or fp32"),
        ),
    ),
    **_every(("attn_implementation", "flash_attention", "flash_attn", "sdp_attention", "xformers_attention"), _ATTENTION),
    # The adapter.
    "use_peft": unless((True,), "every job trains an adapter", "only LoRA adapters are trained"),
    "adapter": choice({"lora": needless("every job trains one"), "qlora": _NF4}, refused("adapters are LoRA or rsLoRA")),
    "finetuning_type": choice({"lora": needless("every job trains one")}, refused("only LoRA adapters are trained")),
    "stage": choice({"sft": needless("it is what jobs do")}, refused("only supervised fine-tuning is supported")),
    "full_finetuning": unless_off("only LoRA adapters are trained"),
    **_every(("lora_r", "lora_rank", "r"), takes("lora.r")),
    "lora_alpha": takes("lora.lora_alpha"),
    "lora_dropout": takes("lora.lora_dropout"),
    **_every(("lora_target_modules", "lora_target", "target_modules"), _target_modules),
    **_every(("bias", "lora_bias"), unless(("none", False), "it is so here too", "biases are not trained: leave it out")),
    "loftq_config": unless_off("adapters begin at zero: leave it out"),
    "use_gradient_checkpointing": switch(means(distributed__activation_checkpointing="full")),
    "random_state": takes("seed"),
    "lora_target_parameters": _target_parameters,
    "lora_target_linear": switch(means(lora__target_modules="all-linear")),
    **_every(("use_rslora", "peft_use_rslora"), switch(means(lora__use_rslora=True))),
    **_every(("use_dora", "peft_use_dora"), unless_off("DoRA is not supported: leave it out")),
    **_every(
        ("modules_to_save", "lora_modules_to_save", "additional_target"),
        unless_off("only adapters of linear layers are trained: leave it out"),
    ),
    "lora_task_type": unless(("CAUSAL_LM",), "it is what jobs do", "only causal language models are trained"),
    # The format of the base.
    "load_in_4bit": switch(_NF4),
    "load_in_8bit": unless_off(_EIGHT),
    "quantization_bit": choice({"4": _NF4}, refused(_EIGHT)),
    "quantization_method": choice(_every(("bnb", "bitsandbytes"), _FOUR), refused("precision.default is bf16, fp8 or nf4")),
    "bnb_4bit_quant_type": choice({"nf4": _FOUR}, refused("4-bit formats are nf4 only")),
    "bnb_4bit_compute_dtype": needless("precision.compute says it"),
    **_every(
        ("use_bnb_nested_quant", "double_quantization", "bnb_4bit_use_double_quant"), needless("precision.default says it")
    ),
    # The data.
    **_every(
        (
            *("dataset_name", "dataset_config", "dataset_dir", "dataset", "datasets", "dataset_text_field", "dataset_num_proc"),
            *("dataset_train_split", "dataset_test_split", "dataset_prepared_path", "train_file", "overwrite_cache"),
            *("preprocessing_num_workers", "dataset_processes"),
        ),
        _DATA,
    ),
    **_every(
        ("template", "chat_template"),
        _chat_template,
    ),
    "max_samples": refused("every line is trained on: shorten the file"),
    **_every(("val_set_size", "val_size"), _share),
    **_every(("eval_dataset", "test_datasets"), unless_off(_OTHER_FILE)),
    **_every(("train_on_inputs", "train_on_prompt"), switch(means(training__train_on="everything"))),
    **_every(
        ("assistant_only_loss", "completion_only_loss"), switch(needless(_TARGETS), means(training__train_on="everything"))
    ),
    **_every(("special_tokens", "eos_token", "pad_token"), unless_off("the base's tokenizer is used as it is")),
    **_every(
        ("loss_watchdog_threshold", "loss_watchdog_patience"), needless("a loss that is no number ends the job by itself")
    ),
    # Axolotl's names of TrainingArguments.
    "num_epochs": _epochs,
    "micro_batch_size": lambda value, source: micro_batch(value, source, "gradient_accumulation_steps"),
    "eval_batch_size": needless("validation uses training.tokens_per_micro_batch"),
    "optimizer": choice(
        {
            "adamw_torch": means(training__optim="adamw_torch"),
            "adamw_torch_fused": means(training__optim="adamw_torch"),
        },
        refused(_OPTIM),
    ),
    "lr_scheduler": choice(
        {name: takes("training.lr_scheduler_type") for name in ("linear", "cosine", "constant", "warmup_stable_decay")},
        refused("schedules are linear, cosine, constant and warmup_stable_decay"),
    ),
    "evals_per_epoch": _per_epoch("validation is", "training.eval_steps"),
    "saves_per_epoch": _per_epoch("a checkpoint is written", "checkpoint.save_steps"),
    "group_by_length": BY_LENGTH,
    "strict": needless("it is not about training"),
    **_every(("plot_loss", "overwrite_output_dir", "save_safetensors"), needless("the service keeps what a job leaves")),
    **_every(("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id"), _TRACKER),
}
