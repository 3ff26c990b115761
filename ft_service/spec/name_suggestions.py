"""Suggestions for unknown options: the most similar name, or our name for an option of another
tool.

The other tools are PEFT, Transformers, TRL, Axolotl, LLaMA-Factory, Unsloth and OpenAI.
`ft_service/convert/` has the details; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("base_model", "model_name_or_path", "model_name", "pretrained_model_name_or_path"), "model"
    ),
    **dict.fromkeys(
        ("train_file", "dataset", "datasets", "dataset_name", "train_data", "data"), "training_file"
    ),
    **dict.fromkeys(
        ("eval_file", "eval_dataset", "valid_file", "val_file", "validation_data"),
        "validation_file",
    ),
    **dict.fromkeys(("train_on_inputs", "train_on_prompt", "mask_history"), "training.train_on"),
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss", "train_on_responses_only"),
        "training.train_on",
    ),
    **dict.fromkeys(
        (
            "val_set_size",
            "val_size",
            "validation_share",
            "eval_split",
            "test_size",
            "split_dataset_ratio",
        ),
        "validation_split",
    ),
    "image_max_pixels": "data.max_pixels",
    "image_min_pixels": "data.min_pixels",
    **dict.fromkeys(("rank", "lora_r", "lora_rank"), "lora.r"),
    **dict.fromkeys(("alpha", "lora_alpha"), "lora.lora_alpha"),
    **dict.fromkeys(("dropout", "lora_dropout"), "lora.lora_dropout"),
    **dict.fromkeys(
        (
            "lora_target_modules",
            "lora_target",
            "lora_target_linear",
            "targets",
            "layers_to_transform",
            "target_regex",
        ),
        "lora.target_modules",
    ),
    **dict.fromkeys(("rslora", "use_rslora", "peft_use_rslora"), "lora.use_rslora"),
    **dict.fromkeys(
        ("lora_modules_to_save", "additional_target", "trained_modules"), "lora.modules_to_save"
    ),
    **dict.fromkeys(("dora", "use_dora", "peft_use_dora"), "lora.use_dora"),
    **dict.fromkeys(
        (
            "load_in_4bit",
            "quantization",
            "quantization_bit",
            "quant_bits",
            "bnb_4bit_quant_type",
            "format",
            "dtype_base",
        ),
        "precision.default",
    ),
    **dict.fromkeys(
        ("bf16", "fp16", "bfloat16", "float32", "torch_dtype", "dtype", "bnb_4bit_compute_dtype"),
        "precision.compute",
    ),
    **dict.fromkeys(("qat", "qat_scheme", "quantization_aware"), "precision.served_as"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "training.n_epochs"),
    **dict.fromkeys(("steps", "max_train_steps"), "training.max_steps"),
    **dict.fromkeys(
        ("train_batch_size", "global_batch_size", "total_batch_size"), "training.batch_size"
    ),
    **dict.fromkeys(
        ("micro_batch_size", "per_gpu_train_batch_size"), "training.per_device_train_batch_size"
    ),
    **dict.fromkeys(("gradient_accumulation_steps",), "training.batch_size"),
    **dict.fromkeys(("full_determinism", "deterministic"), "precision.deterministic_attention"),
    **dict.fromkeys(("lr", "learning_rate_init"), "training.learning_rate"),
    **dict.fromkeys(("betas", "beta1", "beta_1", "adam_beta_1"), "training.adam_beta1"),
    **dict.fromkeys(("beta2", "beta_2", "adam_beta_2"), "training.adam_beta2"),
    **dict.fromkeys(("eps", "adam_eps", "optim_eps"), "training.adam_epsilon"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "schedule"), "training.lr_scheduler_type"),
    **dict.fromkeys(
        ("min_lr_rate", "cosine_min_lr_ratio", "min_lr", "eta_min", "lr_end"),
        "training.min_lr_ratio",
    ),
    **dict.fromkeys(("warmup",), "training.warmup_ratio"),
    **dict.fromkeys(
        ("gradient_clipping", "max_gradient_norm", "clip_grad_norm"), "training.max_grad_norm"
    ),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len", "seq_length"),
        "training.max_length",
    ),
    **dict.fromkeys(("sample_packing", "neat_packing", "padding_free", "pack"), "training.packing"),
    **dict.fromkeys(("optimizer",), "training.optim"),
    **dict.fromkeys(
        ("evaluation_steps", "validation_steps", "eval_interval"), "training.eval_steps"
    ),
    **dict.fromkeys(("patience",), "training.early_stopping_patience"),
    **dict.fromkeys(
        ("num_processes", "nproc", "gpus", "num_gpus", "world_size"), "distributed.nproc_per_node"
    ),
    **dict.fromkeys(("dp_replicate_size",), "distributed.replicate"),
    **dict.fromkeys(
        (
            "context_parallel_size",
            "sequence_parallel_size",
            "sequence_parallel_degree",
            "cp_size",
            "hyper_parallel_cp_size",
        ),
        "distributed.context_parallel",
    ),
    **dict.fromkeys(("num_machines", "num_nodes", "nodes"), "distributed.nnodes"),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "checkpointing"),
        "distributed.activation_checkpointing",
    ),
    **dict.fromkeys(("torch_compile",), "distributed.compile"),
    **dict.fromkeys(("cpu_offload", "fsdp_offload_params"), "distributed.offload"),
    **dict.fromkeys(("ddp_timeout", "nccl_timeout"), "distributed.collective_timeout_seconds"),
    **dict.fromkeys(
        ("checkpoint_steps", "save_interval", "save_strategy"), "checkpoint.save_steps"
    ),
    **dict.fromkeys(("random_seed", "random_state", "data_seed"), "seed"),
    **dict.fromkeys(("name", "run_name", "output_name"), "suffix"),
}
"""Last part of a name in another tool → our dotted name."""

NO_MATCH: Mapping[str, str] = {
    "trainingType": "it chooses where, and at what price, Azure trains, and jobs here run on this "
    "service's own machines",
}
"""Name in another tool that nothing here corresponds to → what it does there. A similar name would
mislead.
"""

VALUES: Mapping[str, str] = {
    **dict.fromkeys(("int4", "4bit", "4-bit", "qlora", "q4", "nf4_double", "bnb4", "fp4"), "nf4"),
    **dict.fromkeys(("int8", "8bit", "8-bit", "float8", "q8", "e4m3"), "fp8"),
    **dict.fromkeys(("fp16", "float16", "half", "bfloat16", "16bit", "none"), "bf16"),
    **dict.fromkeys(("float32", "float"), "fp32"),
    **dict.fromkeys(("adamw", "adam", "adamw_torch_fused"), "adamw_torch"),
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_annealing"), "cosine"),
    **dict.fromkeys(("constant_with_warmup",), "constant"),
    **dict.fromkeys(("all", "all_linear", "linear"), "all-linear"),
    **dict.fromkeys(("wsd",), "warmup_stable_decay"),
    **dict.fromkeys(("sft", "finetune"), "supervised"),
    **dict.fromkeys(("grpo", "rl", "rft"), "reinforcement"),
}
"""Value in another tool, in lower case → our value, for options that accept it."""


def name_for(place: str, model: type[BaseModel]) -> str | None:
    """The option of `model` that an unknown dotted name was likely meant for; None: no name is
    similar.
    """
    section, _, last = place.rpartition(".")
    known = options_of(model)
    if not any(name.startswith(f"{section}.") for name in known) and (
        names := _names_in(model, section.split("."))
    ):
        # an entry of a list or of a mapping; other entries, of another type, may have this name
        close = (
            []
            if last in names
            else get_close_matches(last.lower(), sorted(names), n=1, cutoff=0.65)
        )
        return f"{section}.{close[0]}" if close else None
    if (meant := NAMES.get(last.lower())) in known:
        return meant
    elsewhere = [name for name in known if name.rpartition(".")[2] == last and name != place]
    if elsewhere:  # "training" has what OpenAI's hyperparameters have too
        return next((name for name in elsewhere if name.startswith("training.")), elsewhere[0])
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    siblings |= {
        name.removeprefix(f"{section}_"): known for name, known in siblings.items()
    }  # "dropuot" for lora_dropout
    anywhere = {name.rpartition(".")[2]: name for name in known}
    for names, cutoff in ((siblings, 0.65), (anywhere, 0.8)):
        if close := get_close_matches(last.lower(), names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def _names_in(kind: Any, parts: Sequence[str]) -> set[str]:
    """Names of the options at a place, of all kinds that may stand there."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(parts[0]) if parts else None
        return (
            _names_in(field.annotation, parts[1:])
            if field
            else set()
            if parts
            else set(kind.model_fields)
        )
    within = parts[1:] if get_origin(kind) in (list, dict) else parts
    return set().union(*(_names_in(inner, within) for inner in get_args(kind)))


def value_for(value: object, choices: list[str]) -> str | None:
    """The choice that an invalid value was likely meant for."""
    if not isinstance(value, str) or not choices:
        return None
    if (meant := VALUES.get(value.lower())) in choices:
        return meant
    close = get_close_matches(value.lower(), choices, n=1, cutoff=0.7)
    return close[0] if close else None


@cache
def options_of(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all options, also those of nested sections."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(f"{prefix}{name}")
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found += options_of(inner, f"{prefix}{name}.")
    return tuple(found)
