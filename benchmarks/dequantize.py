"""Seconds to dequantise NF4: this project's two formats against torchao's NF4Tensor and
bitsandbytes' nested statistics.

    python benchmarks/dequantize.py [--rows 4096] [--cols 4096] [--repeats 15]

One weight matrix to bf16, the median of interleaved runs after a warm-up, and the error that each
has on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from workers.quant import nf4, nf4_fp32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(options.rows, options.cols, generator=generator).to(torch.bfloat16).to(device)
    )
    contenders = dequantizers(weight)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.repeats + 1):
        for name, dequantize in contenders.items():
            seconds = timed(dequantize, device)
            if repeat:
                times[name].append(seconds)
    result: dict[str, Any] = {**machine(), "shape": list(weight.shape), "repeats": options.repeats}
    result["median_ms"] = {
        name: round(1e3 * statistics.median(seconds), 3) for name, seconds in times.items()
    }
    result["relative_error"] = {
        name: error(dequantize(), weight) for name, dequantize in contenders.items()
    }
    print(result["median_ms"], flush=True)
    save("dequantize", result)


def dequantizers(weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    ours = nf4.quantize(weight)
    wide = nf4_fp32.quantize(weight)
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    cols = weight.shape[1]
    contenders: dict[str, Callable[[], Tensor]] = {
        "nf4": lambda: nf4.dequantize(ours, cols, torch.bfloat16),
        "nf4_fp32": lambda: nf4_fp32.dequantize(wide, cols, torch.bfloat16),
        "bitsandbytes, nested": lambda: bnb.dequantize_4bit(codes, state),
    }
    try:
        import torchao  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError:
        print("torchao is not installed: pip install '.[bench]'", flush=True)
        return contenders
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # pyright: ignore[reportMissingImports]

    theirs = to_nf4(weight, block_size=64, scaler_block_size=256)
    return {**contenders, "torchao NF4Tensor": lambda: theirs.get_original_weight()}


def timed(dequantize: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    dequantize()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def error(value: Tensor, weight: Tensor) -> float:
    return round(float((value.float() - weight.float()).norm() / weight.float().norm()), 5)


if __name__ == "__main__":
    main()
