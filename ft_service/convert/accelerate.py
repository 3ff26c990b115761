"""Accelerate's config file (`accelerate config`): machines, precision, and the plugin that shards."""

from __future__ import annotations

from typing import Any

from ft_service.convert.fsdp import compute_dtype, with_prefix
from ft_service.convert.rules import (
    NotNeeded,
    NotSupported,
    Rule,
    Source,
    Taken,
    Verdict,
    as_number,
    choice,
    means,
    needless,
    refused,
    switch,
    takes,
    unless,
    unless_off,
)

KNOWN_VERSION = "1.15.0"

_RENDEZVOUS = needless("the service brings the processes together itself")
_TPU = unless_off("TPUs are not supported: train on CUDA GPUs or CPUs, and leave it out")
_SAGEMAKER = refused("this service starts no machines in Amazon SageMaker: run it on machines of your own")
_MEGATRON = refused("tensor and pipeline parallelism of Megatron-LM is not supported: the base is sharded by FSDP2 instead")
_FP8 = refused("products run in bf16: precision.default: fp8 stores and gathers the frozen weights in FP8")
_STRATEGY = needless("how many ranks there are decides how the base is sharded")
_NOT_A_PARALLELISM = "is not supported: the base is sharded by FSDP2 alone; lower training.max_length or add ranks"


