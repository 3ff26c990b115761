"""Time of one optimizer step on one rank: the storage formats against each other and against PEFT
on bitsandbytes' layers, or with a mixture of experts on transformers' own in bf16.

    python benchmarks/step.py [--repeats 7] [--tokens 512] [--experts]

All contenders live in one process on the same random base, with LoRA of rank 16 on every linear
layer, experts apart, and take turns on the same batch: forward, backward, AdamW. Without a GPU the
base is small, and times are those of a processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bases import Llama, write_llama, write_mixture
from benchmarks.machine import machine, save

Step = Callable[[], float]
"""One optimizer step; its loss."""

ON_GPU = Llama(hidden=4096, intermediate=14336, layers=8, heads=32, vocabulary=128_256)
"""Eight layers of an 8B model."""
ON_CPU = Llama(hidden=1024, intermediate=2816, layers=4, heads=16, vocabulary=8_000)
MIXTURE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "vocab_size": 8_000,
}
"""Qwen3-30B-A3B's proportions, a quarter as wide."""
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--tokens", type=int, help="of the batch's one sample; 4096 on a GPU, 512 without"
    )
    parser.add_argument("--experts", action="store_true", help="with a mixture of experts")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    tokens = options.tokens or (4096 if gpu else 512)
    llama = ON_GPU if gpu else ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        words = MIXTURE["vocab_size"] if options.experts else llama.vocabulary
        ids = torch.randint(0, words, (1, tokens), generator=torch.Generator().manual_seed(0)).to(
            device()
        )
        if options.experts:
            write_mixture(base, "qwen3_moe", MIXTURE, device())
            peer = PEFT_ON_EXPERTS
            contenders = steps_on_experts(base, ids)
        else:
            write_llama(base, llama)
            peer = PEFT
            contenders = steps(base, ids)
        times, losses = take_turns(contenders, options.repeats)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    result: dict[str, Any] = {
        **machine(),
        "base": MIXTURE if options.experts else vars(llama),
        "tokens": tokens,
        "repeats": options.repeats,
    }
    result["median_ms"] = {name: round(1e3 * seconds, 2) for name, seconds in median.items()}
    result["tokens_per_second"] = {
        name: round(tokens / seconds) for name, seconds in median.items()
    }
    result["times_peft"] = {
        name: round(seconds / median[peer], 3) for name, seconds in median.items()
    }
    result["first_loss"] = losses
    print(result["median_ms"], flush=True)
    save("step_experts" if options.experts else "step", result)


PEFT = "PEFT on bitsandbytes NF4"
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "fp8, dequantised": {"default": "fp8", "fp8_products": "off"},
    "fp8, products in FP8": {"default": "fp8"},
    "nf4": {"default": "nf4"},
    "nf4_fp32": {"default": "nf4_fp32"},
    "fp8_blocks": {"default": "fp8_blocks"},
}


PEFT_ON_EXPERTS = "PEFT on transformers' experts in bf16"
FORMATS_OF_EXPERTS = ("bf16", "nf4", "mxfp4")


def steps(base: Path, ids: Tensor) -> dict[str, Step]:
    from workers.quant.fp8_products import why_not

    contenders = {PEFT: step_of_peft(base, ids)}
    for name, precision in FORMATS.items():
        if name == "fp8, products in FP8" and why_not(torch.bfloat16, device()) is not None:
            continue
        contenders[name] = step_of_ours(base, ids, precision)
    return contenders


def steps_on_experts(base: Path, ids: Tensor) -> dict[str, Step]:
    """Of contenders whose experts have no adapters."""
    contenders = {PEFT_ON_EXPERTS: step_of_peft(base, ids, quantised=False)}
    for name in FORMATS_OF_EXPERTS:
        contenders[name] = step_of_ours(base, ids, {"default": name})
    return contenders


def take_turns(
    contenders: dict[str, Step], repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step but the first, and the loss of the first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, step in contenders.items():
            synchronize()
            start = time.perf_counter()
            loss = step()
            synchronize()
            if repeat:
                times[name].append(time.perf_counter() - start)
            else:
                losses[name] = round(loss, 4)
    return times, losses


def step_of_ours(base: Path, ids: Tensor, precision: dict[str, Any]) -> Step:
    """The worker's own step on one rank: what it also counts and checks is in the time."""
    from ft_service.data.tokens.sample import Tokens
    from tests.support.training.models import spec_for
    from workers.base.load import adapters, load
    from workers.data.batches import collate
    from workers.job.training_state import JobState
    from workers.model.build import build
    from workers.training.step import forward_backward

    spec = spec_for(base, precision=precision, lora={"r": RANK, "target_modules": "all-linear"})
    model = build(spec, device()).peft_model
    load(model, base, seed=0, compute_dtype=torch.bfloat16, device=device())
    model.train()
    job = JobState(dict(adapters(model)), spec.training)
    row = ids[0].cpu().int().numpy()
    batch = collate([Tokens(row, row >= 0)], device())

    def step() -> float:
        sums = forward_backward(model, [batch], ids.numel() - 1, 1)
        job.update(spec.training.rate, spec.training.max_grad_norm)
        return float(sums[0]) / (ids.numel() - 1)

    return step


def step_of_peft(base: Path, ids: Tensor, *, quantised: bool = True) -> Step:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    stored = {"quantization_config": settings} if quantised else {}
    model = AutoModelForCausalLM.from_pretrained(
        base, **stored, dtype=torch.bfloat16, device_map={"": str(device())}
    )
    model.config.use_cache = False
    model = get_peft_model(
        model,
        LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"),
    )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
