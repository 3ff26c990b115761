"""Sharding by FSDP2: groups of modules that are gathered together, base and adapters in one buffer,
in storage format.

With a shard size of 1, whatever the number of copies, nothing is sharded: FSDP2 copies only the
first tensor of a gather hook then, and there is nothing to gather. Gradients are averaged here
instead. Both paths compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ft_service.bases.module_rules import choose_ignored
from ft_service.errors import SpecError
from ft_service.spec import DistributedOptions, Prefetch
from ft_service.spec.mesh import Replicate, check_reshard_size, mesh_shape
from workers.base.load import base_tensor_name
from workers.quant.rowwise import RowQuantized
from workers.ranks.grouping import ShardGroup, grouped


def make_mesh(device_type: str, world: int, replicate: Replicate) -> DeviceMesh:
    """The mesh of all ranks: (shard), or (replicate, shard) when there are several copies.

    Called by all ranks together.
    """
    copies, shards = mesh_shape(replicate, world)
    if copies == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (copies, shards), mesh_dim_names=("replicate", "shard"))


def shard(
    model: PreTrainedModel | PeftModel,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    options: DistributedOptions,
    compute_dtype: torch.dtype,
) -> None:
    """Shard a model (on meta or not) over a mesh's last dimension, in place; where that has size 1
    do nothing.

    Adapters are gathered in `compute_dtype` and their gradients reduced in fp32; frozen weights are
    gathered in their storage format. Raises SpecError naming the option that does not fit the model
    or the mesh.
    """
    ignored = ignored_weights(model, options.ignored)
    if mesh.size(mesh.ndim - 1) == 1:
        return
    _check(model, mesh, options)
    groups = grouped(model, layers, options)
    apply = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        # Not pinned: pinning is done tensor by tensor, and a quantised weight is several.
        offload_policy=CPUOffloadPolicy(pin_memory=False) if options.offload else OffloadPolicy(),
        ignored_params=ignored,
    )
    for group in reversed(groups):  # inner ones first: a group takes what is in none yet
        kept = options.keep_unsharded
        apply(group.modules, reshard_after_forward=False if kept else group.reshard_after_forward)
        group.handle.set_unshard_in_backward(group.in_backward)
        if (
            not group.in_backward
        ):  # else an embedding that is trained gathers what the micro-batch before ended with
            # Which does nothing, as it is not gathered.
            group.handle.set_modules_to_backward_prefetch([group.handle])
    apply(model)
    if options.prefetch is not None:
        _prefetch(groups, options.prefetch)


def _check(model: nn.Module, mesh: DeviceMesh, options: DistributedOptions) -> None:
    shards = mesh.size(mesh.ndim - 1)
    if options.offload and mesh.device_type == "cpu":
        raise SpecError(
            "distributed.offload = True: the ranks train on the CPU, where offloading moves "
            "nothing. Leave it out.",
            param="distributed.offload",
        )
    if options.reshard_size is None:
        return
    check_reshard_size(options.reshard_size, shards)
    for name, parameter in model.named_parameters():
        if isinstance(parameter.data, RowQuantized):
            raise SpecError(
                f"distributed.reshard_after_forward = {options.reshard_size}: FSDP2 reshards to a "
                "number of ranks only plain "
                f"weights, and {base_tensor_name(name)} is a {type(parameter.data).__name__}. Use "
                "true or false.",
                param="distributed.reshard_after_forward",
            )


def ignored_weights(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """The frozen weights that every rank holds whole: those whose names in the base match, and
    those that the model keeps in fp32, which FSDP2 would gather in the dtype of the others. Raises
    SpecError for a pattern that matches none.
    """
    named = {
        base_tensor_name(name): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    chosen = choose_ignored(list(named), patterns)
    return {
        weight for name, weight in named.items() if name in chosen or weight.dtype == torch.float32
    }


def _prefetch(groups: Sequence[ShardGroup], depth: Prefetch) -> None:
    for position, group in enumerate(groups):
        ahead = groups[position + 1 : position + 1 + depth.forward]
        group.handle.set_modules_to_forward_prefetch([other.handle for other in ahead])
    needed = [group for group in groups if group.in_backward]
    for position, group in enumerate(needed):
        ahead = needed[max(0, position - depth.backward) : position]
        group.handle.set_modules_to_backward_prefetch([other.handle for other in reversed(ahead)])


def gather_first(model: nn.Module) -> None:
    """Start to gather the first groups of the next forward, and return at once."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for first in (groups[1:] or groups)[
        :1
    ]:  # the root is the first of them; with other groups it holds next to nothing
        first.unshard(async_op=True)


def reshard(model: nn.Module) -> None:
    """Free everything that is gathered. Needed after a validation, where no backward does it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_last_micro_batch(model: nn.Module, last: bool, keep_unsharded: bool) -> None:
    """Call before a forward: only the last micro-batch of a step reduces gradients over the ranks;
    the others add up locally.

    What stays gathered between micro-batches must not outlive the last one: the optimizer changes
    the adapters' shards.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not keep_unsharded)


class Gradients:
    """The gradients of one job: its micro-batches' backwards, and what the ranks do with them at
    the end of a step.
    """

    def __init__(self, model: nn.Module, world: int, *, keep_unsharded: bool = False) -> None:
        """`keep_unsharded`: weights gathered for one micro-batch stay for the next."""
        self._model = model
        self._world = world
        self._keep_unsharded = keep_unsharded
        self._beside: list[nn.Parameter] = []

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average those of parameters too that are whole on every rank, and no part of the model.

        A step without any of them counts as zeros, on one rank as on several.
        """
        self._beside += parameters

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it is the backward of a step's last micro-batch that reduces them over the
        ranks.
        """
        return isinstance(self._model, FSDPModule)

    def begin(self, last: bool) -> None:
        """Call before the forward of a micro-batch. `last`: of its step."""
        set_last_micro_batch(self._model, last, self._keep_unsharded)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch."""
        loss.backward()

    def reduce(self) -> None:
        """Average over all ranks what the backwards of a step have left.

        Called by all ranks together.
        """
        for parameter in self._beside:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_unsharded_gradients(self._model, self._world, self._beside)


def average_unsharded_gradients(
    model: nn.Module, world: int, beside: Sequence[nn.Parameter] = ()
) -> None:
    """Average over all ranks the gradients that FSDP2 does not hold, in one fp32 buffer; FSDP2
    averages the others itself. `beside`: further parameters, no part of the model.

    A parameter without a gradient on this rank counts as zero: another rank may have one.
    """
    if world == 1:
        return
    own = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    parameters = [*own, *beside]
    if not parameters:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([grad.flatten().float() for grad in gradients])
    dist.all_reduce(flat)
    for parameter, part in zip(
        parameters, flat.div_(world).split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
