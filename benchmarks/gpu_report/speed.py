"""Tokens a second and peak memory of our jobs on an 8B model, next to the arithmetic limit and the
plan.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.gpu_report.arithmetic import Work
from benchmarks.gpu_report.ceilings import synchronize, tflops_of
from benchmarks.gpu_report.jobs import (
    alone,
    built_once,
    losses_of,
    prepare,
    steps_alone,
    steps_of,
    train_on,
    warnings_of,
)
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed_job import RANK, Shape, job, llama_of, shapes_of
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from ft_service.rundir.directory import RunDir
from ft_service.spec import JobSpec
from tests.support.bases import describe

LIMITS = ("H100", "H200")
"""Machines whose data sheet gives a number of tokens a second that none can reach."""
WARM_UP = 3
STEPS = 8


def measure(context: Context, precision: str, how: str) -> None:
    """`how`: eager or compiled."""
    if context.tiny and how == "compiled" and not context.on_gpu:
        context.rows.add(
            "-", "skipped", "compiling takes minutes on a processor; not in the smallest form"
        )
        return
    with alone(), steps_alone(), built_once(reset_peak):
        for shape in shapes_of(context):
            spec = job(
                context,
                shape,
                precision,
                WARM_UP + (2 if context.tiny else STEPS),
                compiled=how == "compiled",
            )
            name = f"{precision}-{how}-{shape.tokens}"
            work = work_of(context, shape)
            context.rows.run(
                f"{precision}, {how}, {shape}",
                lambda s=spec, n=name, w=work: speed(context, s, w, n),
            )


def reset_peak() -> None:
    """Peaks are a training's: loading is over."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def speed(
    context: Context, spec: JobSpec, work: float, name: str, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """`work`: FLOP a token. `name`: of the run's folder. `warm_up`: steps that do not count."""
    run = prepare(context.scratch / "runs" / name, spec)
    train_on(context.place, run)
    synchronize()
    found = figures(context, rate_of(run, warm_up), work)
    plan = plan_job(describe(spec.model.path), spec, MACHINES["H200"])
    planned = plan.rank.total
    if plan.speed is not None:
        found["planned_tokens_per_s"] = plan.speed.tokens_per_second
    if context.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        found |= {
            "peak_gib": peak / 2**30,
            "planned_gib": planned / 2**30,
            "peak_of_plan": peak / planned,
        }
    else:
        found["planned_gib"] = planned / 2**30
    return found | {"loss": losses_of(run)[-1], "note": warnings_of(run)}


def rate_of(run: RunDir, warm_up: int = WARM_UP) -> float:
    """Tokens a second of the median step after the first ones, by the device's own clock: steps are
    reported late.
    """
    steps = [metrics for _, metrics in steps_of(run)][warm_up:]
    return median(
        (metrics.tokens or 0) / max(metrics.step_seconds or 0.0, 1e-9) for metrics in steps
    )


def work_of(context: Context, shape: Shape) -> float:
    """FLOP a token of the 8B."""
    return Work.of(llama_of(context), RANK).flops_per_token(shape.length)


def figures(context: Context, tokens_per_second: float, work: float) -> dict[str, Any]:
    """Tokens a second, and their share of what the measured matrix products allow.

    `work`: FLOP a token.
    """
    ceiling = tflops_of(context)
    found = {"tokens_per_s": tokens_per_second, "tflops": work * tokens_per_second / 1e12}
    found |= {f"limit_{name}": (MACHINES[name].flops or 0) / work for name in LIMITS}
    return found | ({"share_of_limit": found["tflops"] / ceiling} if ceiling else {})
