"""The same steps by stock parts: PEFT on a bf16 base, and on bitsandbytes' NF4 layers, eager."""

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
    for quantised in (False, True):
        step_of: Callable[[Shape], Callable[[], float]] | None = None
        name = "PEFT on bitsandbytes' NF4" if quantised else "PEFT on bf16"
        for shape in shapes_of(context):
            with context.rows.case(f"{name}, eager, {shape}") as numbers:
                if quantised and importlib.util.find_spec("bitsandbytes") is None:
                    raise SkippedError("not installed: bitsandbytes")
                step_of = step_of or steps(context, quantised)
                numbers.update(speed(context, step_of(shape), shape))


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


def steps(context: Context, quantised: bool) -> Callable[[Shape], Callable[[], float]]:
    """A model with adapters, and for a shape of micro-batches its optimizer step, which returns the loss."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    options: dict[str, Any] = {"quantization_config": settings} if quantised else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        base_of(context), dtype=torch.bfloat16, device_map={"": 0 if context.on_gpu else "cpu"}, **options
    )
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)

    def step_of(shape: Shape) -> Callable[[], float]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, llama_of(context).vocabulary, (shape.samples, shape.length), generator=generator).to(
            context.device
        )

        def step() -> float:
            loss = 0.0
            for _ in range(shape.micro_batches):
                with torch.autocast(context.device, torch.bfloat16):  # as its users do: PEFT keeps adapters in fp32
                    part = model(input_ids=ids, labels=ids).loss / shape.micro_batches
                part.backward()
                loss = part.detach() + loss
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        return step

    return step_of
