"""Sharding: FSDP2 groups of the embedding, of every decoder layer with its adapters, and of the last norm with the head.

A group is gathered by one collective, in storage format. Embedding and head are groups of their own because they are the
largest tensors there are: in the root's group every rank would hold both for the whole step. Tied, they are one tensor and so
one group. With a shard size of 1, whatever the number of copies, nothing is sharded: FSDP2 copies only the first tensor of a
gather hook then, and there is nothing to gather. Gradients are averaged here instead. Both paths compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ft_service.mesh import Replicate, mesh_shape


@dataclass(frozen=True)
class Group:
    """Modules that are gathered together."""

    modules: list[nn.Module]
    reshard_after_forward: bool | int
    in_backward: bool = True
    """Whether backward needs the weights."""

    def shares_with(self, other: Group) -> bool:
        mine = {id(p) for module in self.modules for p in module.parameters()}
        return any(id(p) in mine for module in other.modules for p in module.parameters())


def make_mesh(device_type: str, world: int, replicate: Replicate) -> DeviceMesh:
    """The mesh of all ranks: (shard), or (replicate, shard) when there are several copies. Called by all ranks together."""
    copies, shards = mesh_shape(replicate, world)
    if copies == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (copies, shards), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool | int,
) -> None:
    """Shard a model (on meta or not) over a mesh's last dimension, in place; where that has size 1 do nothing.

    Adapters are gathered in `compute_dtype` and their gradients reduced in fp32; frozen weights are gathered in their storage
    format.
    """
    if mesh.size(mesh.ndim - 1) == 1:
        return
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for group in layer_groups(model, layers, reshard_after_forward):
        fully_shard(group.modules, mesh=mesh, mp_policy=policy, reshard_after_forward=group.reshard_after_forward)
        for module in group.modules:
            assert isinstance(module, FSDPModule)
            module.set_unshard_in_backward(group.in_backward)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reshard(model: nn.Module) -> None:
    """Free everything that is gathered. After a validation, since no backward does it then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Before a forward: only the last micro-batch of a step reduces gradients over the ranks; the others add up locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def average_unsharded_gradients(model: nn.Module, world: int) -> None:
    """Over all ranks, in one fp32 buffer, for the parameters that FSDP2 does not hold; it averages the others itself.

    A parameter without a gradient on this rank counts as zero: another rank may have one.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if world == 1 or not parameters:
        return
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([grad.flatten().float() for grad in found])
    dist.all_reduce(flat)
    for parameter, part in zip(parameters, flat.div_(world).split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def layer_groups(model: nn.Module, layers: Sequence[nn.Module], reshard_after_forward: bool | int) -> list[Group]:
    """What is gathered together, in the order of the forward: embeddings, every decoder layer, the rest (norm and head).

    A frozen embedding has no part in backward and is freed once it was read; norm and head are kept, since backward begins
    with them.
    """
    outer = list(_outer_modules(model, {id(layer) for layer in layers}))
    embeddings = [module for module in outer if isinstance(module, nn.Embedding)]
    frozen = not any(p.requires_grad for module in embeddings for p in module.parameters())
    first = Group(embeddings, reshard_after_forward=True, in_backward=not frozen)
    last = Group([module for module in outer if not isinstance(module, nn.Embedding)], reshard_after_forward=False)
    if first.shares_with(last):
        first, last = Group(first.modules + last.modules, reshard_after_forward=False), Group([], False)
    middle = [Group([layer], reshard_after_forward) for layer in layers]
    return [group for group in (first, *middle, last) if group.modules]


def _outer_modules(module: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    """Outside of the decoder layers, the outermost modules that hold parameters and contain no layer."""
    if id(module) in layers:
        return
    holds = isinstance(module, BaseTunerLayer) or any(True for _ in module.parameters(recurse=False))
    if holds and not any(id(inner) in layers for inner in module.modules()):
        yield module
        return
    for child in module.children():
        yield from _outer_modules(child, layers)
