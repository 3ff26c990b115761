"""The model of an attempt: built on meta, sharded, loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ft_service.bases.cache_folder import FOLDER as FT_CACHE
from ft_service.bases.cache_folder import Cache
from ft_service.bases.describing import DESCRIPTIONS, Descriptions, versions_name
from ft_service.bases.description import Description, Versions
from ft_service.rundir.directory import RunDir
from ft_service.spec import JobSpec
from workers.base.load import adapters, load
from workers.job.origins import IdentifiedBase
from workers.model.activation_checkpointing import checkpoint_activations
from workers.model.build import BuiltModel, balance_note, build
from workers.model.compiling import compile_layers
from workers.model.kernel_faults import kernel_faults
from workers.model.offloaded_inputs import copies_for
from workers.model.probes import Probed
from workers.output.report import Reporter
from workers.ranks.runtime import (
    COMPUTE_DTYPE,
    Runtime,
)
from workers.ranks.sharding import Gradients, shard
from workers.training.context import Wait
from workers.training.guards import check_gathered_weights
from workers.training.packing import settle_attention
from workers.training.shared_rows_trial import refuse_if_unlike


@dataclass(frozen=True)
class PreparedModel:
    """The model of an attempt, loaded and checked."""

    built: BuiltModel
    parameters: Mapping[str, nn.Parameter]
    """The adapters that are trained, fp32, by their plain names."""
    padded_because: str | None
    """Why samples are padded (`settle_attention`); None: they may be packed."""
    gradients: Gradients
    changed: Callable[[], None] | None = None
    """To be called after each change of the parameters; None: nothing follows from them."""
    resident: IdentifiedBase | None = None
    """The base that other jobs train on too, as it was when it was loaded; None: the job has its
    own.
    """
    wait: Wait | None = None
    """`TrainingContext.wait`."""


Prepare = Callable[[Runtime, Reporter, Probed | None], PreparedModel]
"""Builds and loads the model of an attempt.

Called by all ranks together. The third argument: facts about the base; None: they are not known.
"""


def prepare_alone(runtime: Runtime, reporter: Reporter, probed: Probed | None) -> PreparedModel:
    """The model of a job that has its ranks to itself (`Prepare`), sharded, with what was done
    reported.
    """
    spec = runtime.spec
    cache = Cache.from_environment(os.environ)
    built = construct(
        spec, runtime.mesh, runtime.device, reporter.warn, cache, probed, reporter.heartbeat
    )
    report_built(spec, built, runtime.device, reporter)
    model = built.peft_model
    check_gathered_weights(model, runtime.compute_dtype)
    model.train()
    padded_because = settle_attention(model, runtime.device, runtime.compute_dtype)
    refuse_if_unlike(model, runtime.context, padded_because, runtime.device, runtime.compute_dtype)
    gradients = Gradients(model, runtime.world, keep_unsharded=spec.distributed.keep_unsharded)
    return PreparedModel(built, dict(adapters(model)), padded_because, gradients)


def report_built(
    spec: JobSpec, built: BuiltModel, device: torch.device, reporter: Reporter
) -> None:
    """Report what loading did, what is to be known of the base, and what is computed more slowly
    than it could be.
    """
    for note in (balance_note(spec.model.path), *built.arithmetic.notes):
        if note is not None:
            reporter.message(note)
    for level, text in built.loaded.messages() if built.loaded else ():
        reporter.message(text, level)
    for level, text in kernel_faults(spec, built, device):
        reporter.message(text, level)


def cached_description(path: str) -> Description | None:
    """The description of a base in the cache of this host (FT_CACHE) by the same versions; None if
    there is none.
    """
    folder = os.environ.get(FT_CACHE)
    if not folder:
        return None
    try:
        versions = versions_name(Versions.installed())
    except LookupError:  # run from a source tree that is not installed
        return None
    described = Descriptions(RunDir(Path(folder) / DESCRIPTIONS), versions).known(Path(path))
    return None if described is None else described.base


def construct(
    spec: JobSpec,
    mesh: DeviceMesh,
    device: torch.device,
    warn: Callable[[str], None],
    cache: Cache | None = None,
    probed: Probed | None = None,
    tell: Callable[[], None] = lambda: None,
) -> BuiltModel:
    """The model of a job, sharded over the mesh and loaded. Called by all ranks together.

    `warn` is called with a sentence for each fallback, `tell` now and then while weights are read.
    `cache`: of quantised bases. `probed`: facts about the base; None: it is probed here, which
    takes seconds.
    """
    options = spec.distributed
    compute_dtype = COMPUTE_DTYPE[spec.precision.compute]
    # On meta: formats and adapters are set before any memory is taken.
    built = build(spec, device, probed)
    checkpoint_activations(
        built.layers,
        options.checkpointing,
        spec.lora.r,
        compiled=options.compile is True,
        row_wise=built.row_wise,
        copies=copies_for(device) if options.checkpointing == "offload" else None,
    )
    if options.compile is True:
        # Before sharding: FSDP2's hooks, and so the collectives, stay outside.
        compile_layers(built.layers, warn)
    # Still on meta: the largest allocation that a rank ever makes is one of its own shards.
    shard(built.peft_model, built.layers, mesh, options, compute_dtype)
    # Each rank reads and quantises its own rows, which needs the shards' shapes.
    loaded = load(
        built.peft_model,
        spec.model.path,
        seed=spec.seed,
        compute_dtype=compute_dtype,
        device=device,
        offload=options.offload,
        cache=cache,
        tell=tell,
    )
    return replace(built, loaded=loaded)
