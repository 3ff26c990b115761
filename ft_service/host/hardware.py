"""Hardware of this host that jobs can train on, detected without torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from functools import lru_cache
from pathlib import Path


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """NVIDIA GPUs that processes of this host may use, as CUDA_VISIBLE_DEVICES names them: its entries if set, else numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    return [str(number) for number in range(_device_files(devices))]


@lru_cache
def _device_files(devices: Path) -> int:
    """The number of NVIDIA device files, counted once: GPUs do not come and go under a running process."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))


def gpu_memory() -> tuple[str, int] | None:
    """(name, bytes) of this host's first GPU as its driver tells them; None: it has none, or nobody tells."""
    if not gpu_count():
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        name, _, mebibytes = said[0].rpartition(",")
        return name.strip(), int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def gpu_count(devices: Path = Path("/dev")) -> int:
    return len(visible_gpus(devices))


def default_slots() -> int:
    """Ranks this host runs at once: one per GPU; else one per processor, and at least 2, so that sharding can be tried."""
    return gpu_count() or max(2, os.cpu_count() or 1)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that processes can take now without others having to give way, as far as this process may have them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, memory_bytes())
    return memory_bytes()


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that processes of this host, or of this container, may use."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (groups / "memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole
