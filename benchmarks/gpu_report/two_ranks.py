"""Two processes on one device, which talk by gloo (NCCL wants a device a rank): shares of rows,
formats, offload, resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_report.jobs import losses_of, prepare, train_on_rank, warnings_of
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context
from ft_service.rundir.checkpoints import newest_checkpoint
from ft_service.rundir.directory import RunDir
from ft_service.spec import DataFileRef, JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import MIXED_IN_FAMILIES, save_chat_base, save_chats, spec_for

STEPS = 4
CLOSE = 1e-5
"""Largest relative difference of a step's loss from that of one rank, in fp32."""
CASES: dict[str, dict[str, Any]] = {
    "mixed formats, offloaded": {"precision": MIXED_IN_FAMILIES, "distributed": {"offload": True}},
    "bf16, uneven rows": {},
    "nf4": {"precision": {"default": "nf4"}},
    "mixed formats": {"precision": MIXED_IN_FAMILIES},
    "mixed formats, kept unsharded": {
        "precision": MIXED_IN_FAMILIES,
        "distributed": {"keep_unsharded": True},
    },
    "mixed formats, compiled": {"precision": MIXED_IN_FAMILIES, "distributed": {"compile": True}},
}


def measure(context: Context) -> None:
    base = save_chat_base(context.scratch / "two-ranks-base")
    data = save_chats(context.scratch / "two-ranks.jsonl", 16)
    for number, (case, options) in enumerate(CASES.items()):
        if context.tiny and "kept" not in case and "offloaded" not in case:
            continue
        context.rows.run(case, lambda n=number, o=options: like_one_rank(context, base, data, n, o))
    context.rows.run("saved on two ranks, resumed on one", lambda: resumed(context, base, data))


def like_one_rank(
    context: Context, base: Path, data: DataFileRef, number: int, options: dict[str, Any]
) -> dict[str, Any]:
    offload = options.get("distributed", {}).get("offload", False)
    if offload and not context.on_gpu:
        raise SkippedError("on processors there is nowhere to offload to")
    one = run(
        context, f"one-{number}", job(base, data, 1, {"precision": options.get("precision", {})}), 1
    )
    two = run(context, f"two-{number}", job(base, data, 2, options), 2)
    return compared(losses_of(two), losses_of(one)) | {"note": warnings_of(two)}


def resumed(context: Context, base: Path, data: DataFileRef) -> dict[str, Any]:
    options = {"precision": MIXED_IN_FAMILIES}
    whole = run(context, "whole", job(base, data, 1, options), 1)
    half = run(context, "half", job(base, data, 2, options, steps=STEPS // 2), 2)
    checkpoint = newest_checkpoint(half)
    assert checkpoint is not None, "two ranks have written no checkpoint"
    prepare(half.root, job(base, data, 1, options), 1, checkpoint, attempt=2)
    half.path("result.json").unlink(missing_ok=True)
    run_on_ranks(train_on_rank, 1, str(half.root), 2, context.device)
    return compared([*losses_of(half), *losses_of(half, 2)], losses_of(whole))


def run(context: Context, name: str, spec: JobSpec, world: int) -> RunDir:
    directory = prepare(context.scratch / "runs" / f"ranks-{name}", spec, world)
    run_on_ranks(train_on_rank, world, str(directory.root), 1, context.device)
    return directory


def compared(found: list[float], expected: list[float]) -> dict[str, Any]:
    apart = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    return {"ok": apart < CLOSE, "loss_apart": apart, "loss_changed_by": expected[0] - expected[-1]}


def job(
    base: Path, data: DataFileRef, ranks: int, options: dict[str, Any], steps: int = STEPS
) -> JobSpec:
    return spec_for(
        base,
        data,
        ranks=ranks,
        gpus=1,
        precision={**options.get("precision", {}), "compute": "fp32"},
        distributed=options.get("distributed", {}),
        training={
            "max_steps": steps,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
        },
        lora={"r": 4},
    )
