"""Limits of micro-batches, for which the loaded model is tried with its own weights before
training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ft_service.spec import JobSpec
from workers.data.micro_batches import MicroBatchLimits, attention_share
from workers.model import packed_trial
from workers.model.multimodal import causal_model, text_decoder
from workers.ranks.runtime import COMPUTE_DTYPE

TOKENS = 2048
"""Default tokens of a micro-batch."""


def settle_limits(
    model: nn.Module, spec: JobSpec, device: torch.device, warn: Callable[[str], None]
) -> MicroBatchLimits:
    """What a micro-batch of the loaded model may hold.

    Called by all ranks together, before training.

    `warn`: called with a sentence if samples cannot be packed although the spec asks for it.
    """
    reason = settle_attention(model, device, COMPUTE_DTYPE[spec.precision.compute])
    return limits_of(model, spec, reason, warn)


def limits_of(
    model: nn.Module, spec: JobSpec, reason: str | None, warn: Callable[[str], None]
) -> MicroBatchLimits:
    """What a micro-batch may hold.

    `reason`: why samples are padded, as `settle_attention` returns it; `warn`: as there.
    """
    options = spec.training
    if options.packing and reason is not None:
        warn(
            "training.packing: samples are padded, in micro-batches of like length, since "
            f"{reason}."
        )
    return MicroBatchLimits(
        tokens=TOKENS
        if options.tokens_per_micro_batch == "auto"
        else options.tokens_per_micro_batch,
        samples=options.per_device_train_batch_size,
        packed=options.packing and reason is None,
        per_token=attention_share(
            getattr(text_decoder(causal_model(model)).config, "hidden_size", 0)
        ),
    )


def settle_attention(
    model: nn.Module, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Try packed rows on all ranks (`packed_trial.settle_attention`).

    Called by all ranks together, before training; what one of them finds counts for all.
    """

    def anywhere(here: bool) -> bool:
        flag = torch.tensor([here], dtype=torch.uint8, device=device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    return packed_trial.settle_attention(model, device, compute_dtype, anywhere)
