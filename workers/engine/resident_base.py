"""The base of an engine: built, sharded and loaded once, without adapters, for all jobs that train
on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_service.bases.cache_folder import Cache
from ft_service.bases.description import ImageFacts
from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from ft_service.spec.options import FOR_LONG_SAMPLES
from workers.base.frozen_weights import Loaded
from workers.base.load import load
from workers.engine.lanes import LaneModel
from workers.images.placing import take_images
from workers.job.origins import IdentifiedBase, identify_files
from workers.model.build import BuiltBase, build_base
from workers.model.probes import Probed
from workers.ranks.grouping import grouped
from workers.ranks.runtime import COMPUTE_DTYPE
from workers.ranks.sharding import shard
from workers.training.guards import check_gathered_weights
from workers.training.packing import settle_attention


@dataclass(frozen=True)
class ResidentBase:
    """A base that jobs share, sharded and loaded."""

    model: LaneModel
    built: BuiltBase
    loaded: Loaded
    identified: IdentifiedBase
    """By the files that were read."""
    padded_because: str | None
    """Why samples are padded (`settle_attention`); None: they may be packed."""


def load_resident_base(
    spec: JobSpec,
    mesh: DeviceMesh,
    device: torch.device,
    cache: Cache | None = None,
    probed: Probed | None = None,
    images: ImageFacts | None = None,
) -> ResidentBase:
    """The base that a spec names, in its precision.

    Of the spec's other options those of `distributed` count. `cache`, `probed`: as in `construct`.
    `images`: what is known of its towers; None: its jobs have no pictures.

    Called by all ranks together. Raises SpecError for an option that an engine cannot follow, and
    TrainingError as `check_gathered_weights`.
    """
    options = spec.distributed
    taken = {
        "wrap": options.wrap != "layers",
        "compile": options.compile is True,
        "keep_unsharded": options.keep_unsharded,
    }
    for name, refused in {
        **taken,
        "prefetch": options.prefetch is not None,
        "offload": options.offload,
        "activation_checkpointing": options.activation_checkpointing in FOR_LONG_SAMPLES,
    }.items():
        if refused:
            value = getattr(options, name)
            raise SpecError(
                f"distributed.{name} = {value!r}: jobs on one base cannot have it.",
                param=f"distributed.{name}",
            )
    compute_dtype = COMPUTE_DTYPE[spec.precision.compute]
    identified = identify_files(spec.model)  # before they are read
    built = build_base(spec, device, probed)
    outer = [
        module for group in grouped(built.model, built.layers, options) for module in group.modules
    ]
    shard(built.model, built.layers, mesh, options, compute_dtype)
    loaded = load(
        built.model,
        spec.model.path,
        seed=spec.seed,
        compute_dtype=compute_dtype,
        device=device,
        cache=cache,
    )
    check_gathered_weights(built.model, compute_dtype)
    built.model.train()
    padded_because = settle_attention(built.model, device, compute_dtype)
    checkpointed = options.checkpointing != "none"
    outer = [module for module in outer if module not in built.layers]
    if images is not None:
        take_images(built.model, images)
    lanes = LaneModel(built.model, built.layers, outer, checkpointed=checkpointed)
    return ResidentBase(lanes, built, loaded, identified, padded_because)
