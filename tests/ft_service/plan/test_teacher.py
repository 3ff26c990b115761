"""A base that teaches is held as the job's own, without what names the student's modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_service.plan.teacher import teaching_spec
from tests.support.bases import save_base, spec_on


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
