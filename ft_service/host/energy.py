"""Counters of energy: those of NVIDIA's GPUs by their driver, and those of processors (RAPL) where
the kernel lets this process read them. Nothing is estimated from temperatures or data sheets.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

POWERCAP = Path("/sys/class/powercap")
PROC = Path("/proc")
_BUSY = (0, 1, 2, 5, 6)
"""Columns of the first line of /proc/stat: user, nice, system, irq, softirq."""
_TICKS = 100.0
"""Of a second there (USER_HZ, on every Linux of today)."""


@dataclass(frozen=True)
class Load:
    """What the GPUs of an attempt's node do at a moment."""

    memory: int
    """Bytes in use on the fullest of them, by whatever process."""
    busy: float
    """Mean share of the last moments in which they computed, in [0, 1]."""
    watts: float
    """Of all of them."""


class Counter(Protocol):
    """Energy of something since a first look at it."""

    source: Literal["nvml", "rapl"]

    def joules(self) -> float:
        """Joules that the ranks' processors have taken since the counter was made; it never
        falls.
        """
        ...

    def load(self) -> Load | None:
        """What they do now; None: that is not known of them."""
        ...


class GpuCounter:
    """The boards of some GPUs, by NVML's total-energy counter (Volta and newer)."""

    source: Literal["nvml", "rapl"] = "nvml"

    def __init__(self, devices: Sequence[str], nvml: Any = None) -> None:
        """`devices`: numbers or UUIDs, as in CUDA_VISIBLE_DEVICES. `nvml`: None: the package
        nvidia-ml-py.

        Raises an error of NVML, ImportError or OSError if one of them cannot be counted, as a GPU
        of which another process has a part (MIG).
        """
        self._nvml = nvml = nvml or _nvml()
        self._handles = [_handle(nvml, device) for device in devices]
        self._first = [self._read(handle) for handle in self._handles]

    def joules(self) -> float:
        now = (self._read(handle) for handle in self._handles)
        return sum(max(0, at - first) for at, first in zip(now, self._first, strict=True)) / 1000

    def load(self) -> Load | None:
        nvml, handles = self._nvml, self._handles
        try:
            memory = max(int(nvml.nvmlDeviceGetMemoryInfo(one).used) for one in handles)
            shares = [nvml.nvmlDeviceGetUtilizationRates(one).gpu / 100 for one in handles]
            watts = sum(nvml.nvmlDeviceGetPowerUsage(one) for one in handles) / 1000
        except nvml.NVMLError:  # a virtual GPU tells not all of it
            return None
        return Load(memory, sum(shares) / len(shares), watts)

    def _read(self, handle: Any) -> int:
        """Millijoules since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


class ProcessorCounter:
    """The part of a process and its descendants in what this host's processors and their memory
    have taken: as their part of the processor time in which anything ran.
    """

    source: Literal["nvml", "rapl"] = "rapl"

    def __init__(
        self,
        pid: int,
        *,
        zones: Iterable[Path] | None = None,
        busy: Callable[[], float] | None = None,
        own: Callable[[], float] | None = None,
    ) -> None:
        """`busy`, `own`: seconds of processor time of this host, and of the processes.

        Raises OSError if there is no counter, or this process may not read it (usually only root
        may).
        """
        self._zones = list(processor_zones() if zones is None else zones)
        if not self._zones:
            raise FileNotFoundError(f"{POWERCAP} has no counters of processors")
        self._busy = busy or busy_seconds
        self._own = own or (lambda: seconds_of(pid))
        self._spans = [_number(zone / "max_energy_range_uj") for zone in self._zones]
        self._energy = self._read()
        self._times = self._busy(), self._own()
        self._joules = 0.0

    def joules(self) -> float:
        """To be called at least every minute: a counter begins again after some kilojoules."""
        energy = self._read()
        taken = sum(
            (now - before) % (span + 1)
            for now, before, span in zip(energy, self._energy, self._spans, strict=True)
        )
        busy, own = self._busy(), self._own()
        whole, part = busy - self._times[0], own - self._times[1]
        share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
        self._joules += taken / 1e6 * share
        self._energy, self._times = energy, (busy, max(own, self._times[1]))
        return self._joules

    def load(self) -> None:
        return None

    def _read(self) -> list[int]:
        return [_number(zone / "energy_uj") for zone in self._zones]


def processor_zones(root: Path = POWERCAP) -> list[Path]:
    """Folders of the kernel's counters of each processor package, and of its memory where that has
    one of its own.
    """
    zones = []
    for zone in sorted(root.glob("*-rapl:*")):
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text(encoding="utf-8").strip()
            if name.startswith("package-") or name == "dram":
                zones.append(zone)
    return zones


def busy_seconds(proc: Path = PROC) -> float:
    """Processor time of all processes of this host."""
    first = (proc / "stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    return sum(int(first[column]) for column in _BUSY) / _TICKS


def seconds_of(pid: int, proc: Path = PROC) -> float:
    """Processor time of a process and its descendants, those that have ended included."""
    found: dict[int, tuple[int, int]] = {}  # process → its parent, and its ticks
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    children: dict[int, list[int]] = defaultdict(list)
    for child, (parent, _) in found.items():
        children[parent].append(child)
    ticks, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children[one]
        ticks += found[one][1] if one in found else 0
    return ticks / _TICKS


def _nvml() -> Any:
    nvml = import_module("pynvml")  # only on hosts with GPUs
    nvml.nvmlInit()
    return nvml


def _handle(nvml: Any, device: str) -> Any:
    by_number = device.isdecimal()
    find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
    handle = find(int(device) if by_number else device)
    with contextlib.suppress(nvml.NVMLError):  # a card that cannot be divided
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            raise OSError(f"GPU {device} is divided (MIG), and counts no energy of its parts")
    return handle


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
