"""The kernels that jobs use, each with what is told of a job whose device goes without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ft_service.spec import JobSpec
from workers.base.frozen_weights import Level
from workers.layers import (
    capped_attention,
    cudnn_attention,
    dropout,
    expert_rows,
    fused,
    low_rank,
    packed_attention,
)
from workers.layers.experts import FrozenExperts
from workers.model import head
from workers.model.build import BuiltModel
from workers.quant import decoding, fp8_products, nf4
from workers.quant.gpu_kernels import CheckedKernel


@dataclass(frozen=True)
class KernelUse:
    """A kernel, and the jobs that would use it."""

    kernel: CheckedKernel
    wanted: Callable[[JobSpec, BuiltModel], bool]
    without: str
    """What a device does without it: a sentence, to be ended by the reason."""
    level: Level = "info"
    """Of the event. warn: an option asks for it."""
    package: str = ""
    """What installs it where it is a package; empty: PyTorch brings it, or the user chose
    without.
    """


def kernel_faults(
    spec: JobSpec, built: BuiltModel, device: torch.device
) -> Iterator[tuple[Level, str]]:
    """Yield level and text of an event for each kernel that a job would use and a device goes
    without."""
    for use in KERNEL_USES:
        fault = use.kernel.fault(device) if use.wanted(spec, built) else None
        if fault is None:
            continue
        missing = use.package and fault.startswith("ModuleNotFoundError")
        hint = f" (pip install '{use.package}')" if missing else ""
        yield use.level, f"{use.without}: {fault}{hint}"


def _drops(spec: JobSpec, built: BuiltModel) -> bool:
    return spec.lora.lora_dropout > 0


def _multiplies_in_fp8(spec: JobSpec, built: BuiltModel) -> bool:
    return any(getattr(module, "in_fp8", False) for module in built.peft_model.modules())


def _stores_nf4(spec: JobSpec, built: BuiltModel) -> bool:
    return "nf4" in built.formats.values()


def _stores_other_codes(spec: JobSpec, built: BuiltModel) -> bool:
    return not {"fp8", "fp8_blocks", "nvfp4", "mxfp4"}.isdisjoint(built.formats.values())


def _computes_bf16(spec: JobSpec, built: BuiltModel) -> bool:
    return spec.precision.compute == "bf16"


def _layers_have(attribute: str, spec: JobSpec, built: BuiltModel) -> bool:
    modules = built.peft_model.modules()
    return any(getattr(module, attribute, None) is not None for module in modules)


def _fuses(spec: JobSpec, built: BuiltModel) -> bool:
    return spec.wants_fused_kernels


def _has_experts(spec: JobSpec, built: BuiltModel) -> bool:
    modules = built.peft_model.modules()
    return any(isinstance(own, FrozenExperts) and own.by_kernels for own in modules)


KERNEL_USES = (
    KernelUse(
        dropout.KERNEL,
        _drops,
        "lora.lora_dropout: its masks are made without their kernel, more slowly",
        "warn",
    ),
    KernelUse(
        fp8_products.KERNEL,
        _multiplies_in_fp8,
        "precision.fp8_products: numbers are rounded to FP8 without their kernel, more slowly "
        "than in bf16",
        "warn",
    ),
    KernelUse(
        low_rank.KERNEL,
        _multiplies_in_fp8,
        "Adapters' parts are added to products in FP8 by the library instead of a kernel",
    ),
    KernelUse(
        nf4.KERNEL,
        _stores_nf4,
        "NF4 weights are dequantised by several kernels instead of one",
    ),
    KernelUse(
        decoding.KERNEL,
        _stores_other_codes,
        "Weights in FP8, NVFP4 or MXFP4 are dequantised by several kernels instead of one",
    ),
    KernelUse(
        head.KERNEL,
        _computes_bf16,
        "Cross entropies are computed by several operations instead of one kernel",
    ),
    KernelUse(
        packed_attention.KERNEL,
        _computes_bf16,
        "Attention is computed sample by sample, more slowly than by the fused kernel for packed "
        "rows",
    ),
    KernelUse(
        cudnn_attention.KERNEL,
        _computes_bf16,
        "Attention of long rows is computed by PyTorch's kernel, more slowly than by cuDNN's",
        package="ft-service[workers]",
    ),
    KernelUse(
        capped_attention.KERNEL,
        partial(_layers_have, "attn_logit_softcapping"),
        "Attention with soft-capped scores writes its scores, and is slower than a fused kernel",
    ),
    KernelUse(
        packed_attention.KERNEL,
        partial(_layers_have, "sinks"),
        "Attention with sinks writes its scores, and is slower than a fused kernel",
    ),
    KernelUse(
        fused.KERNEL,
        _fuses,
        "precision.fused_kernels: the model's own operations are used, more slowly",
        "warn",
    ),
    KernelUse(
        expert_rows.KERNEL,
        _has_experts,
        "Rows of experts are gated and added up by several operations instead of kernels",
    ),
)
"""In the order of the events."""
