"""The machines that a plan can be made for: figures of their data sheets, and the share of them
that training reaches.

The figures are those of NVIDIA's and AMD's data sheets: dense matrix products in bf16, and in FP8,
with fp32 sums; bytes of memory as the driver reports them; memory bandwidth; bandwidth in one
direction of all links from a GPU to the others of its host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ft_service.errors import SpecError
from ft_service.host.hardware import gpu_count, memory_bytes, torch_build, wsl_models
from ft_service.host.processor import Products, processor_kind
from ft_service.spec import JobSpec
from ft_service.wording import did_you_mean

EFFICIENCY = 0.48
"""Share of the data sheet's matrix products that training reaches in bf16: an 8B model trained with
482 to 501 TFLOP/s on an H200 with PyTorch's attention, 49 % of its 989 (benchmarks/README.md).
Published rates on an H100 are 40 to 48 % (NeMo AutoModel's performance summary; LoRAFusion, arXiv
2510.00206).
"""
EFFICIENCY_BY_CUDNN = 0.54
"""The same with cuDNN's attention: 545 to 553 TFLOP/s in bf16 and 541 in NF4, 55 to 56 %."""
LINK_EFFICIENCY = 0.8
USABLE = 0.94
"""Share of the memory that tensors can have: the CUDA context and gaps between blocks take the
rest.
"""

PINNED = 0.8
"""Share of a host's memory that its ranks can pin: their processes, and the page cache through
which weights are read, need the rest.
"""

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """One rank's processor. FLOP/s, bytes, bytes/s; None: not known."""

    name: str
    memory: int | None
    flops: float | None = None
    """Of matrix products: a GPU's in bf16, a processor's in fp32."""
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    fp8_flops: float | None = None
    """None: it does not multiply FP8 in the form of the frozen weights.

    AMD's MI300X has another form.
    """
    shared_memory: bool = False
    """Whether all ranks of the host share `memory`."""
    rank_memory: int = 0
    """Bytes of its host that each rank has besides its part of what all ranks share: of a shared
    `memory`, or of `host_memory`.
    """
    heap_factor: float = 1.0
    """Memory that the process takes, as a multiple of its live tensors.

    1: `USABLE` covers the allocator's gaps.
    """
    fuses: bool = False
    """Whether the workers' fused kernels are known to compute there: they need bf16, and are made
    for NVIDIA's GPUs. Without them layers need more memory.
    """
    by_cudnn: bool = False
    """Whether the workers give attention of long rows to cuDNN there (`attends_by_cudnn` in
    ft_service/kernel_limits.py).
    """
    host_bandwidth: float = 16e9
    """Bytes/s in one direction between a GPU and its host's memory; the default is PCIe 3 x 16, for
    GPUs without figures.
    """
    host_memory: int | None = None
    """Bytes of memory of a GPU's host; None: not known."""
    products: Products | None = None
    """What was measured of a processor; None: it is taken to be as fast in bf16 as in fp32."""

    @property
    def slow_in_bf16(self) -> Products | None:
        """What was measured of a processor that multiplies in bf16 more slowly than in fp32; None:
        it is none.
        """
        return self.products if self.products is not None and self.products.slow_in_bf16 else None

    def flops_in(self, compute: str) -> float | None:
        """FLOP/s of products in a type of `precision.compute`; None: not known, as data sheets of
        GPUs speak of bf16.
        """
        if not self.shared_memory:
            return self.flops if compute == "bf16" else None
        return (
            self.products.bf16_flops
            if self.products is not None and compute == "bf16"
            else self.flops
        )


_BY_CUDNN = ("GH200", "H200", "H200-NVL", "H100", "H100-NVL", "H100-PCIe")
"""Of compute capability 9.0."""
_WITHOUT_KERNELS = ("MI300X", "T4")
"""Not NVIDIA's; without products in bf16."""
_PCIE_3 = ("T4",)
_PCIE_4 = (
    *("A100", "A100-40GB", "A100-PCIe", "A100-PCIe-40GB", "L40S", "L40", "L4", "A40", "A10"),
    *("A10G", "RTX-6000-Ada", "RTX-A6000", "RTX-4090", "RTX-3090"),
)


