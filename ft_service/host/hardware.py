"""Hardware of this host for training, detected without torch."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the NVIDIA GPUs that processes of this host may use: the entries of CUDA_VISIBLE_DEVICES if set, else numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return [str(number) for number in range(_device_files(devices))]


@lru_cache
def _device_files(devices: Path) -> int:
    """Return the number of NVIDIA device files, counted once: it does not change while the process runs."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))


def gpu_count(devices: Path = Path("/dev")) -> int:
    return len(visible_gpus(devices))


def default_slots() -> int:
    """Return the number of ranks that this host runs at once: one per GPU, else one per processor, and at least 2, so that
    sharding can be tried."""
    return gpu_count() or max(2, os.cpu_count() or 1)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes of memory that are available now, up to this process's limit."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, memory_bytes())
    return memory_bytes()


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this host, or the limit of this container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (groups / "memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole
