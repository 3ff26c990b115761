"""Hardware of this host for training, detected without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""AMD's compute driver: a folder for each processor and GPU."""
WSL_SMI = Path("/usr/lib/wsl/lib/nvidia-smi")
"""Brought into WSL2 by the NVIDIA driver of Windows."""
_SMI_SECONDS = 30
CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""In a container the files of its own group, with its limits."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files with the limit of memory, by version 2 of control groups and by version 1, which has a huge
number for none.
"""
_TAKEN = ("memory.current", "memory/memory.usage_in_bytes")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files with the microseconds of cores that are allowed in so many microseconds: by version 2 one
file, by version 1 two.
"""
_COUNTS = ("memory.stat", "memory/memory.stat")
_FILES = (("active_file", "inactive_file"), ("total_active_file", "total_inactive_file"))
"""Counts of files' bytes, which the kernel gives back."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, as its driver tells."""

    name: str
    bytes: int
    driver: str
    """Version."""


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that processes of this host may use: the entries of `visibility_variable` if
    set, else numbers.
    """
    visible = os.environ.get(visibility_variable())
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return [str(number) for number in range(_found_gpus(devices))]


def visibility_variable() -> str:
    """Return the name of the variable that says which GPUs a process may use.

    ROCm reads both, and its own first. It is only used where it is set, since everything else here
    sets the other one.
    """
    return HIP_VISIBLE if torch_build() == "hip" and HIP_VISIBLE in os.environ else CUDA_VISIBLE


@lru_cache
def _found_gpus(devices: Path) -> int:
    """Return the number of this host's GPUs, counted once: it does not change while the process
    runs.
    """
    nvidia = sum(
        path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*")
    )
    build = torch_build()
    wsl = len(wsl_models()) if build != "cpu" and not nvidia and (devices / "dxg").exists() else 0
    amd = (
        len(amd_gpus(KFD_NODES))
        if build == "hip" and os.access(devices / "kfd", os.R_OK | os.W_OK)
        else 0
    )
    listed = os.environ.get(ROCR_VISIBLE)
    return counted_gpus(
        build, nvidia, wsl, amd if listed is None else min(amd, len(listed.split(",")))
    )


def counted_gpus(build: str | None, nvidia: int, wsl: int, amd: int) -> int:
    """Return the number of GPUs that ranks see, of those found as device files, by WSL2, and by
    AMD's driver.

    `build`: of PyTorch, as in `torch_build`. Many a processor contains a small AMD GPU: those are
    counted only if PyTorch was built for them. WSL2 has its device for any GPU, also one that is
    not NVIDIA's.
    """
    if build == "hip":
        return amd
    return nvidia or (0 if build == "cpu" else wsl)


@lru_cache
def torch_build() -> str | None:
    """Return what PyTorch was built for, `cuda`, `hip` or `cpu`, by its files: it is not imported.

    None: it is not found.
    """
    text = _version_module()
    return None if text is None else build_of(text)


def torch_versions() -> tuple[str, str | None] | None:
    """Return the versions of PyTorch and of the CUDA or ROCm that it was built for, by its files;
    None: it is not found.
    """
    text = _version_module()
    return (
        None
        if text is None
        else (_assigned("__version__", text) or "?", _assigned(build_of(text), text))
    )


def _version_module() -> str | None:
    """Return the text of PyTorch's module `version`."""
    with contextlib.suppress(OSError, ValueError):
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin is not None:
            return Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    return None


def _assigned(name: str, text: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)", text, re.MULTILINE)
    return found and found[1]


def build_of(version: str) -> str:
    """Return what PyTorch was built for, from the text of its module `version`."""
    return next((name for name in ("hip", "cuda") if _assigned(name, version)), "cpu")


def amd_gpus(nodes: Path) -> list[str]:
    """Return the nodes of AMD's driver that are GPUs this process may use.

    Processors have the id 0, and no SIMD units. A container's other GPUs are listed too, but cannot
    be read.
    """
    found = []
    for node in nodes.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            properties = dict(
                line.split(maxsplit=1)
                for line in (node / "properties").read_text(encoding="utf-8").splitlines()
                if " " in line
            )
            if int((node / "gpu_id").read_text(encoding="utf-8")) and int(
                properties.get("simd_count", 0)
            ):
                found.append(node.name)
    return sorted(found, key=lambda name: (len(name), name))


@lru_cache
def wsl_models(program: Path = WSL_SMI) -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs of WSL2, which has no device files for them."""
    return tuple(name for (name,) in _smi("name", str(program)) if name)


def nvidia_gpus(program: str = "nvidia-smi") -> list[Gpu]:
    """Return the GPUs that NVIDIA's driver lists; none where there is no driver, or it does not
    answer.
    """
    found = _smi("name,memory.total,driver_version", program) or _smi(
        "name,memory.total,driver_version", str(WSL_SMI)
    )
    return [Gpu(name, int(mib) * 1024**2, driver) for name, mib, driver in found if mib.isdecimal()]


def _smi(fields: str, program: str) -> list[list[str]]:
    """Return the fields of each GPU by NVIDIA's program."""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def gpu_count(devices: Path = Path("/dev")) -> int:
    return len(visible_gpus(devices))


def default_slots() -> int:
    """Return the number of ranks that this host runs at once: one per GPU, else one per core, and
    at least 2, so that sharding can be tried.
    """
    return gpu_count() or max(2, core_count())


def core_count(groups: Path = CONTROL_GROUPS) -> int:
    """Return the number of cores that this process may use: of this host, by its affinity, within
    its container's limit.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for names in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            texts = " ".join((groups / name).read_text(encoding="utf-8") for name in names)
            quota, period = map(int, texts.split())  # not a number where there is no limit, or -1
            cores = min(cores, quota // period) if quota > 0 else cores
    return max(1, cores)


def available_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = CONTROL_GROUPS) -> int:
    """Return the bytes of memory that are available now, on this host and within the limit of this
    container.
    """
    available = memory_bytes(groups)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = min(available, int(line.split()[1]) * 1024)
    for limits, taken, counts, names in zip(_LIMITS, _TAKEN, _COUNTS, _FILES, strict=True):
        with contextlib.suppress(OSError, ValueError):
            # Not a number where there is no limit.
            limit = int((groups / limits).read_text(encoding="utf-8"))
            counted = dict(
                line.split() for line in (groups / counts).read_text(encoding="utf-8").splitlines()
            )
            files = sum(int(counted.get(name, 0)) for name in names)
            available = min(
                available, max(0, limit - int((groups / taken).read_text(encoding="utf-8")) + files)
            )
    return available


def own_group(groups: Path = CONTROL_GROUPS, listed: Path = Path("/proc/self/cgroup")) -> Path:
    """Return the folder of this process's control group (version 2); `groups` where that is not
    seen, as in a container.
    """
    with contextlib.suppress(OSError):
        for line in listed.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/") and (group := groups / line[len("0::/") :]).is_dir():
                return group
    return groups


def memory_kills(group: Path | None = None, counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for want of memory: of this control group,
    else of this host.
    """
    for file in ((own_group() if group is None else group) / "memory.events", counters):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def memory_bytes(groups: Path = CONTROL_GROUPS) -> int:
    """Return the bytes of memory of this host, or the limit of this container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            whole = min(whole, int((groups / name).read_text(encoding="utf-8")))
    return whole
