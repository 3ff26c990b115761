"""Whole tiny models on the device against an fp32 reference of stock parts on a processor:
families, formats, options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.jobs import (
    adapter_bytes,
    alone,
    losses_of,
    prepare,
    steps_alone,
    train_on,
    warnings_of,
)
from benchmarks.gpu_report.sections import Context
from ft_service.data.tokens.tokenize import load_dataset, load_tokenizer
from ft_service.spec import DataFileRef, JobSpec
from tests.support.training.models import (
    ATTENTION,
    MIXED_IN_FAMILIES,
    reference,
    save_chats,
    save_tiny,
    save_tokenizer,
    spec_for,
)
from workers.base.load import initial_adapter, plain_name
from workers.data.batches import batch_of_step

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "qwen3", "gemma2")
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "nf4": {"default": "nf4"},
    "fp8": {"default": "fp8", "fp8_products": "off"},
    "mixed": MIXED_IN_FAMILIES,
}
STEPS = 3
BATCH = 4
RATE = 1e-2
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a step's loss, by the type of the arithmetic.

The last steps' losses show the gradients.
"""


def measure(context: Context) -> None:
    """Eager cases of all families first: compiling takes most of the time."""
    families = FAMILIES[: 1 if context.tiny else None]
    data = save_chats(context.scratch / "chats.jsonl", 16)
    with alone():
        for family in families:
            for case in eager_cases(context.tiny):
                run(context, family, data, *case)
            again = job(chat_base(context, family), data, family, "bf16", FORMATS["mixed"], {})
            context.rows.run(f"{family}: twice", lambda s=again, f=family: same_bits(context, s, f))
        for family in () if context.tiny else families:
            for stored, compute in (("nf4", "bf16"), ("bf16", "fp32")):
                run(context, family, data, stored, compute, {"compile": True})


def eager_cases(tiny: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """Format, type of the arithmetic, and options: every format in both types, and
    checkpointing.
    """
    formats = ["mixed"] if tiny else list(FORMATS)
    found: list[tuple[str, str, dict[str, Any]]] = [
        (stored, compute, {})
        for stored in formats
        for compute in (("fp32",) if tiny else ("fp32", "bf16"))
    ]
    return found + [
        ("mixed", "fp32", {"activation_checkpointing": mode}) for mode in ("full", "selective")
    ]


def run(
    context: Context,
    family: str,
    data: DataFileRef,
    stored: str,
    compute: str,
    distributed: dict[str, Any],
) -> None:
    how = "compiled" if distributed.get("compile") else " ".join(map(str, distributed.values()))
    name = f"{family}: {stored} {compute} {how}".strip()
    spec = job(chat_base(context, family), data, family, compute, FORMATS[stored], distributed)
    context.rows.run(name, lambda: agree(context, spec, compute, name))


def chat_base(context: Context, family: str) -> Path:
    folder = context.scratch / f"tiny-{family}"
    if not folder.exists():
        save_tiny(family, folder, vocab_size=259, max_position_embeddings=256)
        save_tokenizer(folder)
    return folder


def job(
    base: Path,
    data: DataFileRef,
    family: str,
    compute: str,
    precision: dict[str, Any],
    distributed: dict[str, Any],
) -> JobSpec:
    return spec_for(
        base,
        data,
        precision={**precision, "compute": compute},
        training={
            "max_steps": STEPS,
            "batch_size": BATCH,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
        },
        lora={
            "r": 4,
            "target_modules": ATTENTION if family in ("qwen3_moe", "gpt_oss") else "all-linear",
        },
        distributed=distributed,
        checkpoint={"save_steps": 10_000},
    )


def agree(context: Context, spec: JobSpec, compute: str, name: str) -> dict[str, Any]:
    directory = prepare(context.scratch / "runs" / name.replace(": ", "-").replace(" ", "-"), spec)
    with steps_alone():
        train_on(context.place, directory)
    found = losses_of(directory)
    expected = reference_losses(spec)
    apart = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    fell = expected[0] - expected[-1]
    return {
        "ok": apart < CLOSE[compute],
        "loss_apart": apart,
        "loss_changed_by": fell,
        "note": warnings_of(directory),
    }


def same_bits(context: Context, spec: JobSpec, family: str) -> dict[str, Any]:
    """Two runs of a job in bf16, as a resumed one is compared with one that was not."""
    runs = [
        prepare(context.scratch / "runs" / f"{family}-{name}", spec) for name in ("once", "twice")
    ]
    for directory in runs:
        train_on(context.place, directory)
    return {"ok": adapter_bytes(runs[0]) == adapter_bytes(runs[1])}


def reference_losses(spec: JobSpec) -> list[float]:
    """The losses of the job's steps by stock linears on dequantised weights, stock PEFT and AdamW,
    in fp32 on a processor.
    """
    model = reference(Path(spec.model.path), spec)
    trained = [
        (plain_name(name), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    with torch.no_grad():
        for name, parameter in trained:
            parameter.copy_(initial_adapter(name, tuple(parameter.shape), spec.seed))
    assert spec.training_data is not None
    samples = list(
        load_dataset(load_tokenizer(spec.model.path), spec.training_data, spec.training.max_length)
    )
    options = spec.training
    optimizer = torch.optim.AdamW(
        [p for _, p in trained], lr=options.rate, weight_decay=options.weight_decay
    )
    losses = []
    for step in range(options.max_steps or 0):
        total = torch.zeros(())
        targets = 0
        for i in batch_of_step(step, len(samples), options.batch, spec.seed):
            ids = torch.from_numpy(samples[i].ids).long()
            is_target = torch.from_numpy(samples[i].targets)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(
                logits[is_target], ids[1:][is_target], reduction="sum"
            )
            targets += int(is_target.sum())
        (total / targets).backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / targets)
    return losses
