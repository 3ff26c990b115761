"""Estimate of where a step of an 8B model on one H200 goes, by arithmetic: the step itself is not
measured.

    python benchmarks/arithmetic.py

Operations are counted by the plan (`ft_service.plan`), bytes operator by operator as the workers
launch them on fake tensors of this shape (`benchmarks/step_bytes.py`), and both are divided by what
such a GPU reaches in each alone. A measured step is what `make gpu-report` gives.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import save
from benchmarks.step_bytes import LENGTH, TOKENS, Moved, layer
from ft_service.bases.description import Description
from ft_service.plan.speed import flops_per_token
from ft_service.plan.weight_storage import AdapterShape, adapters_of

REACHED = {
    "limit of arithmetic, FLOP/s": 810e12,
    "bf16 products, FLOP/s": 800e12,
    "FP8 products, FLOP/s": 1430e12,
    "attention forward, FLOP/s": 275e12,
    "attention backward, FLOP/s": 170e12,
    "memory, bytes/s": 4.0e12,
}
"""What one H200 reached in each of these alone (`results/gpu_report.jsonl`): products of these
shapes, FP8's without rounding and transposing, attention of four samples with gradients in one
order, and what most of our kernels move.
"""
ESTIMATED_BYTES: dict[str, dict[str, int]] = {
    "eager": {},
    "compiled": {"LoRA": 660_000, "norms, RoPE, SwiGLU": 500_000},
}
"""Moved a token and layer, where it is not counted: compiled layers are fused by the compiler, and
add the adapter's part to the frozen product.
"""
LOGIT_BYTES = 6
"""Moved a logit by the loss: read twice and overwritten by its gradient, in bf16."""
OPTIMIZER_BYTES = 40
"""Moved a number of the adapters in a step: norm, clip, AdamW's five tensors read and four
written.
"""
HOST_SECONDS = 0.005
"""Of a step for which the GPU waits: between steps, and in the head."""


def main() -> None:
    counted = {name: layer(name) for name in ("bf16", "nf4", "fp8")}
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            f"{name}, {mode}": row(Path(folder), name, mode, counted[name])
            for name in counted
            for mode in ESTIMATED_BYTES
        }
    names = list(next(iter(rows.values()))["milliseconds"])
    print("| | " + " | ".join(names) + " | sum | tokens/s | of the limit |")
    print("| --- |" + " ---: |" * (len(names) + 3))
    for name, found in rows.items():
        parts = " | ".join(f"{value:.0f}" for value in found["milliseconds"].values())
        print(
            f"| {name} | {parts} | {found['sum']:.0f} | {found['tokens_per_second']:,.0f} | "
            f"{found['share_of_limit']:.0%} |"
        )
    save(
        "arithmetic",
        {"measured": False, "tokens": TOKENS, "length": LENGTH, "reached": REACHED, "cases": rows},
    )


def row(folder: Path, weight_format: str, mode: str, counted: dict[str, Moved]) -> dict[str, Any]:
    """The terms of one optimizer step of one micro-batch."""
    from tests.support.bases import LLAMA_8B, describe, save_base, spec_on

    spec = spec_on(
        save_base(folder / "8b", LLAMA_8B), precision={"default": weight_format}, lora={"r": 16}
    )
    base = describe(spec.model.path)
    adapters = adapters_of(base, spec)
    seconds = terms(base, adapters, counted, weight_format == "fp8", mode)
    needed = (
        TOKENS
        * flops_per_token(base, adapters, LENGTH, checkpointed=False)
        / REACHED["limit of arithmetic, FLOP/s"]
    )
    total = sum(seconds.values())
    return {
        "milliseconds": {name: round(1000 * value, 1) for name, value in seconds.items()},
        "sum": round(1000 * total, 1),
        "tokens_per_second": round(TOKENS / total),
        "share_of_limit": round(needed / total, 3),
    }


def terms(
    base: Description,
    adapters: list[AdapterShape],
    counted: dict[str, Moved],
    in_fp8: bool,
    mode: str,
) -> dict[str, float]:
    """Seconds by what they are spent on. `counted`: what one layer launches."""
    shape = base.dimensions
    memory = REACHED["memory, bytes/s"]
    frozen = sum(w.numel for w in base.quantizable)
    rate = REACHED["FP8 products, FLOP/s" if in_fp8 else "bf16 products, FLOP/s"]
    attention = 2 / REACHED["attention forward, FLOP/s"] + 4 / REACHED["attention backward, FLOP/s"]
    moved = {kind: found.bytes for kind, found in counted.items()}
    moved |= {kind: estimated * TOKENS for kind, estimated in ESTIMATED_BYTES[mode].items()}
    head = 4 * TOKENS * shape.vocabulary * shape.hidden / REACHED["bf16 products, FLOP/s"]
    return {
        "frozen products": 4 * frozen * TOKENS / rate,
        **{
            kind: moved[kind] * shape.layers / memory
            for kind in ("rounding to FP8, transposing", "dequantise", "LoRA")
        },
        "attention": attention * shape.layers * LENGTH * shape.q * TOKENS,
        "norms, RoPE, SwiGLU": moved["norms, RoPE, SwiGLU"] * shape.layers / memory,
        "head and loss": head + LOGIT_BYTES * shape.vocabulary * TOKENS / memory,
        "optimizer and host": OPTIMIZER_BYTES * sum(a.numel for a in adapters) / memory
        + HOST_SECONDS,
    }


if __name__ == "__main__":
    from workers.patches.absent_torchao import keep_torchao_out

    keep_torchao_out()
    main()
