"""Whole tiny models on the device against an fp32 reference of stock parts on a processor: families, formats, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.jobs import adapter_bytes, alone, losses_of, prepare, train_on, warnings_of
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

FAMILIES = ("llama", "gemma2", "qwen3", "qwen3_moe", "gpt_oss")
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "nf4": {"default": "nf4"},
    "fp8": {"default": "fp8", "fp8_products": "off"},
    "mixed": MIXED_IN_FAMILIES,
}
STEPS, BATCH, RATE = 3, 4, 1e-2
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a step's loss, by the type of the arithmetic. The last steps' losses show the gradients."""


def measure(context: Context) -> None:
    device = torch.device(context.device)
    data = save_chats(context.scratch / "chats.jsonl", 16)
    with alone():
        for family in FAMILIES[: 1 if context.tiny else None]:
            base = chat_base(context.scratch / f"tiny-{family}", family)
            for name, precision in cases(context.tiny):
                compute, options = precision["compute"], precision["distributed"]
                spec = job(base, data, family, compute, precision["format"], options)
                context.rows.run(
                    f"{family}: {name}", lambda s=spec, c=compute, n=f"{family}-{name}": agree(context, s, c, device, n)
                )
            again = job(base, data, family, "bf16", FORMATS["mixed"], {})
            context.rows.run(f"{family}: twice", lambda s=again, f=family: same_bits(context, s, device, f))


def cases(tiny: bool) -> list[tuple[str, dict[str, Any]]]:
    """Every format in both types; what changes how a step is computed with the plain and the mixed base."""
    formats = ["mixed"] if tiny else list(FORMATS)
    found = [(f, compute, {}) for f in formats for compute in (("fp32",) if tiny else ("fp32", "bf16"))]
    checkpointing = [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}]
    found += [("mixed", "fp32", options) for options in checkpointing]
    found += [] if tiny else [(f, "fp32", {"compile": True}) for f in ("bf16", "nf4")]
    return [
        (
            " ".join([f, compute, *map(str, options.values() if "compile" not in options else ["compiled"])]),
            {"format": FORMATS[f], "compute": compute, "distributed": options},
        )
        for f, compute, options in found
    ]


def chat_base(folder: Path, family: str) -> Path:
    if not folder.exists():
        save_tiny(family, folder, vocab_size=259, max_position_embeddings=256)
        save_tokenizer(folder)
    return folder


def job(
    base: Path, data: DataFileRef, family: str, compute: str, precision: dict[str, Any], distributed: dict[str, Any]
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
        lora={"r": 4, "target_modules": ATTENTION if family in ("qwen3_moe", "gpt_oss") else "all-linear"},
        distributed=distributed,
        checkpoint={"save_steps": 10_000},
    )


def agree(context: Context, spec: JobSpec, compute: str, device: torch.device, name: str) -> dict[str, Any]:
    run = prepare(context.scratch / "runs" / name.replace(" ", "-"), spec)
    train_on(device, run)
    found, expected = losses_of(run), reference_losses(spec)
    apart = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    fell = expected[0] - expected[-1]
    return {"ok": apart < CLOSE[compute], "loss_apart": apart, "loss_changed_by": fell, "note": warnings_of(run)}


def same_bits(context: Context, spec: JobSpec, device: torch.device, family: str) -> dict[str, Any]:
    """Two runs of a job in bf16, as a resumed one is compared with one that was not."""
    runs = [prepare(context.scratch / "runs" / f"{family}-{name}", spec) for name in ("once", "twice")]
    for run in runs:
        train_on(device, run)
    return {"ok": adapter_bytes(runs[0]) == adapter_bytes(runs[1])}


def reference_losses(spec: JobSpec) -> list[float]:
    """The losses of the job's steps by stock linears on dequantised weights, stock PEFT and AdamW, in fp32 on a processor."""
    model = reference(Path(spec.model.path), spec)
    trained = [(plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for name, parameter in trained:
            parameter.copy_(initial_adapter(name, tuple(parameter.shape), spec.seed))
    assert spec.training_data is not None
    samples = list(load_dataset(load_tokenizer(spec.model.path), spec.training_data, spec.training.max_length))
    options = spec.training
    optimizer = torch.optim.AdamW([p for _, p in trained], lr=options.rate, weight_decay=options.weight_decay)
    losses = []
    for step in range(options.max_steps or 0):
        total, targets = torch.zeros(()), 0
        for i in batch_of_step(step, len(samples), options.batch, spec.seed):
            ids, is_target = torch.from_numpy(samples[i].ids).long(), torch.from_numpy(samples[i].targets)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(logits[is_target], ids[1:][is_target], reduction="sum")
            targets += int(is_target.sum())
        (total / targets).backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / targets)
    return losses
