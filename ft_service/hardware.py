"""What this host has to train on, found without torch."""

from __future__ import annotations

import os
from pathlib import Path


def gpu_count(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that processes of this host may use: CUDA_VISIBLE_DEVICES if set, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len([path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()])


def default_slots() -> int:
    """Ranks this host runs at once: one per GPU; without a GPU one per processor, and at least 2, so that sharding can be tried."""
    return gpu_count() or max(2, os.cpu_count() or 1)