def _host_bandwidth(name: str) -> float:
    """Bytes/s in one direction between a card and its host's memory: of 16 lanes of the PCIe that
    it has, or of NVLink-C2C.
    """
    if name == "GH200":
        return 450e9
    return 16e9 if name in _PCIE_3 else 32e9 if name in _PCIE_4 else 64e9


MACHINES = {
    machine.name: replace(
        machine,
        fuses=machine.name not in _WITHOUT_KERNELS,
        by_cudnn=machine.name in _BY_CUDNN,
        host_bandwidth=_host_bandwidth(machine.name),
    )
    for machine in (
        Machine("B300", int(267.7 * GIB), 2250e12, 8e12, 900e9, 4500e12),
        Machine("B200", int(178.3 * GIB), 2250e12, 8e12, 900e9, 4500e12),
        Machine("GH200", int(94.5 * GIB), 989e12, 4e12, 450e9, 1979e12),
        Machine("H200", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 1979e12),
        Machine("H200-NVL", int(139.8 * GIB), 835e12, 4.8e12, 64e9, 1671e12),
        Machine("H100", int(79.6 * GIB), 989e12, 3.35e12, 450e9, 1979e12),
        Machine("H100-NVL", int(93.1 * GIB), 835e12, 3.9e12, 64e9, 1671e12),
        Machine("H100-PCIe", int(79.1 * GIB), 756e12, 2e12, 64e9, 1513e12),
        Machine("A100", int(79.3 * GIB), 312e12, 2.04e12, 300e9),
        Machine("A100-40GB", int(39.5 * GIB), 312e12, 1.56e12, 300e9),
        Machine("A100-PCIe", int(79.3 * GIB), 312e12, 1.94e12, 32e9),
        Machine("A100-PCIe-40GB", int(39.5 * GIB), 312e12, 1.56e12, 32e9),
        Machine("MI300X", int(191.7 * GIB), 1307e12, 5.3e12, 448e9),
        Machine("L40S", int(44.5 * GIB), 362e12, 864e9, 32e9, 733e12),
        Machine("L40", int(44.5 * GIB), 181e12, 864e9, 32e9, 362e12),
        Machine("L4", int(22.0 * GIB), 121e12, 300e9, 32e9, 242e12),
        Machine("A40", int(44.3 * GIB), 150e12, 696e9, 32e9),
        Machine("A10", int(22.0 * GIB), 125e12, 600e9, 32e9),
        Machine("A10G", int(22.0 * GIB), 70e12, 600e9, 32e9),
        Machine("T4", int(14.6 * GIB), 8.1e12, 320e9, 16e9),  # in fp32: it has no products in bf16
        Machine("RTX-6000-Ada", int(47.4 * GIB), 364e12, 960e9, 32e9, 728e12),
        Machine("RTX-A6000", int(47.4 * GIB), 155e12, 768e9, 32e9),
        Machine("RTX-5090", int(31.4 * GIB), 209e12, 1.79e12, 64e9, 419e12),
        Machine("RTX-4090", int(23.6 * GIB), 165e12, 1.01e12, 32e9, 330e12),
        Machine("RTX-3090", int(23.6 * GIB), 71e12, 936e9, 32e9),
    )
}
"""Name as in `--hardware` → machine.

Cards without NVLink or Infinity Fabric are connected by PCIe x 16, and so are cards whose bridges
are sold apart and join two or four of them (PCIe and NVL). GH200 is the one with 96 GB; its link is
NVLink.
"""
_OTHER_CARDS = frozenset({"LAPTOP", "MOBILE", "TI", "SUPER", "D"})
"""Words that make another card of one whose name a marketing name contains; Max-Q is written as two
words here.
"""

CPU = "cpu"
_CORE_FLOPS = 75e9
"""fp32 matrix products of one server core with 256-bit vectors, where none were measured: 67 (32
rows) to 92 (512 rows) were on an AMD EPYC.
"""
_CORE_MEMORY_BANDWIDTH = 2.5e9
"""Bytes of codes and values while one core dequantises NF4, which its arithmetic bounds: 17 ms for
4096 x 4096 there.
"""
_LOOPBACK_BANDWIDTH = 1e9
HEAP_FACTOR = 1.4
"""Memory that a rank on a processor takes, as a multiple of its live tensors: the median of the 14
cases of benchmarks/memory.py with glibc 2.36, whose heap keeps gaps between aligned blocks. The
cases take 1.12 (large vocabulary) to 1.46 times their tensors, and with full checkpointing up to
1.84 times. glibc since 2.38 leaves smaller gaps.
"""


