"""The same work by stock parts, eager: PEFT on bitsandbytes' NF4 layers, with Liger's kernels too, and with them on bf16."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_report.ceilings import synchronize
from benchmarks.gpu_report.rows import SkippedError
from benchmarks.gpu_report.sections import Context
from benchmarks.gpu_report.speed import STEPS, WARM_UP, figures
from benchmarks.gpu_report.speed_job import RANK, Shape, base_of, llama_of, shapes_of


def measure(context: Context) -> None:
    for quantised, liger in ((True, False), (True, True), (False, True)):  # Liger's kernels stay
        step_of: Callable[[Shape], Callable[[], float]] | None = None
        name = ("PEFT on bitsandbytes' NF4" if quantised else "PEFT on bf16") + (" with Liger's kernels" if liger else "")
        for shape in shapes_of(context):
            with context.rows.case(f"{name}, eager, {shape}") as numbers:
                if quantised and importlib.util.find_spec("bitsandbytes") is None:
                    raise SkippedError("not installed: bitsandbytes")
                if liger and (not context.on_gpu or importlib.util.find_spec("liger_kernel") is None):
                    raise SkippedError("needs a GPU, and liger_kernel to be installed")
                step_of = step_of or steps(context, quantised, liger)
                try:
                    numbers.update(speed(context, step_of(shape), shape))
                except torch.OutOfMemoryError:  # as its users would
                    step_of = steps(context, quantised, liger, checkpointed=True)
                    numbers.update(speed(context, step_of(shape), shape) | {"checkpointed": True})


def speed(context: Context, step: Callable[[], float], shape: Shape) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step()
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    count, began, loss = 2 if context.tiny else STEPS, time.perf_counter(), 0.0
    for _ in range(count):
        loss = step()
    synchronize()
    tokens = count * shape.micro_batches * shape.tokens
    found = figures(context, tokens / (time.perf_counter() - began), shape)
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if context.on_gpu else {}) | {"loss": loss}


def rows_of(shape: Shape) -> list[list[int]]:
    """A micro-batch's samples in forwards that have at most as many tokens with padding as it has without."""
    forwards: list[list[int]] = [[]]
    for length in sorted(shape.lengths, reverse=True):
        if forwards[-1] and (len(forwards[-1]) + 1) * forwards[-1][0] > shape.tokens:
            forwards.append([])
        forwards[-1].append(length)
    return forwards


def padded(lengths: list[int], vocabulary: int, generator: torch.Generator, device: str) -> dict[str, torch.Tensor]:
    """Samples as rows, padded to the first, which is the longest."""
    ids = torch.randint(0, vocabulary, (len(lengths), lengths[0]), generator=generator)
    mask = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def steps(
    context: Context, quantised: bool, liger: bool = False, checkpointed: bool = False
) -> Callable[[Shape], Callable[[], float]]:
    """A model with adapters, and for a shape of micro-batches its optimizer step, which returns the loss."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama()  # before the model is made, which it changes the classes of

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    options: dict[str, Any] = {"quantization_config": settings} if quantised else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        base_of(context), dtype=torch.bfloat16, device_map={"": 0 if context.on_gpu else "cpu"}, **options
    )
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)

    def step_of(shape: Shape) -> Callable[[], float]:
        generator = torch.Generator().manual_seed(0)
        batches = [padded(rows, llama_of(context).vocabulary, generator, context.device) for rows in rows_of(shape)]

        def step() -> float:
            loss = 0.0
            for _ in range(shape.micro_batches):
                for batch in batches:
                    share = float((batch["labels"] != -100).sum()) / shape.tokens / shape.micro_batches
                    with torch.autocast(context.device, torch.bfloat16):  # as its users do: PEFT keeps adapters in fp32
                        part = model(**batch).loss * share
                    part.backward()
                    loss = part.detach() + loss
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        return step

    return step_of
