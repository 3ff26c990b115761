"""The teacher of an attempt: a tuned model's adapter, or another base, sharded and loaded."""

from __future__ import annotations

import os

from ft_service.bases.cache_folder import Cache
from ft_service.plan.teacher import refuse_other_vocabulary, teaching_spec
from ft_service.rundir.manifest import ORIGINS, Origins
from ft_service.spec import DistillationOptions
from ft_service.spec.teachers import TeacherRef, refused_teacher
from workers.attempt.prepared_model import PreparedModel, cached_description
from workers.base.load import load
from workers.base.rank_objects import on_all
from workers.model.build import build_base
from workers.model.probes import Probed
from workers.output.report import Reporter
from workers.quant.local_rows import local_rows
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import Runtime
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
    if ref is None:
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
    spec = teaching_spec(runtime.spec, ref.path, ref.name)
    described = cached_description(ref.path)
    built = build_base(spec, runtime.device, None if described is None else Probed.of(described))
    model = built.model.eval()
    shard(model, built.layers, runtime.mesh, spec.distributed, runtime.compute_dtype)
    load(
        model,
        ref.path,
        seed=spec.seed,
        compute_dtype=runtime.compute_dtype,
        device=runtime.device,
        offload=spec.distributed.offload,
        cache=Cache.from_environment(os.environ),
        tell=reporter.heartbeat,
    )
    head = local_rows(model.get_output_embeddings().weight.detach())
    loss = runtime.spec.loss
    needs_head = isinstance(loss, DistillationOptions) and loss.top_k is None
    if needs_head and isinstance(head, RowQuantized):
        raise refused_teacher(
            ref.name,
            "its output head is published quantised; give method.distillation.top_k, with which it "
            "is not gathered whole",
        )
    reporter.message(f"The teacher is {ref.name}, held beside the job's base.")
    return Teacher(base=model), settle_attention(model, runtime.device, runtime.compute_dtype)