def usable_bytes(machine: Machine, spec: JobSpec) -> int | None:
    """Bytes that tensors of one rank can have; None: not known."""
    if machine.memory is None:
        return None
    if not machine.shared_memory:
        return int(machine.memory * USABLE)
    return int((machine.memory // ranks_per_host(spec) + machine.rank_memory) * USABLE)


def usable_host_bytes(machine: Machine, spec: JobSpec) -> int | None:
    """Bytes of the memory of a GPU's host that one rank can pin; None: not known."""
    if machine.host_memory is None:
        return None
    return int((machine.host_memory // ranks_per_host(spec) + machine.rank_memory) * PINNED)


def ranks_per_host(spec: JobSpec) -> int:
    return max(1, spec.world_size // spec.distributed.nnodes)


def find_machine(name: str) -> Machine:
    """A machine by its name in any spelling (`RTX4090`, `rtx 4090`), or by its marketing name.

    Raises SpecError that lists the known names.
    """
    if name.lower() == CPU:
        return host_cpu()
    machine = {_bare(known): machine for known, machine in MACHINES.items()}.get(_bare(name))
    if machine is None:
        marketed = machine_of_model(name)
        if marketed.memory is not None:
            return marketed
        known = ", ".join([*MACHINES, CPU])
        meant = did_you_mean(name, [*MACHINES, CPU])
        raise SpecError(
            f"--hardware = {name!r}: not known.{meant} There are {known}; for another card give "
            "the nearest one and --memory.",
            param="hardware",
        )
    return machine


def _bare(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper()).removeprefix("RTX")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^A-Z0-9]+", name.upper())) - {""}


def host_cpu() -> Machine:
    """This host without its GPUs: one core per rank, memory shared by all ranks."""
    figures = (_CORE_FLOPS, _CORE_MEMORY_BANDWIDTH, _LOOPBACK_BANDWIDTH)
    return Machine(CPU, memory_bytes(), *figures, shared_memory=True, heap_factor=HEAP_FACTOR)


def measured(machine: Machine, products: Products | None) -> Machine:
    """The machine with what was measured of its products, if it is a processor of this host's kind;
    else as it is.
    """
    if products is None or not machine.shared_memory or products.kind != processor_kind():
        return machine
    return replace(machine, flops=products.fp32_flops, products=products)


def this_host(
    driver: Path = Path("/proc/driver/nvidia/gpus"),
    products: Path = Path("/sys/class/drm"),
    wsl: Callable[[], Sequence[str]] = wsl_models,
) -> Machine:
    """The machine of jobs on this host: its GPUs as the driver names them, else its processor.

    A GPU that is not in the table, or that no driver names, has no figures: the plan then does not
    say whether a job fits.
    """
    if not gpu_count():
        return host_cpu()
    return replace(_gpu_of_this_host(driver, products, wsl), host_memory=memory_bytes())


def _gpu_of_this_host(driver: Path, products: Path, wsl: Callable[[], Sequence[str]]) -> Machine:
    lines = (
        line
        for path in sorted(driver.glob("*/information"))
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    nvidia = (line.partition(":")[2].strip() for line in lines if "Model:" in line)
    amd = (
        path.read_text(encoding="utf-8").strip()
        for path in sorted(products.glob("card*/device/product_name"))
    )
    models = amd if torch_build() == "hip" else chain(nvidia, wsl())
    return machine_of_model(next(filter(None, models), ""))


def machine_of_model(model: str) -> Machine:
    """The machine of a GPU's marketing name, such as `NVIDIA A100-SXM4-80GB`: of those whose words
    are all in it, the one with most words.
    """
    words = _words(model)
    known = [
        (len(_words(name)), machine) for name, machine in MACHINES.items() if _words(name) <= words
    ]
    if not known or words & _OTHER_CARDS or {"MAX", "Q"} <= words:
        return Machine(model or "unknown GPU", None)
    return max(known, key=lambda one: one[0])[1]


def machine_of_gpu(model: str, memory: int) -> Machine:
    """The machine of a GPU of this host that reports its memory, in bytes: that of a part of the
    card, or of a card without figures.
    """
    return replace(machine_of_model(model), memory=memory, host_memory=memory_bytes())
