"""Activation checkpointing of decoder layers: what backward needs of a layer is computed again
instead of kept.

    mode        kept on the device between a layer's forward and its backward
    selective   its input, and the results of products and attention
    full        its input
    tiled       its input; while it is computed again, of the feed-forward only a tile of rows
    offload     the same, but the input is in the host's memory

A layer's `forward` is replaced, not its module: parameter names stay as they are, and FSDP2's hooks
stay outside, so that a layer is gathered once for its recomputation and its backward together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ft_service.spec.options import Checkpointing
from workers.layers.segments import CURRENT
from workers.layers.tiles import Tiled
from workers.model.offloaded_inputs import Copies, OffloadedInputs
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
    layers: Sequence[nn.Module],
    mode: Checkpointing,
    adapter_rank: int,
    *,
    compiled: bool = False,
    row_wise: Iterable[nn.Module] = (),
    copies: Copies | None = None,
) -> None:
    """Replace the layers' forward, in place.

    "full" keeps only a layer's input; "selective" also what is costly to recompute; "tiled" is
    "full" with feed-forwards by tiles of rows; "offload" is "tiled" with inputs in the host's
    memory.

    `layers`: in order. `adapter_rank`: r of the adapters. The product with B sums over no more than
    r numbers: it is as large as the frozen product next to it and costs next to nothing to compute
    again. `compiled`: whether the layers will be compiled. `row_wise`: modules that compute every
    token by itself. `copies`: of "offload".
    """
    if mode == "none":
        return
    if mode in ("tiled", "offload"):
        for part in row_wise:
            replace_forward(part, Tiled(part, part.forward))
    if mode == "offload":
        assert copies is not None
        inputs = OffloadedInputs(copies)
        for number, layer in enumerate(layers):
            stays = number == len(layers) - 1
            around = partial(inputs.layer, number, stays=stays)
            replace_forward(layer, partial(_offloaded, layer.forward, around))
        return
    contexts: dict[str, Any] = {}
    if mode == "selective":
        costly = partial(_is_costly, adapter_rank)
        contexts["context_fn"] = (
            _contexts_for_compiling(costly) if compiled else partial(_contexts, costly)
        )
    for layer in layers:
        replace_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **contexts))


def _offloaded(
    forward: Callable[..., Any],
    around: Callable[[], AbstractContextManager[Any]],
    hidden_states: Tensor,
    *others: Any,
    **named: Any,
) -> Any:
    """A layer's output. Only its hidden states are offloaded: its other arguments, such as rotary
    angles, are those of all layers.
    """

    def of_hidden(x: Tensor) -> Any:
        return forward(x, *others, **named)

    with around():
        return checkpoint(of_hidden, hidden_states, use_reentrant=False)


Costly = Callable[[Any, Sequence[Any]], bool]
"""Whether what an operator makes of its arguments is kept."""


def _is_costly(cheap: int, func: Any, args: Sequence[Any]) -> bool:
    if CURRENT.choosing:
        return False
    if func in ATTENTION or func.namespace == KEPT_NAMESPACE:
        return True
    return func in PRODUCTS and args[-2].shape[-1] > cheap


def _contexts_for_compiling(costly: Costly) -> Callable[[], tuple[Any, Any]]:
    """A plain function: of a partial one Dynamo takes the numbers inside for variable ones, and
    refuses it.
    """

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE if costly(func, args) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(policy)

    return contexts


def _contexts(costly: Costly) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: deque[_Kept] = deque()
    return _Keeping(costly, kept), _Recalling(costly, kept)


@dataclass
class _Kept:
    """A costly operator of a forward."""

    func: Any
    made: Any
    """What it returned. None: something was written into that later, so that it is to be made
    again.
    """

    def shares(self, memory: set[int]) -> bool:
        """Whether what it returned lies in one of these pieces of memory (`_memory`)."""
        return not memory.isdisjoint(map(_memory, _tensors(self.made)))


class _Keeping(TorchDispatchMode):
    """Around a forward: puts what costly operators make into `kept`.

    PyTorch's own pair of modes counts every operator, and raises an error where the second forward
    runs others than the first: FSDP2's, where groups lie within a layer, since some of these are
    gathered still or again.
    """

    def __init__(self, costly: Costly, kept: deque[_Kept]) -> None:
        super().__init__()
        self._costly = costly
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._costly(func, args):
            self._kept.append(_Kept(func, tree_map(_detached, made)))
        elif func._schema.is_mutable:
            self._forget(set(map(_memory, _tensors(_written(func, args, kwargs or {})))))
        return made

    def _forget(self, memory: set[int]) -> None:
        """Keep nothing that lies in memory that was written: Gemma 3n adds to what a product has
        returned.
        """
        for own in self._kept:
            if own.shares(memory):
                own.made = None


class _Recalling(_Keeping):
    """Around the same forward again: takes that from `kept`, in its order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._costly(func, args):
            return func(*args, **(kwargs or {}))
        own = self._kept.popleft() if self._kept else _Kept(None, None)
        if own.func is not func:
            raise RuntimeError(
                f"{func} is computed again where the first forward had {own.func}: the layer is "
                "not deterministic."
            )
        return func(*args, **(kwargs or {})) if own.made is None else own.made


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    parameters = func._schema.arguments
    given = {
        parameter.name: value for parameter, value in zip(parameters, args, strict=False)
    } | dict(kwargs)
    return [given.get(parameter.name) for parameter in parameters if parameter.is_write]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    """What tensors have in common that lie in the same memory, views or not."""
    return tensor.untyped_storage()._cdata


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
