"""Limits of the device itself: matrix products, memory, copies, launches.

Everything else is measured against these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_report.rows import SkippedError, read
from benchmarks.gpu_report.sections import Context

BF16 = "bf16 matrix product"


def measure(context: Context) -> None:
    side = 256 if context.tiny else 8192
    device = context.place
    context.rows.add("device", **about(device))
    context.rows.run(BF16, lambda: {"tflops": product(side, torch.bfloat16, device)})
    context.rows.run(
        "fp8 matrix product, scales by rows", lambda: {"tflops": fp8_product(side, device)}
    )
    numbers = 2**16 if context.tiny else 2**30
    context.rows.run(
        "copy on the device, read and written", lambda: {"tb_per_s": copied(numbers, device)}
    )
    context.rows.run(
        "from pinned host memory", lambda: {"gb_per_s": from_host(numbers // 4, device)}
    )
    context.rows.run("a small kernel in eager", lambda: {"microseconds": launch(device)})


def about(device: torch.device) -> dict[str, Any]:
    from benchmarks.machine import machine

    facts = machine()
    versions = ", ".join(
        f"{name} {version}" for name, version in facts.pop("versions").items() if version
    )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
            "capability": properties.major,
        }
    return {**facts, "versions": versions}


def tflops_of(context: Context) -> float | None:
    """The bf16 ceiling that the first section measured, TFLOP/s; None without one."""
    found = [row.numbers.get("tflops") for row in read(context.results) if row.case == BF16]
    return found[-1] if found else None


def seconds(act: Callable[[], Any], repeats: int = 10) -> float:
    """Of one call, the mean of several after two."""
    for _ in range(2):
        act()
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        act()
    synchronize()
    return (time.perf_counter() - began) / repeats


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b) / 1e12


def fp8_product(side: int, device: torch.device) -> float:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise SkippedError("this GPU does not multiply FP8")
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    rows = torch.ones(side, 1, device=device)
    columns = torch.ones(1, side, device=device)

    def act() -> Tensor:
        scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return scaled_mm(
            a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda"
        )

    try:
        act()
    except (RuntimeError, NotImplementedError) as error:
        if device.type == "cpu":
            raise SkippedError(f"processors do not multiply FP8 this way: {error}") from error
        raise
    return 2 * side**3 / seconds(act) / 1e12


def copied(numbers: int, device: torch.device) -> float:
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e12


def from_host(numbers: int, device: torch.device) -> float:
    if device.type == "cpu":
        raise SkippedError("there is no other memory to copy to")
    source = torch.zeros(numbers, dtype=torch.bfloat16, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9


def launch(device: torch.device) -> float:
    x = torch.zeros(8, device=device)
    return 1e6 * seconds(lambda: x.add_(1), repeats=200)
