"""The options of FSDP as Accelerate and Transformers name them (both write them with and without the prefix `fsdp_`)."""

from __future__ import annotations

from typing import Any

from ft_service.convert.rules import (
    NotNeeded,
    NotSupported,
    Rule,
    Source,
    Taken,
    Verdict,
    as_plain,
    choice,
    means,
    needless,
    refused,
    switch,
    takes,
    unless,
    unless_off,
)

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_XLA = "PyTorch/XLA is not supported: train on CUDA GPUs or CPUs, and leave it out"


def strategy(value: Any, source: Source) -> Verdict:
    """FSDP1's sharding strategy (name, number from 1, or FSDP2's truth value)."""
    plain = as_plain(value)
    if isinstance(plain, bool):
        return Taken({"distributed.reshard_after_forward": plain})
    text = str(plain)
    name = _STRATEGIES[int(text) - 1] if text.isdigit() and 1 <= int(text) <= len(_STRATEGIES) else text.upper()
    if name not in _STRATEGIES:
        return NotSupported(f"no such sharding strategy is known: one of {', '.join(_STRATEGIES)}")
    if name == "FULL_SHARD":
        return Taken({"distributed.reshard_after_forward": True})
    if name == "SHARD_GRAD_OP":
        return Taken({"distributed.reshard_after_forward": False})
    if name == "NO_SHARD":
        return _replicated(source.number("num_processes"), "every rank keeps the whole base", {})
    groups = source.number("num_machines")
    return _replicated(
        groups,
        "sharded inside a machine, replicated between machines",
        {"distributed.reshard_after_forward": name == "HYBRID_SHARD"},
    )


def _replicated(count: int | None, meaning: str, also: dict[str, Any]) -> Verdict:
    if count is None:
        return NotSupported(f"{meaning}: this file does not say how many; set distributed.replicate to that number")
    if count == 1:
        return Taken(also, "there is one group only") if also else NotNeeded("there is one process only")
    return Taken({"distributed.replicate": count} | also, meaning)


def dtype_policy(value: Any, source: Source) -> Verdict:
    """`mixed_precision_policy`: a name, or a mapping with `param_dtype`."""
    name = value.get("param_dtype") if isinstance(value, dict) else value
    return compute_dtype(str(name).removeprefix("torch."), source)


compute_dtype: Rule = choice(
    {
        "bf16": means(precision__compute="bf16"),
        "bfloat16": means(precision__compute="bf16"),
        "no": means(precision__compute="fp32"),
        "fp32": means(precision__compute="fp32"),
        "float32": means(precision__compute="fp32"),
        "fp16": refused("there is no loss scaling here: bf16, with fp32 masters of what is trained, is the default"),
        "float16": refused("there is no loss scaling here: bf16, with fp32 masters of what is trained, is the default"),
        "fp8": refused("products run in bf16: precision.default: fp8 stores and gathers the frozen weights in FP8"),
    },
    refused("not a precision that is known: precision.compute is bf16 or fp32"),
)

_WRAP: Rule = choice(
    {
        "transformer_based_wrap": needless("each decoder layer is one group, as the architecture names it"),
        "0": needless("each decoder layer is one group, as the architecture names it"),
        "size_based_wrap": refused("the groups are the decoder layers: leave it out"),
        "no_wrap": refused("one group would gather the whole base at once: the groups are the decoder layers; leave it out"),
    },
    refused("no such wrapping policy is known; the groups are the decoder layers"),
)
_CHECKPOINTING: Rule = switch(means(distributed__activation_checkpointing=True))
_OFFLOAD: Rule = switch(means(distributed__offload=True))
_LAYERS: Rule = needless("the decoder layers are found by the architecture's own list of them")
_IN_PYTHON = needless("what it sets up in Python code is done by the worker itself")

FSDP: dict[str, Rule] = {
    "version": needless("it is FSDP2's fully_shard in any case"),
    "sharding_strategy": strategy,
    "reshard_after_forward": strategy,
    "offload_params": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "auto_wrap_policy": _WRAP,
    "transformer_layer_cls_to_wrap": _LAYERS,
    "transformer_cls_names_to_wrap": _LAYERS,
    "min_num_params": unless((None, 0, "0", 100_000_000), "groups do not depend on size", "the groups are the decoder layers"),
    "backward_prefetch": needless("FSDP2 gathers the next layer of the backward ahead by itself"),
    "forward_prefetch": switch(means(distributed__prefetch=1)),
    "state_dict_type": needless("checkpoints are always sharded (DCP), the finished adapter is always one whole PEFT file"),
    "state_dict_config": _IN_PYTHON,
    "optim_state_dict_config": _IN_PYTHON,
    "use_orig_params": needless("FSDP2 always keeps the original parameters"),
    "sync_module_states": needless("every rank reads its own rows of the base; adapters are the same on all by construction"),
    "cpu_ram_efficient_loading": needless("no rank ever holds more than its own rows of the base"),
    "limit_all_gathers": needless("FSDP2 bounds what is gathered ahead by itself"),
    "param_init_fn": _IN_PYTHON,
    "mixed_precision_policy": dtype_policy,
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_offload": unless_off("inputs of layers are recomputed, not moved to the CPU: leave it out"),
    "ignored_modules": takes("distributed.ignored"),
    "xla": unless_off(_XLA),
    "xla_fsdp_v2": unless_off(_XLA),
    "xla_fsdp_grad_ckpt": unless_off(_XLA),
    "xla_fsdp_settings": unless_off(_XLA),
    "xla_fsdp_settings.*": refused(_XLA),
}


def with_prefix(section: str) -> dict[str, Rule]:
    """The table for a place in a file, by both spellings."""
    plain = {f"{section}{name}": rule for name, rule in FSDP.items()}
    return plain | {f"{section}fsdp_{name}": rule for name, rule in FSDP.items()}
