"""A base that teaches is held as the job's own, without what names the student's modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.plan.teacher import (
    described_job,
    teaching_adapter_bytes,
    teaching_job,
    teaching_spec,
)
from ft_service.plan.weight_storage import ShardedJob
from ft_service.spec import JobSpec
from ft_service.spec.options import LoraOptions
from ft_service.spec.teachers import TeacherRef
from tests.support.bases import save_base, spec_on
from tests.support.plans import made_base


def test_a_teaching_base_is_held_as_the_job_s_but_for_what_names_its_modules(
    tmp_path: Path,
) -> None:
    precision: dict[str, Any] = {"default": "nf4", "compute": "fp32", "overrides": {".*": "fp8"}}
    distributed: dict[str, Any] = {
        "replicate": 2,
        "ignored": [r".*norm\.weight"],
        "prefetch": {"forward": 2},
        "activation_checkpointing": "full",
    }
    spec = spec_on(save_base(tmp_path), 2, precision=precision, distributed=distributed)
    taught = teaching_spec(spec, "/teacher", "teacher")
    assert (taught.model.path, taught.model.name) == ("/teacher", "teacher")
    assert (taught.precision.default, taught.precision.compute) == ("nf4", "fp32")
    assert taught.precision.fused_kernels == spec.precision.fused_kernels
    assert (spec.precision.overrides, taught.precision.overrides) == ({".*": "fp8"}, {})
    own = taught.distributed
    assert (own.replicate, own.ignored, own.prefetch) == (2, [], None)
    assert own.activation_checkpointing == "none"
    assert taught.training == spec.training


def with_vocabulary(folder: Path, ids: dict[str, int] | None) -> Path:
    folder.mkdir()
    if ids is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    return folder


def taught_spec(folder: Path, kind: Any, path: Path, **lora: Any) -> JobSpec:
    method = {"type": "distillation", "distillation": {"with_context": "x"}}
    spec = spec_on(folder, 2, method=method, lora={"r": 4}, precision={"compute": "bf16"})
    own = LoraOptions(**lora) if lora else None
    ref = TeacherRef(kind=kind, name="t", path=str(path), lora=own)
    assert spec.loss is not None
    return spec.model_copy(update={"loss": spec.loss.model_copy(update={"teacher": ref})})


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "refused"),
    [
        ("base", {"a": 0}, {"a": 0}, False),
        ("base", {"a": 0}, {"a": 1}, True),
        ("base", None, None, True),
        ("base", {"a": 0}, None, True),
        ("server", {"a": 0}, {"a": 0}, False),
        ("server", {"a": 0}, {"a": 1}, True),
        ("adapter", {"a": 0}, {"a": 1}, False),
    ],
)
def test_only_words_of_one_vocabulary_are_compared(
    kind: str, ours: dict[str, int], theirs: dict[str, int], refused: bool, tmp_path: Path
) -> None:
    folder = with_vocabulary(tmp_path / "own", ours)
    spec = taught_spec(folder, kind, with_vocabulary(tmp_path / "other", theirs))
    bases = {"own": made_base(), "other": made_base(layers=2)}
    if refused:
        with pytest.raises(SpecError, match=r"another vocabulary \(\w+\) than that of m \(\w+\)"):
            described_job(spec, lambda path: bases[path.name])
        return
    found = described_job(spec, lambda path: bases[path.name])
    assert found.teacher is (bases["other"] if kind == "base" else None)
    assert found.dimensions == bases["own"].dimensions
    again = described_job(spec, lambda path: bases[path.name])
    assert again is found, "descriptions are keys of caches"


def test_what_a_teacher_is_held_with_beside_the_base(tmp_path: Path) -> None:
    """Another base in the job's format without adapters; of a tuned model its whole adapter."""
    teacher = made_base(layers=2, hidden=32, vocabulary=500)
    base = made_base(teacher=teacher)
    spec = taught_spec(tmp_path, "base", Path("/teacher"))
    own = teaching_job(ShardedJob.of(base, spec))
    assert own is not None
    assert (own.base, own.spec.model.path, own.adapters) == (teacher, "/teacher", ())
    assert [weight.weight for weight in own.frozen] == list(teacher.weights)
    assert (own.layout.shard, own.frozen[0].format) == (2, "bf16")
    names = ["embedding", "layer 0", "layer 1", "norm and head"]
    assert [group.name for group in own.groups] == names
    assert teaching_adapter_bytes(ShardedJob.of(base, spec)) == 0
    assert teaching_job(ShardedJob.of(made_base(), spec)) is None
    tuned = ShardedJob.of(base, taught_spec(tmp_path, "adapter", Path("/t"), r=3))
    assert teaching_job(tuned) is None
    numbers = 3 * 3 * (2 * (128 + 64) + 2 * (64 + 64) + 3 * (512 + 64))
    assert teaching_adapter_bytes(tuned) == 2 * numbers
    alone = ShardedJob.of(base, spec_on(tmp_path))
    assert (teaching_job(alone), teaching_adapter_bytes(alone)) == (None, 0)
