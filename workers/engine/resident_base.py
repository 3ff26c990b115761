"""The base of an engine: built, sharded and loaded once, without adapters, for all jobs that train on it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_service.bases.cache_folder import Cache
from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from workers.base.load import load
from workers.engine.lanes import LaneModel
from workers.model.build import build_base
from workers.model.probes import Probed
from workers.ranks.grouping import grouped
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.ranks.sharding import shard


def load_resident_base(
    spec: JobSpec, mesh: DeviceMesh, device: torch.device, cache: Cache | None = None, probed: Probed | None = None
) -> LaneModel:
    """The base that a spec names, in its precision. Of the spec's other options those of `distributed` count. `cache`,
    `probed`:
    as in `construct`. Called by all ranks together. Raises SpecError for an option that an engine cannot follow.
    """
    options = spec.distributed
    taken = {"wrap": options.wrap != "layers", "compile": options.compile is True, "keep_unsharded": options.keep_unsharded}
    for name, refused in {**taken, "prefetch": options.prefetch is not None}.items():
        if refused:
            value = getattr(options, name)
            raise SpecError(f"distributed.{name} = {value!r}: jobs on one base cannot have it.", param=f"distributed.{name}")
    compute_dtype = COMPUTE_DTYPE[spec.precision.compute]
    built = build_base(spec, device, probed)
    outer = [module for group in grouped(built.model, built.layers, options) for module in group.modules]
    shard(built.model, built.layers, mesh, options, compute_dtype)
    load(
        built.model,
        spec.model.path,
        seed=spec.seed,
        compute_dtype=compute_dtype,
        device=device,
        offload=options.offload,
        cache=cache,
    )
    built.model.train()
    checkpointed = options.checkpointing != "none"
    return LaneModel(built.model, built.layers, [m for m in outer if m not in built.layers], checkpointed=checkpointed)
