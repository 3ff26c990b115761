"""Activation checkpointing of decoder layers: what backward needs of a layer is computed again instead of kept.

A layer's `forward` is replaced, not its module: parameter names stay as they are, and FSDP2's hooks stay outside, so that a
layer is gathered once for its recomputation and its backward together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workers.layers.segments import CURRENT
from workers.patches.forward import replace_forward

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
KEPT_NAMESPACE = "ft_service"
"""Of our operators: products with frozen weights, attention within segments."""


def checkpoint_activations(
    layers: Iterable[nn.Module], mode: Literal["none", "full", "selective"], adapter_rank: int, *, compiled: bool = False
) -> None:
    """Replace the layers' forward, in place. "full" keeps only a layer's input; "selective" also what is costly to recompute.

    `adapter_rank`: r of the adapters. The product with B sums over no more than r numbers: it is as large as the frozen
    product next to it and costs next to nothing to compute again. `compiled`: whether the layers will be compiled.
    """
    if mode == "none":
        return
    contexts: dict[str, Any] = {}
    if mode == "selective":
        costly = partial(_is_costly, adapter_rank)
        contexts["context_fn"] = partial(_contexts_for_compiling if compiled else _contexts, costly)
    for layer in layers:
        replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **contexts))


Costly = Callable[[Any, Sequence[Any]], bool]
"""Whether what an operator makes of its arguments is kept."""


def _is_costly(cheap: int, func: Any, args: Sequence[Any]) -> bool:
    if CURRENT.choosing:
        return False
    if func in ATTENTION or func.namespace == KEPT_NAMESPACE:
        return True
    return func in PRODUCTS and args[-2].shape[-1] > cheap


def _contexts_for_compiling(costly: Costly) -> tuple[Any, Any]:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if costly(func, args) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _contexts(costly: Costly) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: deque[Any] = deque()
    return _Keeping(costly, kept), _Recalling(costly, kept)


class _Keeping(TorchDispatchMode):
    """Around a forward: puts what costly operators make into `kept`.

    PyTorch's own pair of modes counts every operator, and raises an error where the second forward runs others than the first:
    FSDP2's, where groups lie within a layer, since some of these are gathered still or again.
    """

    def __init__(self, costly: Costly, kept: deque[Any]) -> None:
        super().__init__()
        self._costly, self._kept = costly, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._costly(func, args):
            self._kept.append((func, tree_map(_detached, made)))
        return made


class _Recalling(_Keeping):
    """Around the same forward again: takes that from `kept`, in its order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._costly(func, args):
            return func(*args, **(kwargs or {}))
        known, made = self._kept.popleft() if self._kept else (None, None)
        if known is not func:
            raise RuntimeError(f"{func} is computed again where the first forward had {known}: the layer is not deterministic.")
        return made


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
