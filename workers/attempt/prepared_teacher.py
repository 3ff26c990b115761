"""The teacher of an attempt: a tuned model's adapter, or another base, sharded and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ft_service.bases.cache_folder import Cache
from ft_service.plan.teacher import refuse_other_vocabulary, teaching_spec
from ft_service.rundir.manifest import ORIGINS, Origins
from ft_service.spec import DistillationOptions, JobSpec
from ft_service.spec.teachers import TeacherRef, refused_teacher
from workers.attempt.prepared_model import PreparedModel, cached_description
from workers.base.load import load
from workers.base.rank_objects import on_all
from workers.model.build import build_base
from workers.model.probes import Probed
from workers.output.report import Reporter
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import COMPUTE_DTYPE, Runtime
from workers.ranks.sharding import shard
from workers.training.packing import settle_attention
from workers.training.teachers import Teacher, adapter_as_teacher


def prepare_teacher(
    runtime: Runtime, reporter: Reporter, prepared: PreparedModel, *, pictured: bool
) -> tuple[Teacher, str | None]:
    """The teacher of a job, and why samples are padded, if they are. Called by all ranks together,
    once the job's base is known.

    Raises SpecError for a teacher that does not fit.
    """
    ref = runtime.spec.teacher
    if ref is None or ref.kind == "server":
        return Teacher(), prepared.padded_because
    if ref.kind == "adapter":
        model, dtype = prepared.built.peft_model, runtime.compute_dtype
        origins = runtime.run.read(ORIGINS, Origins)
        assert origins is not None, "they are written before"
        digest = origins.base.digest
        teacher = on_all(lambda: adapter_as_teacher(model, ref, digest, dtype, runtime.device))
        return teacher, prepared.padded_because
    if pictured:
        raise refused_teacher(
            ref.name, "samples have images, of which another base makes other features"
        )
    teacher, padded = _other_base(runtime, reporter, ref)
    return teacher, prepared.padded_because or padded


def _other_base(
    runtime: Runtime, reporter: Reporter, ref: TeacherRef
) -> tuple[Teacher, str | None]:
    on_all(lambda: refuse_other_vocabulary(runtime.spec))
    described = cached_description(ref.path)
    probed = None if described is None else Probed.of(described)
    cache = Cache.from_environment(os.environ)
    model = teaching_base(
        runtime.spec, ref, runtime.mesh, runtime.device, probed, cache, reporter.heartbeat
    )
    reporter.message(f"The teacher is {ref.name}, held beside the job's base.")
    return Teacher(base=model), settle_attention(model, runtime.device, runtime.compute_dtype)


def teaching_base(
    spec: JobSpec,
    ref: TeacherRef,
    mesh: DeviceMesh,
    device: torch.device,
    probed: Probed | None = None,
    cache: Cache | None = None,
    tell: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """Another base than the job's, sharded as that and loaded. `probed`, `cache`, `tell`: as in
    `construct`. Called by all ranks together.
    """
    own = teaching_spec(spec, ref.path, ref.name)
    compute_dtype = COMPUTE_DTYPE[own.precision.compute]
    built = build_base(own, device, probed)
    model = built.model.eval()
    shard(model, built.layers, mesh, own.distributed, compute_dtype)
    load(
        model,
        ref.path,
        seed=own.seed,
        compute_dtype=compute_dtype,
        device=device,
        offload=own.distributed.offload,
        cache=cache,
        tell=tell,
    )
    head: Any = model.get_output_embeddings()
    needs_head = isinstance(spec.loss, DistillationOptions) and spec.loss.top_k is None
    if needs_head and isinstance(local_rows(head.weight.detach()), RowQuantized):
        raise refused_teacher(
            ref.name,
            "its output head is published quantised; give method.distillation.top_k, with which it "
            "is not gathered whole",
        )
    return model
