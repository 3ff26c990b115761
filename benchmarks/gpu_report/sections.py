"""The sections, and the process of one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_report.rows import Rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """What a section is given."""

    device: str
    """cuda or cpu."""
    tiny: bool
    rows: Rows
    scratch: Path
    """In memory where the system has such a folder, and shared by all sections: bases are made
    once.
    """
    results: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        """The first GPU, by its number, which CUDA wants where a device is chosen."""
        import torch

        return torch.device("cuda", 0) if self.on_gpu else torch.device(self.device)


@dataclass(frozen=True)
class Section:
    module: str
    """Below this package; its `measure(context, *arguments)` is called."""
    seconds: float
    """After which it is ended."""
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    arguments: tuple[str, ...] = ()


WORKERS = ("pydantic", "re2", "transformers", "peft", "bitsandbytes")
PEFT = ("transformers", "peft", "accelerate")
SECTIONS = {
    "ceilings": Section("ceilings", 45),
    "kernels": Section("kernels", 60, WORKERS),
    "operators": Section("operators", 75, WORKERS),
    "host": Section("host", 30, WORKERS),
    "speed nf4": Section("speed", 120, WORKERS, ("nf4", "eager")),
    "speed bf16": Section("speed", 90, WORKERS, ("bf16", "eager")),
    "speed fp8": Section("speed", 90, WORKERS, ("fp8", "eager")),
    "speed peft": Section("peft_speed", 140, PEFT, ("nf4",)),
    "speed peft bf16": Section("peft_speed", 90, PEFT, ("bf16",)),
    "compiled nf4": Section("speed", 120, WORKERS, ("nf4", "compiled")),
    "compiled bf16": Section("speed", 120, WORKERS, ("bf16", "compiled")),
    "compiled fp8": Section("speed", 120, WORKERS, ("fp8", "compiled")),
    "synchronisations": Section("synchronisations", 60, WORKERS),
    "profile": Section("profile", 100, WORKERS),
    "experts": Section("experts", 120, WORKERS),
    "whole 70b": Section("whole", 180, WORKERS, ("llama-70b",)),
    "whole 30b-a3b": Section("whole", 160, WORKERS, ("qwen3-30b-a3b",)),
    "long sample": Section("whole", 170, WORKERS, ("llama-8b",)),
    "models": Section("models", 120, WORKERS),
    "two ranks": Section("two_ranks", 80, WORKERS),
    "service": Section("service", 150, WORKERS),
    "tests": Section("gpu_tests", 140, (*WORKERS, "pytest", "pytest_timeout")),
}
"""In the order of what one wants to know first: the report's minutes may end before the last."""

PARTS = {
    "a": ("ceilings", "kernels", "operators", "host", "models", "two ranks", "service"),
    "b": ("ceilings", "speed nf4", "speed bf16", "speed fp8", "compiled nf4", "compiled bf16"),
    "c": ("ceilings", "speed peft", "compiled fp8", "synchronisations", "profile", "experts"),
    "d": ("ceilings", "compiled nf4", "experts", "speed peft bf16", "two ranks", "tests"),
    "e": ("ceilings", "whole 70b", "whole 30b-a3b", "long sample"),
}
"""The report in calls of which none takes ten minutes.

All begin with what the others are compared with. What no GPU has reached yet is `d`, and `e`.
"""


def run(name: str, context: Context) -> None:
    section = SECTIONS[name]
    if missing := [
        package for package in section.needs if importlib.util.find_spec(package) is None
    ]:
        how = "benchmarks/README.md, One GPU, says how to bring what an image lacks"
        context.rows.add("-", "skipped", f"not installed: {', '.join(missing)}; {how}")
        return
    measure = importlib.import_module(f"benchmarks.gpu_report.{section.module}").measure
    measure(context, *section.arguments)


def run_forked(
    environment: Mapping[str, str],
    log: Path,
    name: str,
    device: str,
    tiny: bool,
    results: Path,
    scratch: Path,
) -> None:
    """What the process of a section does, in a session of its own.

    `log`: a file for what it prints.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb", buffering=0) as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    sys.modules.setdefault("torchao", None)  # type: ignore[assignment]  # as a rank is without it (workers/patches/absent_torchao.py)
    run(name, Context(device, tiny, Rows(results, name), scratch, results))
