"""The teacher of a distillation job as its ranks find it."""

from __future__ import annotations

from typing import Literal

from ft_service.errors import SpecError
from ft_service.spec.option_types import Strict
from ft_service.spec.options import LoraOptions, PrecisionOptions
from ft_service.wording import shown_value

PLACE = "method.distillation.teacher"
"""The option that names a teacher."""


class TeacherRef(Strict):
    """A teacher beside the job's base: a tuned model on that base, or another base."""

    kind: Literal["adapter", "base", "server"]
    """adapter: a tuned model, whose adapter lies on the job's base beside the student's. server: a
    base that inference servers are asked about (FT_TEACHER_URL), of which ranks hold nothing.
    """
    name: str
    """A TunedName, or the name in `GET /v1/models`."""
    path: str
    """Absolute folder, as the worker sees it: PEFT's two files with their manifest, or a base; of
    one that servers are asked about only the tokenizer is read.
    """
    job_id: str | None = None
    """The job that trained the adapter."""
    lora: LoraOptions | None = None
    """Options of the adapter."""


def adapter_fault(teacher: LoraOptions, served: PrecisionOptions, own: LoraOptions) -> str | None:
    """Why ranks cannot hold a teacher's adapter beside the job's, as the end of a sentence; None:
    they can. `served`: what the teacher was trained with; `own`: the job's.
    """
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if given := getattr(teacher, name, None):
            return (
                f"its lora.{name} is {shown_value(given)}, and beside the student's adapter ranks "
                "hold A and B of linear layers only"
            )
    if served.served_as is not None:
        return (
            f"it was trained for precision.served_as = {served.served_as}, and here its adapter "
            "lies on the base without rounding"
        )
    wanted = own.target_modules
    if wanted != "all-linear" and wanted != teacher.target_modules:
        return (
            f"it adapts lora.target_modules = {shown_value(teacher.target_modules)}, and this job "
            f"{shown_value(wanted)}: take the same, or all-linear"
        )
    return None


def refused_teacher(name: str, why: str) -> SpecError:
    """The error of a teacher that ranks cannot hold. `why`: the end of a sentence."""
    return SpecError(
        f"{PLACE} = {shown_value(name)}: {why}. To learn from it all the same, have it answer the "
        "prompts and train on its answers (method.type: supervised).",
        param=PLACE,
        code="not_available",
    )
