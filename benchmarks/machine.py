"""Description of the machine that a benchmark ran on, and the files of results."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "bitsandbytes",
    "transformers",
    "accelerate",
    "safetensors",
    "torchao",
    "peft",
    "trl",
)


def machine() -> dict[str, Any]:
    """Processor, memory, GPU and the versions of what was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average_before": round(os.getloadavg()[0], 1),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON, and print where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"-> {path}", flush=True)
    return path
