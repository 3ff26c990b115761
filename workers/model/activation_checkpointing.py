"""Activation checkpointing of decoder layers: what backward needs of a layer is computed again instead of kept.

A layer's `forward` is replaced, not its module: parameter names stay as they are, and FSDP2's hooks stay outside, so that a
layer is gathered once for its recomputation and its backward together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workers.layers.segments import CURRENT

aten = torch.ops.aten

PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
"""Their first matrix operand is the last argument but one."""
ATTENTION = frozenset(
    (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    )
)
KEPT_NAMESPACES = frozenset(("ft_service", "torch_attn"))
"""Of our operators, the products with frozen weights and attention within segments, and of PyTorch's for packed rows."""


def checkpoint_activations(layers: Iterable[nn.Module], mode: Literal["none", "full", "selective"], adapter_rank: int) -> None:
    """Replace the layers' forward, in place. "full" keeps only a layer's input; "selective" also what is costly to recompute.

    `adapter_rank`: r of the adapters. The product with B sums over no more than r numbers: it is as large as the frozen
    product beside it and costs next to nothing to compute again.
    """
    if mode == "none":
        return
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy(adapter_rank))
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **contexts)


def _policy(cheap: int) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        costly = func in ATTENTION or func.namespace in KEPT_NAMESPACES
        costly = costly or (func in PRODUCTS and args[-2].shape[-1] > cheap)
        return CheckpointPolicy.MUST_SAVE if costly and not CURRENT.choosing else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