def _processes(value: Any, source: Source) -> Verdict:
    """`num_processes` counts over all machines, nproc_per_node on one."""
    total, machines = as_number(value), source.number("num_machines") or 1
    if total is None or total % machines:
        return NotSupported(f"it must be a multiple of num_machines = {machines}: set distributed.nproc_per_node")
    return Taken({"distributed.nproc_per_node": int(total) // machines})


def _machines(value: Any, source: Source) -> Verdict:
    return NotNeeded("one host is the default") if as_number(value) == 1 else Taken({"distributed.nnodes": value})


def _replicas(value: Any, source: Source) -> Verdict:
    return NotNeeded("all ranks shard") if as_number(value) in (None, 1) else Taken({"distributed.replicate": value})


def zero_stage(value: Any, source: Source) -> Verdict:
    """DeepSpeed's stages by what they keep whole on a rank: 3 nothing, 1 and 2 the weights, 0 everything."""
    stage = as_number(value)
    if stage == 3:
        inner = source.number("zero_optimization.zero_hpz_partition_size") or 1
        return Taken({"distributed.reshard_after_forward": inner if inner > 1 else True})
    if stage in (1, 2):
        return Taken({"distributed.reshard_after_forward": False}, "weights stay gathered from forward to backward")
    if stage == 0:
        return Taken({"distributed.replicate": -1}, "every rank keeps the whole base")
    return NotSupported("no such ZeRO stage is known")


offload_device: Rule = choice(
    {
        "none": needless("it is off here too"),
        "cpu": means(distributed__offload=True),
        "nvme": refused("only the CPU's memory can be offloaded to; adapters and their optimizer are small"),
    },
    refused("no such device is known"),
)
_NVME = needless("nothing is offloaded to disk")
_OTHER_FILE = refused("it is another file: run `ft convert` on that one too")

TABLE: dict[str, Rule] = {
    "compute_environment": choice({"local_machine": needless("the service runs on machines of your own")}, _SAGEMAKER),
    "distributed_type": choice(
        {
            "no": needless("one rank is not sharded"),
            "fsdp": _STRATEGY,
            "multi_gpu": _STRATEGY,
            "multi_cpu": _STRATEGY,
            "deepspeed": _STRATEGY,
            "megatron_lm": _MEGATRON,
        },
        refused("this kind of device is not supported: train on CUDA GPUs or CPUs"),
    ),
    "mixed_precision": compute_dtype,
    "use_cpu": needless("GPUs are used where there are any"),
    "debug": needless("collectives are checked by the tests; a rank that fails names itself"),
    "num_processes": _processes,
    "machine_rank": _RENDEZVOUS,
    "num_machines": _machines,
    "gpu_ids": choice({"all": needless("all GPUs are used")}, refused("set CUDA_VISIBLE_DEVICES for the server instead")),
    "main_process_ip": _RENDEZVOUS,
    "main_process_port": _RENDEZVOUS,
    "rdzv_backend": _RENDEZVOUS,
    "same_network": _RENDEZVOUS,
    "main_training_function": needless("there is no training script"),
    "enable_cpu_affinity": unless_off("processes are not pinned to cores: start the server with taskset or numactl"),
    "fp8_config.*": _FP8,
    "mpirun_config.*": needless("ranks are started by torchrun, not by mpirun"),
    "downcast_bf16": choice({"no": needless("it is off here too")}, _TPU),
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    # deepspeed_config ----------------------------------------------------------------------------------------------------
    "deepspeed_config.deepspeed_config_file": _OTHER_FILE,
    "deepspeed_config.zero_stage": zero_stage,
    "deepspeed_config.offload_optimizer_device": offload_device,
    "deepspeed_config.offload_param_device": offload_device,
    "deepspeed_config.offload_optimizer_nvme_path": _NVME,
    "deepspeed_config.offload_param_nvme_path": _NVME,
    "deepspeed_config.gradient_accumulation_steps": unless(
        (1, "1", "auto"),
        "a step's micro-batches follow from training.batch_size",
        "a step is defined by its samples over all ranks: set training.batch_size to micro-batch x these steps x ranks",
    ),
    "deepspeed_config.gradient_clipping": choice(
        {"auto": needless("the default is 1.0, as in Transformers"), "none": needless("it is not set")},
        takes("training.max_grad_norm"),
    ),
    "deepspeed_config.zero3_init_flag": needless("the model is always built on meta and each rank reads its own rows"),
    "deepspeed_config.zero3_save_16bit_model": needless("the adapter is written whole; `ft merge` makes a whole model"),
    "deepspeed_config.deepspeed_hostfile": _RENDEZVOUS,
    "deepspeed_config.deepspeed_exclusion_filter": _RENDEZVOUS,
    "deepspeed_config.deepspeed_inclusion_filter": _RENDEZVOUS,
    "deepspeed_config.deepspeed_multinode_launcher": _RENDEZVOUS,
    "deepspeed_config.deepspeed_moe_layer_cls_names": needless("the decoder layers are the groups, experts with them"),
    # parallelism_config --------------------------------------------------------------------------------------------------
    "parallelism_config.parallelism_config_dp_replicate_size": _replicas,
    "parallelism_config.parallelism_config_dp_shard_size": needless("the ranks of one replica shard"),
    "parallelism_config.parallelism_config_tp_size": unless(
        (1, "1"), "it is off here too", f"tensor parallelism {_NOT_A_PARALLELISM}"
    ),
    "parallelism_config.parallelism_config_cp_size": unless(
        (1, "1"), "it is off here too", f"context parallelism {_NOT_A_PARALLELISM}"
    ),
    "parallelism_config.parallelism_config_cp_backend": needless("there is no context parallelism"),
    "parallelism_config.parallelism_config_cp_comm_strategy": needless("there is no context parallelism"),
    "parallelism_config.parallelism_config_sp_size": unless(
        (1, "1"), "it is off here too", f"sequence parallelism {_NOT_A_PARALLELISM}"
    ),
    "parallelism_config.parallelism_config_sp_backend": needless("there is no sequence parallelism"),
    "parallelism_config.parallelism_config_sp_seq_length": needless("there is no sequence parallelism"),
    "parallelism_config.parallelism_config_sp_seq_length_is_variable": needless("there is no sequence parallelism"),
    "parallelism_config.parallelism_config_sp_attn_implementation": needless("there is no sequence parallelism"),
    # megatron_lm_config --------------------------------------------------------------------------------------------------
    "megatron_lm_config.*": _MEGATRON,
    "megatron_lm_config.megatron_lm_gradient_clipping": takes("training.max_grad_norm"),
    "megatron_lm_config.megatron_lm_recompute_activations": switch(means(distributed__activation_checkpointing="full")),
    # dynamo_config -------------------------------------------------------------------------------------------------------
    "dynamo_config.dynamo_backend": choice(
        {"no": needless("it is off here too"), "inductor": means(distributed__compile=True)},
        refused("layers are compiled by inductor only: distributed.compile"),
    ),
    "dynamo_config.dynamo_mode": unless(("default",), "it is the default", "layers are compiled in the default mode"),
    "dynamo_config.dynamo_use_fullgraph": needless("graphs may break where they must"),
    "dynamo_config.dynamo_use_dynamic": needless("lengths vary, so shapes are dynamic where they need to be"),
    "dynamo_config.dynamo_use_regional_compilation": needless("it is always one decoder layer that is compiled"),
    # Amazon SageMaker ----------------------------------------------------------------------------------------------------
    **dict.fromkeys(
        (
            *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
            *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
            "additional_args.*",
        ),
        _SAGEMAKER,
    ),
    **with_prefix("fsdp_config."),
}
