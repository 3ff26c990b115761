"""The same work by stock parts, eager: PEFT on bitsandbytes' NF4 layers, with Liger's kernels too,
and with them on bf16.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.ceilings import synchronize
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed import STEPS, WARM_UP, figures, work_of
from benchmarks.gpu_report.speed_job import RANK, Shape, base_of, llama_of, shapes_of


def measure(context: Context, stored: str) -> None:
    """`stored`: nf4 or bf16."""
    quantised = stored == "nf4"
    for liger in (False, True) if quantised else (True,):  # Liger's kernels stay
        step_of: Callable[[Shape], Callable[[], float]] | None = None
        name = ("PEFT on bitsandbytes' NF4" if quantised else "PEFT on bf16") + (
            " with Liger's kernels" if liger else ""
        )
        for shape in shapes_of(context):
            with context.rows.case(f"{name}, eager, {shape}") as numbers:
                if quantised and importlib.util.find_spec("bitsandbytes") is None:
                    raise SkippedError("not installed: bitsandbytes")
                if liger and (
                    not context.on_gpu or importlib.util.find_spec("liger_kernel") is None
                ):
                    raise SkippedError("needs a GPU, and liger_kernel to be installed")
                stock = Stock(
                    context.device,
                    base_of(context),
                    llama_of(context).vocabulary,
                    "all-linear",
                    quantised,
                    liger,
                )
                step_of = step_of or steps(stock)
                try:
                    numbers.update(speed(context, step_of(shape), shape))
                except torch.OutOfMemoryError:  # as its users would
                    step_of = steps(replace(stock, checkpointed=True))
                    numbers.update(speed(context, step_of(shape), shape) | {"checkpointed": True})


def speed(context: Context, step: Callable[[], float], shape: Shape) -> dict[str, Any]:
    tokens_per_second, others = step_speed(context, step, shape)
    return figures(context, tokens_per_second, work_of(context, shape)) | others


def step_speed(
    context: Context, step: Callable[[], float], shape: Shape
) -> tuple[float, dict[str, Any]]:
    """Tokens a second of steps of this shape, their peak of memory and the last loss."""
    for _ in range(WARM_UP):
        step()
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    count = 2 if context.tiny else STEPS
    began = time.perf_counter()
    loss = 0.0
    for _ in range(count):
        loss = step()
    synchronize()
    tokens = count * shape.micro_batches * shape.tokens
    tokens_per_second = tokens / (time.perf_counter() - began)
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if context.on_gpu else {}
    return tokens_per_second, peak | {"loss": loss}


def rows_of(shape: Shape) -> list[list[int]]:
    """A micro-batch's samples in forwards that have at most as many tokens with padding as it has
    without.
    """
    forwards: list[list[int]] = [[]]
    for length in sorted(shape.lengths, reverse=True):
        if forwards[-1] and (len(forwards[-1]) + 1) * forwards[-1][0] > shape.tokens:
            forwards.append([])
        forwards[-1].append(length)
    return forwards


def padded(
    lengths: list[int], vocabulary: int, generator: torch.Generator, device: str
) -> dict[str, torch.Tensor]:
    """Samples as rows, padded to the first, which is the longest."""
    ids = torch.randint(0, vocabulary, (len(lengths), lengths[0]), generator=generator)
    mask = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    batch = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True)
class Stock:
    """A model of stock parts."""

    device: str
    base: Path
    vocabulary: int
    """Words that samples are drawn from."""
    target_modules: str | list[str]
    quantised: bool
    """By bitsandbytes, to NF4."""
    liger: bool = False
    checkpointed: bool = False


def steps(stock: Stock) -> Callable[[Shape], Callable[[], float]]:
    """A model with adapters, and for a shape of micro-batches its optimizer step, which returns the
    loss.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if stock.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama()  # before the model is made, which it changes the classes of

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    options: dict[str, Any] = {"quantization_config": settings} if stock.quantised else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        stock.base,
        dtype=torch.bfloat16,
        device_map={"": 0 if stock.device == "cuda" else "cpu"},
        **options,
    )
    model.config.use_cache = False
    adapters = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=stock.target_modules, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapters)
    if stock.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)

    def step_of(shape: Shape) -> Callable[[], float]:
        generator = torch.Generator().manual_seed(0)
        batches = [
            padded(rows, stock.vocabulary, generator, stock.device) for rows in rows_of(shape)
        ]

        def step() -> float:
            loss = 0.0
            for _ in range(shape.micro_batches):
                for batch in batches:
                    share = (
                        float((batch["labels"] != -100).sum()) / shape.tokens / shape.micro_batches
                    )
                    with torch.autocast(
                        stock.device, torch.bfloat16
                    ):  # as its users do: PEFT keeps adapters in fp32
                        part = model(**batch).loss * share
                    part.backward()
                    loss = part.detach() + loss
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        return step

    return step_of
