"""How torchrun is called for one attempt on one node: command, environment, and where its output lies.

On one node nothing of it listens beyond the host. A TCP store, torchrun's own or that of the ranks' process group, listens on
all interfaces whatever address it is given, so both rendezvous go through files of the attempt: torchrun is told so on its
command line, the ranks by FT_INIT_METHOD, for `init_process_group(init_method=…)`. Gloo and NCCL are bound to the loopback
interface. Several nodes meet at a TCP store of node 0's, and their network must admit nobody else: there is no authentication.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ft_service.bases import cache_folder
from ft_service.data import token_folder
from ft_service.host.environment import child_environment
from ft_service.host.hardware import visible_gpus
from ft_service.host.lifetime import RANKS_LOCK_PATH, SUPERVISOR_PID
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.supervisor.node import Node

LOG = "torchrun.log"
INIT_METHOD = "FT_INIT_METHOD"
"""Environment variable with the `init_method` of the ranks' process group."""
TAIL_LINES = 30
TAIL_BYTES = 256 * 1024
SEARCHED_LINES = 2000
"""Of a rank's errors, when looking for what ended it: stack traces of several threads may follow the reason."""
JOIN_SECONDS = 900
"""How long the nodes of an attempt wait for each other at its start: as long as a node may take to fetch its image."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator on GPUs: its name since torch 2.9, and the one before."""
_GROWING_SEGMENTS = "expandable_segments:True"
"""Blocks of any size come from the same memory. Rows of ever other lengths leave gaps between fixed segments."""
_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def command(start: Start, run: RunDir, node: Node) -> list[str]:
    """torchrun with our workers; RUN_DIR and ATTEMPT are still to be appended."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(start.nodes), "--nproc-per-node", str(start.world_size // start.nodes), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-id", f"{start.job_id}-{start.attempt}"),
        *_meeting(start, run, node),
        *("--log-dir", str(node.files(run, start).logs), "--redirects", "3"),
        *("-m", "workers.train"),
    ]


def _meeting(start: Start, run: RunDir, node: Node) -> list[str]:
    if start.nodes == 1:
        store = node.rendezvous(run, start) / "torchrun"
        return ["--rdzv-endpoint", str(store), "--rdzv-conf", "store_type=file", "--local-addr", _LOOPBACK]
    conf = f"is_host={int(node.index == 0)},join_timeout={JOIN_SECONDS}"
    return [
        *("--rdzv-endpoint", node.endpoint, "--rdzv-conf", conf),
        *(("--local-addr", node.address) if node.address else ()),
    ]


def environment(inherited: Mapping[str, str], start: Start, run: RunDir, node: Node) -> dict[str, str]:
    """The environment of torchrun and its ranks. What the caller set for threads, interfaces, GPU memory and the cache stays,
    as `child_environment` lists it."""
    threads = max(1, len(os.sched_getaffinity(0)) * start.nodes // start.world_size)
    fixed = {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        RANKS_LOCK_PATH: str(node.ranks_lock(run, start)),
        SUPERVISOR_PID: str(os.getpid()),
    }
    among_nodes = {} if start.nodes > 1 else _inside_host(node.rendezvous(run, start))
    home = Path(inherited.get("FT_HOME") or "~/.ft").expanduser().absolute()
    defaults = {"OMP_NUM_THREADS": str(threads), **({} if start.nodes > 1 else _LOOPBACK_ONLY)}
    defaults |= allocator_settings(inherited)
    # The host's: no file of a job names them.
    fixed[cache_folder.FOLDER] = str(cache_folder.folder_of(inherited, home) or "")
    fixed[token_folder.FOLDER] = str(token_folder.folder_of(inherited, home) or "")
    return {**defaults, **child_environment(inherited), **_devices(start, node), **among_nodes, **fixed}


def allocator_settings(inherited: Mapping[str, str]) -> dict[str, str]:
    """Settings of torch's allocator on GPUs, unless the caller has made his own under either name."""
    return {} if any(name in inherited for name in ALLOCATOR) else {ALLOCATOR[0]: _GROWING_SEGMENTS}


def _inside_host(rendezvous: Path) -> dict[str, str]:
    rendezvous.mkdir(parents=True, exist_ok=True)
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", INIT_METHOD: f"file://{rendezvous / 'ranks'}"}


def _devices(start: Start, node: Node) -> dict[str, str]:
    """The GPUs that belong to the attempt's slots on this node; without slots, or without GPUs, nothing is hidden."""
    gpus, slots = visible_gpus(), start.node_slots[node.index] if start.node_slots else start.slots
    if not slots or not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot] for slot in slots if slot < len(gpus))}


def guilty_tail(logs: Path, local_rank: int | None, lines: int = TAIL_LINES) -> str:
    """Last lines of what a rank of this node wrote to stderr; of torchrun's own output if it is unknown or wrote nothing."""
    if local_rank is not None:
        for path in sorted(logs.glob(f"*/attempt_0/{local_rank}/stderr.log")):
            text = tail(path, lines)
            if text.strip():
                return text
    return tail(logs / LOG, lines)


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, at most 256 KiB of them; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
