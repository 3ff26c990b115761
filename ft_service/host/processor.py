"""This host's processor: what kind it is, and how fast it multiplies matrices, as the workers
measure it.

Flags do not say it. oneDNN has products in bf16 for every processor with AVX-512, and without
instructions for them it goes by fp32, several times more slowly than fp32 itself; variables such as
ONEDNN_MAX_CPU_ISA take instructions away.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OF_KIND = re.compile(
    r"^(?:model name|flags|CPU (?:implementer|part|variant)|Features|isa|uarch)\s*:.*$",
    re.MULTILINE,
)
"""Lines of /proc/cpuinfo that say what a processor can do: x86's, Arm's, and RISC-V's."""
_VARIABLES = ("ATEN_CPU_", "ONEDNN_", "DNNL_", "MKL_")
"""Beginnings of the variables by which PyTorch and its libraries choose instructions."""
_CLEARLY = 1.25
"""Products in bf16 that take so many times as long as in fp32 are slow: they take less memory, and
timings differ.
"""


@dataclass(frozen=True)
class Products:
    """How fast one core multiplies matrices (`workers.model.products` measures it)."""

    kind: str
    """Kind of the processor (`processor_kind`)."""
    fp32_flops: float
    """FLOP/s in fp32."""
    bf16_flops: float
    """FLOP/s in bf16."""
    by_onednn: bool
    """Whether oneDNN computes those in bf16, and not a plain loop of PyTorch's."""

    @property
    def slow_in_bf16(self) -> bool:
        return self.bf16_flops * _CLEARLY < self.fp32_flops

    @property
    def by_fp32(self) -> bool:
        """Whether products in bf16 are computed in fp32, and need a copy of their result in it
        meanwhile.
        """
        return self.slow_in_bf16 and self.by_onednn

    @property
    def ratio(self) -> float:
        """Time of a product in bf16 as a multiple of its time in fp32."""
        return self.fp32_flops / self.bf16_flops


def slowness(products: Products) -> str:
    """A clause that says how slow a processor is in bf16."""
    return (
        f"a product in bf16 takes this processor {products.ratio:.2g} times as long as one in fp32"
    )


def slow_bf16_advice(products: Products) -> str:
    """Advice for a job that is to compute in bf16 on a processor that is slow in it."""
    return (
        f"{slowness(products).capitalize()}. precision.compute: fp32 is faster here, and takes "
        "more memory for activations."
    )


def processor_kind(
    cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] = os.environ
) -> str:
    """Return a digest of what decides the speed of products: the processor's name and instructions,
    and the variables that limit them. 16 hexadecimal digits.
    """
    named = [platform.machine()]
    with contextlib.suppress(OSError):
        named += _OF_KIND.findall(cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0])
    named += sorted(
        f"{name}={value}" for name, value in environment.items() if name.startswith(_VARIABLES)
    )
    return hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]
