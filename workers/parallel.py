"""Sharding: one FSDP2 group per decoder layer, holding its frozen base and its adapters together, and one for the rest.

With one rank nothing is sharded: FSDP2 copies only the first tensor of a gather hook when the shard size is 1, and there is
nothing to gather. Both paths compute the same.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(
    model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """Shard a model (on meta or not) over a one-dimensional mesh, in place; on a mesh of size 1 do nothing.

    Adapters are gathered in `compute_dtype` and their gradients reduced in fp32; frozen weights are gathered in their storage
    format.
    """
    if mesh.size() == 1:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Before a forward: only the last micro-batch of a step reduces gradients over the ranks; the others add up locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
