"""Command and environment of torchrun for one attempt on one node, and the files of that node.

On one node nothing listens beyond the host. A TCP store, torchrun's own or that of the ranks'
process group, would listen on all interfaces whatever address it is given, so both rendezvous use
files of the attempt: torchrun's by its command line, the ranks' by FT_INIT_METHOD, for
`init_process_group(init_method=…)`. Gloo and NCCL are bound to the loopback interface. Several
nodes meet at a TCP store of node 0, which has no authentication: their network must admit no other
hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_service import installation
from ft_service.bases import cache_folder
from ft_service.data import token_folder
from ft_service.host.environment import child_environment
from ft_service.host.hardware import core_count, visibility_variable, visible_gpus
from ft_service.host.lifetime import RANKS_LOCK, RANKS_LOCK_PATH, SUPERVISOR_PID
from ft_service.rundir.attempt import Attempt, AttemptNode
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.rundir.engine import ENGINE

LOG = "torchrun.log"
INIT_METHOD = "FT_INIT_METHOD"
"""Environment variable with the `init_method` of the ranks' process group."""
TAIL_LINES = 30
TAIL_BYTES = 256 * 1024
SEARCHED_LINES = 2000
"""Lines of a rank's errors that are searched for the reason of its end: stack traces of several
threads may follow it.
"""
JOIN_SECONDS = 900
"""Time for which the nodes of an attempt wait for each other at its start: a node may have to fetch
its image first.
"""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings of torch's GPU allocator: its name since torch 2.9, and
the earlier one.
"""
_GROWING_SEGMENTS = "expandable_segments:True"
"""Setting that lets blocks of any size share memory.

With fixed segments, rows of varying lengths leave gaps.
"""
_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Node:
    """One host, or pod, of those that run an attempt together: its number, its rendezvous, and the
    paths of its files.
    """

    index: int = 0
    endpoint: str = ""
    """HOST:PORT of node 0's rendezvous store; not used on a single node."""
    address: str = ""
    """Address by which the other nodes reach this one; empty: what its host name resolves to."""
    scratch: Path | None = None
    """Folder that only this node sees, for locks and sockets.

    None: the run directory, where locks must work then.
    """
    concludes: bool = False
    """Whether it waits for the other nodes' exit records and writes the attempt's own.

    On Kubernetes the launcher does that.
    """

    def files(self, run: RunDir, start: Start) -> AttemptNode:
        """Return this node's files in the run directory."""
        return Attempt(run, start.attempt).node(self.index, start.nodes)

    def lock(self, run: RunDir, start: Start) -> Path:
        """Path of the lock that the supervisor holds while it is alive."""
        if self.scratch is not None:
            return self.scratch / f"{start.job_id}-{start.attempt}-{self.index}.lock"
        return self.files(run, start).lock

    def ranks_lock(self, run: RunDir, start: Start) -> Path:
        """Path of the lock that every living rank of this node holds, in any attempt."""
        if self.scratch is not None:
            return self.scratch / f"{start.job_id}-{self.index}-{RANKS_LOCK}"
        return run.path(RANKS_LOCK if start.nodes == 1 else f"ranks-{self.index}.lock")

    def rendezvous(self, run: RunDir, start: Start) -> Path:
        """Folder for the rendezvous files of a single node's ranks."""
        if self.scratch is not None:
            return self.scratch / f"{start.job_id}-{start.attempt}-{self.index}-rendezvous"
        return self.files(run, start).rendezvous


def command(start: Start, run: RunDir, node: Node) -> list[str]:
    """Return torchrun's command with our workers, those of an engine in an engine's directory; the
    caller appends RUN_DIR and ATTEMPT.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(
            "--nnodes",
            str(start.nodes),
            "--nproc-per-node",
            str(start.world_size // start.nodes),
            "--max-restarts",
            "0",
        ),
        *("--rdzv-backend", "c10d", "--rdzv-id", f"{start.job_id}-{start.attempt}"),
        *_meeting(start, run, node),
        *("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"),  # not SIGTERM: see `Supervisor._spawn`
        *("--log-dir", str(node.files(run, start).logs), "--redirects", "3"),
        *("-m", "workers.engine" if run.has(ENGINE) else "workers.train"),
    ]


def _meeting(start: Start, run: RunDir, node: Node) -> list[str]:
    if start.nodes == 1:
        store = node.rendezvous(run, start) / "torchrun"
        return [
            "--rdzv-endpoint",
            str(store),
            "--rdzv-conf",
            "store_type=file",
            "--local-addr",
            _LOOPBACK,
        ]
    conf = f"is_host={int(node.index == 0)},join_timeout={JOIN_SECONDS}"
    return [
        *("--rdzv-endpoint", node.endpoint, "--rdzv-conf", conf),
        *(("--local-addr", node.address) if node.address else ()),
    ]


def environment(
    inherited: Mapping[str, str], start: Start, run: RunDir, node: Node
) -> dict[str, str]:
    """Return the environment of torchrun and its ranks.

    Variables of the caller that `child_environment` lists (threads, interfaces, GPU memory, the
    cache) keep their values.
    """
    threads = max(1, core_count() * start.nodes // start.world_size)
    fixed = {
        installation.PYTHONPATH: installation.python_path(inherited),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        RANKS_LOCK_PATH: str(node.ranks_lock(run, start)),
        SUPERVISOR_PID: str(os.getpid()),
    }
    among_nodes = {} if start.nodes > 1 else _inside_host(node.rendezvous(run, start))
    home = Path(inherited.get("FT_HOME") or "~/.ft").expanduser().absolute()
    defaults = {"OMP_NUM_THREADS": str(threads), **({} if start.nodes > 1 else _LOOPBACK_ONLY)}
    defaults |= allocator_settings(inherited)
    # Folders of the host: no file of a job names them.
    fixed[cache_folder.FOLDER] = str(cache_folder.folder_of(inherited, home) or "")
    fixed[token_folder.FOLDER] = str(token_folder.folder_of(inherited, home) or "")
    return {**defaults, **child_environment(inherited), **_devices(start), **among_nodes, **fixed}


def allocator_settings(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return settings of torch's GPU allocator; empty if the caller has set its own under either
    name.
    """
    return {} if any(name in inherited for name in ALLOCATOR) else {ALLOCATOR[0]: _GROWING_SEGMENTS}


def _inside_host(rendezvous: Path) -> dict[str, str]:
    rendezvous.mkdir(parents=True, exist_ok=True)
    return {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        INIT_METHOD: f"file://{rendezvous / 'ranks'}",
    }


def _devices(start: Start) -> dict[str, str]:
    """Restrict ranks to the GPUs of the attempt's slots; without slots, or without GPUs, nothing is
    hidden.
    """
    if not start.slots or not visible_gpus():
        return {}
    return {visibility_variable(): ",".join(devices(start))}


def devices(start: Start) -> list[str]:
    """Return the GPUs that the ranks of this node see, as `visible_gpus` names them; none on a host
    without any.
    """
    gpus = visible_gpus()
    if not start.slots:
        return gpus
    return [gpus[slot] for slot in start.slots if slot < len(gpus)]


def guilty_tail(logs: Path, local_rank: int | None, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a rank's stderr; of torchrun's own output if the rank is unknown or
    wrote nothing.
    """
    if local_rank is not None:
        for path in sorted(logs.glob(f"*/attempt_0/{local_rank}/stderr.log")):
            text = tail(path, lines)
            if text.strip():
                return text
    return tail(logs / LOG, lines)


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a log, at most 256 KiB of it; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
