"""Load a base on ranks as a worker does, and hand back what is stored, whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ft_service.bases.cache_folder import Cache
from ft_service.spec import JobSpec
from workers.base.frozen_weights import Level, Loaded
from workers.base.load import base_tensor_name, load
from workers.model.build import BuiltModel, build
from workers.model.probes import Probed
from workers.quant.rowwise import RowQuantized
from workers.ranks.sharding import shard

CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What one rank has after loading."""

    loaded: Loaded
    messages: list[tuple[Level, str]]
    parts: dict[str, list[Tensor]]
    """Base parameter → the plain tensors that hold this rank's rows."""
    values: dict[str, Tensor]
    """Base parameter → this rank's rows, dequantised in fp32."""
    kinds: dict[str, str]


def built_and_sharded(spec: JobSpec, world: int) -> BuiltModel:
    # Trying a copy would leave memory for loading to reuse.
    built = build(spec, CPU, Probed(True, loss_in_chunks=True))
    shard(
        built.peft_model,
        built.layers,
        init_device_mesh("cpu", (world,)),
        spec.distributed,
        torch.bfloat16,
    )
    return built


def load_on_rank(rank: int, world: int, spec: JobSpec, cache: Cache | None = None) -> Outcome:
    model = built_and_sharded(spec, world).peft_model
    loaded = load(
        model, Path(spec.model.path), seed=0, compute_dtype=torch.bfloat16, device=CPU, cache=cache
    )
    return outcome_of(model, loaded)


def load_each_on_rank(rank: int, world: int, specs: list[JobSpec]) -> list[Outcome]:
    return [load_on_rank(rank, world, spec) for spec in specs]


def outcome_of(model: nn.Module, loaded: Loaded) -> Outcome:
    outcome = Outcome(loaded, list(loaded.messages()), {}, {}, {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            _add(outcome, base_tensor_name(name), parameter)
    return outcome


def _add(outcome: Outcome, name: str, parameter: nn.Parameter) -> None:
    local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
    quantized = isinstance(local, RowQuantized)
    outcome.parts[name] = [p.view(torch.uint8) for p in (local.parts if quantized else [local])]
    outcome.values[name] = local.dequantize(torch.float32) if quantized else local.float()
    outcome.kinds[name] = type(local).__name__ if quantized else "plain"


def whole(outcomes: list[Outcome], name: str) -> Tensor:
    return torch.cat([outcome.values[name] for outcome in outcomes])
