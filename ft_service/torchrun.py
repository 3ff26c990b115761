"""How torchrun is called for one attempt on one host: command, environment, and where its output lies.

Nothing of it listens beyond this host. A TCP store, torchrun's own or that of the ranks' process group, listens on all
interfaces whatever address it is given, so both rendezvous go through files of the attempt: torchrun is told so on its command
line, the ranks by FT_INIT_METHOD, for `init_process_group(init_method=…)`. Gloo and NCCL are bound to the loopback interface.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ft_service.hardware import visible_gpus
from ft_service.lifetime import SUPERVISOR_PID
from ft_service.rundir import Start

LOG = "torchrun.log"
INIT_METHOD = "FT_INIT_METHOD"
"""Environment variable with the `init_method` of the ranks' process group."""
CACHE = "FT_CACHE"
"""Environment variable with the folder in which ranks keep quantised bases: the host's, so that no file of a job names it."""
TAIL_LINES = 30
_LOOPBACK = "127.0.0.1"


def command(start: Start, logs: Path) -> list[str]:
    """torchrun with our workers; RUN_DIR and ATTEMPT are still to be appended."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(start.world_size), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(logs.parent / "rendezvous" / "torchrun")),
        *("--rdzv-conf", "store_type=file", "--rdzv-id", f"attempt-{start.attempt}", "--local-addr", _LOOPBACK),
        *("--log-dir", str(logs), "--redirects", "3"),
        *("-m", "workers.train"),
    ]


def environment(inherited: Mapping[str, str], start: Start, rendezvous: Path) -> dict[str, str]:
    """The environment of torchrun and its ranks. What the caller set for threads, interfaces and the cache stays."""
    rendezvous.mkdir(parents=True, exist_ok=True)
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // start.world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        CACHE: str(Path(inherited.get("FT_HOME") or "~/.ft").expanduser().absolute() / "cache"),
    }
    fixed = {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        INIT_METHOD: f"file://{rendezvous / 'ranks'}",
        SUPERVISOR_PID: str(os.getpid()),
    }
    return {**defaults, **inherited, **_devices(start), **fixed}


def _devices(start: Start) -> dict[str, str]:
    """The GPUs that belong to the attempt's slots; without slots, or without GPUs, nothing is hidden."""
    gpus = visible_gpus()
    if not start.slots or not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot] for slot in start.slots if slot < len(gpus))}


def guilty_tail(logs: Path, rank: int | None) -> str:
    """Last lines of what a rank wrote to stderr; of torchrun's own output if the rank is unknown or wrote nothing."""
    if rank is not None:
        for path in sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log")):
            text = tail(path, TAIL_LINES)
            if text.strip():
                return text
    return tail(logs / LOG, TAIL_LINES)


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, at most 64 KiB of them; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
