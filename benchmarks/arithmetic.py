"""Where a step of an 8B model on one H200 would go, by arithmetic: nothing here is measured.

    python benchmarks/arithmetic.py

Operations and bytes are counted by the plan (`ft_service.plan`) or from the code that does them, and divided by what such a GPU
is assumed to reach. A measured step is what `make gpu-report` gives.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import save
from ft_service.bases.description import Description
from ft_service.plan.speed import flops_per_token
from ft_service.plan.weight_storage import AdapterShape, ShardLayout, adapters_of, stored_weights

TOKENS, LENGTH = 8192, 2048
"""Of a micro-batch, and of each of its samples."""
ASSUMED = {
    "limit of arithmetic, FLOP/s": 790e12,
    "bf16 products, FLOP/s": 700e12,
    "FP8 products, FLOP/s": 1200e12,
    "attention forward, FLOP/s": 300e12,
    "attention backward, FLOP/s": 220e12,
    "memory, bytes/s": 4.0e12,
}
ELEMENTWISE_BYTES = {"eager": 1_940_000, "compiled": 500_000}
"""Moved a token and layer by norms, rotary positions, SwiGLU and residuals, forward and backward. Eager: counted operator by
operator on fake tensors of this shape (PyTorch 2.11, transformers 5.17). Compiled they are fused: an estimate."""
LORA_BYTES = 8
"""Moved a token for each row and each column of an adapted weight: input and gradient are read twice more, and the adapter's
part is added into either result in place."""
LOGIT_BYTES = 24
"""Moved a logit: log-softmax 6, the largest 4, exponential 8, to bf16 6."""
ROUNDED_BYTES = 3
"""Moved a number that is rounded for an FP8 product: 2 read, 1 written."""
TRANSPOSED_BYTES = 2
"""Moved a weight in FP8 in a backward, which multiplies with its transposed codes: 1 read, 1 written."""
OPTIMIZER_BYTES = 40
"""Moved a number of the adapters in a step: norm, clip, AdamW's five tensors read and four written."""
HOST_SECONDS = 0.005
"""Of a step for which the GPU waits: between steps, and in the head."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            f"{name}, {mode}": row(Path(folder), name, mode) for name in ("bf16", "nf4", "fp8") for mode in ELEMENTWISE_BYTES
        }
    names = list(next(iter(rows.values()))["milliseconds"])
    print("| | " + " | ".join(names) + " | sum | tokens/s | of the limit |")
    print("| --- |" + " ---: |" * (len(names) + 3))
    for name, found in rows.items():
        parts = " | ".join(f"{value:.0f}" for value in found["milliseconds"].values())
        print(f"| {name} | {parts} | {found['sum']:.0f} | {found['tokens_per_second']:,.0f} | {found['share_of_limit']:.0%} |")
    save("arithmetic", {"measured": False, "tokens": TOKENS, "length": LENGTH, "assumed": ASSUMED, "cases": rows})


def row(folder: Path, weight_format: str, mode: str) -> dict[str, Any]:
    """The terms of one optimizer step of one micro-batch."""
    from tests.support.bases import LLAMA_8B, describe, save_base, spec_on

    spec = spec_on(save_base(folder / "8b", LLAMA_8B), precision={"default": weight_format}, lora={"r": 16})
    base = describe(spec.model.path)
    adapters = adapters_of(base, spec)
    stored = stored_weights(base, spec, ShardLayout(1, 1))
    quantised = sum(s.bytes_whole + 2 * s.weight.numel for s in stored if s.format == "nf4")
    seconds = terms(base, adapters, quantised, weight_format == "fp8", mode)
    needed = TOKENS * flops_per_token(base, adapters, LENGTH, checkpointed=False) / ASSUMED["limit of arithmetic, FLOP/s"]
    total = sum(seconds.values())
    return {
        "milliseconds": {name: round(1000 * value, 1) for name, value in seconds.items()},
        "sum": round(1000 * total, 1),
        "tokens_per_second": round(TOKENS / total),
        "share_of_limit": round(needed / total, 3),
    }


def terms(base: Description, adapters: list[AdapterShape], quantised: int, in_fp8: bool, mode: str) -> dict[str, float]:
    """Seconds by what they are spent on. `quantised`: bytes that one pass of dequantising moves."""
    shape, memory = base.dimensions, ASSUMED["memory, bytes/s"]
    frozen = sum(w.numel for w in base.quantizable)
    rate = ASSUMED["FP8 products, FLOP/s" if in_fp8 else "bf16 products, FLOP/s"]
    # Inputs are rounded once for all that share them (two norms, attention, the product of the feed-forward), gradients each.
    rounded = 2 * shape.hidden + shape.q + shape.intermediate + sum(a.rows for a in adapters) // shape.layers
    converted = ROUNDED_BYTES * rounded * shape.layers * TOKENS + TRANSPOSED_BYTES * frozen
    attention = 2 / ASSUMED["attention forward, FLOP/s"] + 4 / ASSUMED["attention backward, FLOP/s"]
    head = 4 * TOKENS * shape.vocabulary * shape.hidden / ASSUMED["bf16 products, FLOP/s"]
    return {
        "frozen products": 4 * frozen * TOKENS / rate,
        "rounding to FP8, transposing": in_fp8 * converted / memory,
        "dequantise": 2 * quantised / memory,
        "LoRA": LORA_BYTES * sum(a.rows + a.cols for a in adapters) * TOKENS / memory,
        "attention": attention * shape.layers * LENGTH * shape.q * TOKENS,
        "norms, RoPE, SwiGLU": ELEMENTWISE_BYTES[mode] * shape.layers * TOKENS / memory,
        "head and loss": head + LOGIT_BYTES * shape.vocabulary * TOKENS / memory,
        "optimizer and host": OPTIMIZER_BYTES * sum(a.numel for a in adapters) / memory + HOST_SECONDS,
    }


if __name__ == "__main__":
    main()
