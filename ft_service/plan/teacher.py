"""A teacher beside a job's base: its bytes on each rank, and the FLOP of its forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ft_service.bases.description import Description
from ft_service.bases.vocabulary import vocabulary_digest
from ft_service.plan.weight_storage import (
    ShardedJob,
    adapters_of,
    groups_of,
    layout_of,
    stored_weights,
)
from ft_service.spec import JobSpec, PrecisionOptions
from ft_service.spec.teachers import refused_teacher


def described_job(spec: JobSpec, describe: Callable[[Path], Description]) -> Description:
    """The description of a job's base, with that of the base which teaches it, if there is one.

    Raises what `describe` does, and SpecError for a teacher with another tokenizer.
    """
    base = describe(Path(spec.model.path))
    teacher = spec.teacher
    if teacher is None or teacher.kind != "base":
        refuse_other_vocabulary(spec)
        return base
    return _taught(base, _comparable(spec, describe(Path(teacher.path))))


def _comparable(spec: JobSpec, teacher: Description) -> Description:
    refuse_other_vocabulary(spec)
    return teacher


def refuse_other_vocabulary(spec: JobSpec) -> None:
    """Raise SpecError unless another base that teaches has the tokenizer of the job's base: words
    are compared by their ids.
    """
    teacher = spec.teacher
    if teacher is None or teacher.kind == "adapter":
        return
    theirs, ours = (vocabulary_digest(Path(path)) for path in (teacher.path, spec.model.path))
    if theirs != ours or not ours:
        raise refused_teacher(
            teacher.name,
            f"its tokenizer has another vocabulary ({theirs[:12] or 'none'}) than that of "
            f"{spec.model.name} ({ours[:12] or 'none'}), and probabilities are compared id by id",
        )


@lru_cache(maxsize=32)
def _taught(base: Description, teacher: Description) -> Description:
    """The same object each time, since caches have descriptions as keys."""
    return replace(base, teacher=teacher)


def teaching_spec(spec: JobSpec, path: str, name: str) -> JobSpec:
    """The spec by which ranks hold a base that teaches: in the job's default format, shared as the
    job's base is, without options that name the student's modules.
    """
    precision = PrecisionOptions(
        default=spec.precision.default,
        compute=spec.precision.compute,
        fused_kernels=spec.precision.fused_kernels,
        deterministic_attention=spec.precision.deterministic_attention,
    )
    distributed = spec.distributed.model_copy(
        update={"ignored": [], "prefetch": None, "activation_checkpointing": "none"}
    )
    model = spec.model.model_copy(update={"path": path, "name": name})
    return spec.model_copy(
        update={"model": model, "precision": precision, "distributed": distributed}
    )


def teaching_job(job: ShardedJob) -> ShardedJob | None:
    """The base that teaches, as ranks hold it; None: the job's own base does."""
    ref, teacher = job.spec.teacher, job.base.teacher
    if ref is None or ref.kind != "base" or teacher is None:
        return None
    spec = teaching_spec(job.spec, ref.path, ref.name)
    layout = layout_of(spec)
    frozen = stored_weights(teacher, spec, layout)
    return ShardedJob(teacher, spec, layout, tuple(frozen), (), tuple(groups_of(frozen, (), spec)))


def teaching_adapter_bytes(job: ShardedJob) -> int:
    """Bytes of a teacher's adapter, which every rank holds whole in the compute dtype."""
    ref = job.spec.teacher
    if ref is None or ref.lora is None:
        return 0
    shapes = adapters_of(job.base, job.spec.model_copy(update={"lora": ref.lora}))
    return job.compute_bytes * sum(shape.numel for shape in shapes)
