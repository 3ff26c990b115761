"""Seats: the adapters of one job on a base that other jobs use too.

FSDP2 takes no parameters after a model is sharded, so a job's adapters stand outside of its groups.
The job trains fp32 masters that are sharded by rows under the names that they have when it trains
alone; their whole is gathered once an optimizer step, in the dtype of the computation, and
gradients are added up here in fp32 and reduced once a step. FSDP2 does the same, in the same order,
with the adapters of a job that trains alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ft_service.errors import SpecError
from workers.base.load import adapters, own_rows
from workers.engine.lanes import LaneModel
from workers.layers.linear import LoraLinear
from workers.patches.shared_base import replace_base
from workers.quant.local_rows import local_rows
from workers.ranks.sharding import Gradients, average_unsharded_gradients

# Renamed in torch 2.13.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Seat(Gradients):
    """The adapters of one job: masters, what the lanes compute with, and gradients.

    Its methods are called by all ranks together.
    """

    def __init__(
        self,
        job: PeftModel,
        base: LaneModel,
        mesh: DeviceMesh,
        first: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`job`: the job's model on meta, which will compute with the weights of `base`.

        `first`: whole masters, fp32, by plain names. `dtype`: of the computation, in which adapters
        are gathered.

        Raises SpecError for adapters on anything but linear layers.
        """
        super().__init__(job, mesh.size())
        self._mesh = mesh
        self._dtype = dtype
        self._base = base
        self.model = job
        self._shards = mesh.size(mesh.ndim - 1)
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        self._whole: dict[str, nn.Parameter] = {}
        """What lanes compute with: where nothing is sharded the masters themselves."""
        self._sums: dict[str, Tensor] = {}
        self.masters: dict[str, nn.Parameter] = {}
        owners = {
            id(p): (module, name)
            for module in job.modules()
            for name, p in module.named_parameters(recurse=False)
        }
        for name, parameter in list(adapters(job)):
            value = first[name]
            master = nn.Parameter(value.clone() if self._shards == 1 else self._sharded(value))
            whole = (
                master
                if self._shards == 1
                else nn.Parameter(torch.empty(value.shape, dtype=dtype, device=value.device))
            )
            self.masters[name], self._whole[name] = master, whole
            module, own = owners[id(parameter)]
            setattr(module, own, whole)
        _share_weights(job, base.base)
        self.linears = _adapted(job, base.base)
        """Linear layer of the base → the job's adapted layer in its place."""
        replace_base(job, base.base)
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Make what lanes compute with from the masters: after each change of these."""
        if self._shards == 1:
            return
        heights = {name: -(-whole.shape[0] // self._shards) for name, whole in self._whole.items()}
        mine = []
        for name, master in self.masters.items():
            local = local_rows(master).to(self._dtype)
            padded = local.new_zeros(heights[name], *local.shape[1:])
            padded[: local.shape[0]] = local
            mine.append(padded.flatten())
        sizes = [part.numel() for part in mine]
        flat = torch.cat(mine)
        gathered = flat.new_empty(self._shards * flat.numel())
        _GATHER(gathered, flat, group=self._group)
        parts = gathered.view(self._shards, -1).split(sizes, dim=1)
        for (name, whole), part in zip(self._whole.items(), parts, strict=True):
            whole.copy_(
                part.reshape(self._shards * heights[name], *whole.shape[1:])[: whole.shape[0]]
            )

    def begin(self, last: bool) -> None:
        """Nothing: gradients are reduced apart from the base's groups."""

    def backward(self, loss: Tensor) -> None:
        self._base.wait_for_backward(loss)
        self.add_gradients()

    def reduce(self) -> None:
        self.reduce_gradients(self._mesh.size())

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add what a backward has left to the sums of this step; where nothing is sharded autograd
        has done it.
        """
        if self._shards == 1:
            return
        for name, whole in self._whole.items():
            if whole.grad is not None:
                grad = whole.grad.float()
                whole.grad = None
                self._sums[name] = self._sums[name].add_(grad) if name in self._sums else grad

    @torch.no_grad()
    def reduce_gradients(self, world: int) -> None:
        """Give each master the mean over all ranks of a step's sums."""
        if self._shards == 1:
            average_unsharded_gradients(self.model, world)
            return
        sent = []
        for name, whole in self._whole.items():
            height = -(-whole.shape[0] // self._shards)
            padded = torch.zeros(self._shards * height, *whole.shape[1:], device=whole.device)
            if name in self._sums:
                padded[: whole.shape[0]] = self._sums.pop(name)
            sent.append(padded.view(self._shards, -1))
        sizes = [part.shape[1] for part in sent]
        flat = torch.cat(sent, dim=1)
        mine = flat.new_empty(flat.shape[1])
        _REDUCE(mine, flat.flatten(), group=self._group)
        if self._mesh.ndim > 1:
            dist.all_reduce(mine, group=self._mesh.get_group(0))
        mine.div_(world)
        for master, part in zip(self.masters.values(), mine.split(sizes), strict=True):
            local = local_rows(master)
            grad = part[: local.numel()].view(local.shape)
            assert isinstance(master, DTensor)
            master.grad = self._distributed(grad, master.shape)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._mesh.get_group(self._mesh.ndim - 1)

    def _sharded(self, value: Tensor) -> DTensor:
        start, end = own_rows(value.shape[0], self._rank, self._shards)
        return self._distributed(value[start:end].clone(), value.shape)

    def _distributed(self, local: Tensor, shape: torch.Size) -> DTensor:
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _share_weights(job: PeftModel, base: nn.Module) -> None:
    """Let the job's modules hold the frozen parameters of the base, under the names that they have
    there.
    """
    for name, module in list(job.get_base_model().named_modules()):
        frozen = [
            key for key, own in module.named_parameters(recurse=False) if not own.requires_grad
        ]
        for key in frozen:
            shared = base.get_submodule(name.replace(".base_layer", ""))
            module._parameters[key] = shared._parameters[key]


def _adapted(job: PeftModel, base: nn.Module) -> dict[nn.Module, partial[Any]]:
    """Linear layer of the base → the job's adapted layer, which computes on that layer's weight."""
    found: dict[nn.Module, partial[Any]] = {}
    for name, layer in list(job.get_base_model().named_modules()):
        if isinstance(layer, LoraLinear):
            module: Any = base.get_submodule(name)
            layer._modules["base_layer"] = module
            found[module] = partial(nn.Module.__call__, layer)
    held = sum(
        parameter.requires_grad
        for layer in found.values()
        for parameter in layer.args[0].parameters()
    )
    if held != sum(1 for _ in adapters(job)):
        raise SpecError(
            "lora: the job adapts more than linear layers, which needs ranks of its own (engine: "
            "off).",
            param="lora",
        )
    return found
