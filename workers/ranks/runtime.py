"""One rank's surroundings: run directory, spec, device, process groups, and how its errors leave
it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ft_service.errors import FtError, UnavailableError
from ft_service.host import disk, missing_package
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_seal import SEAL_SECONDS, Fence, SealedError
from ft_service.rundir.directory import RunDir, UnreadableDocumentError
from ft_service.rundir.documents import ErrorInfo, Outcome, OutcomeKind, Start
from ft_service.rundir.failure_origin import COLLECTIVE_TIMEOUT, is_lost_connection
from ft_service.spec import JobSpec
from workers.base.rank_objects import FailedElsewhere
from workers.ranks.allocator import keep_freed_memory
from workers.ranks.context_group import ContextGroup
from workers.ranks.sharding import make_mesh

INIT_METHOD = "FT_INIT_METHOD"
"""Environment variable by which the supervisor tells the ranks where to meet; without it torchrun's
own address is used.
"""

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}

_TIMED_OUT = re.compile(r"Timed out waiting|timeout", re.IGNORECASE)


class TrainingError(FtError):
    """Training cannot continue and trying again cannot help: the numbers themselves went wrong."""

    code = "training_diverged"


class OutsideError(Exception):
    """A cause outside of the job: trying again may help."""

    code = "training_failed"


class CheckpointError(OutsideError):
    """A checkpoint could not be written."""

    code = "checkpoint_failed"


class ExportError(OutsideError):
    """The adapter could not be written."""

    code = "export_failed"


@dataclass(frozen=True)
class Groups:
    """Process groups of all ranks for one attempt: gloo, on the CPU."""

    stop: dist.ProcessGroup | None
    """The agreement to stop must not mix with the collectives of training. None with one rank."""
    save: dist.ProcessGroup
    """Checkpoints are written while training's own collectives run."""

    @classmethod
    def made(cls, spec: JobSpec, world: int) -> Groups:
        """New groups. Called by all ranks together."""
        timeout = _timeout(spec)
        return cls(_gloo_group(timeout) if world > 1 else None, _gloo_group(timeout))

    def destroy(self) -> None:
        """Close their connections.

        What still waits in them on this rank, such as the writer of a checkpoint, fails.
        """
        for group in (self.stop, self.save):
            if group is not None:
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Runtime:
    """What every part of the worker is given."""

    run: RunDir
    spec: JobSpec
    start: Start
    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    """The last dimension: the ranks that share one copy of the model; a first one, if there are
    several copies: the copies.
    """
    groups: Groups
    fence: Fence
    """Looked at before anything is published or removed."""
    context: ContextGroup | None = None
    """The ranks that share the rows of micro-batches with this one; None: it has whole rows."""

    @property
    def reads_late(self) -> bool:
        """Whether a step's numbers are read while the next one is computed.

        Processors have computed a step when the host goes on.
        """
        return self.device.type == "cuda"

    @property
    def compute_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPE[self.spec.precision.compute]


def enter(spec: JobSpec) -> torch.device:
    """Join the process group that torchrun set up. Returns this rank's device."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    device = _pick_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cpu":
        keep_freed_memory()
    quiet_libraries()
    _reproducible(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=os.environ.get(INIT_METHOD),
        rank=rank,
        world_size=world,
        timeout=_timeout(spec),
        device_id=device if device.type == "cuda" else None,
    )
    return device


def surroundings(
    run: RunDir,
    attempt: int,
    device: torch.device,
    fence: Fence | None = None,
    spec: JobSpec | None = None,
) -> Runtime:
    """The runtime of this rank in the default process group. Called by all ranks together.

    `fence`: one that is already watched; None: make one. `spec`: None: that of the run directory.
    """
    spec = spec or read_spec(run)
    start = Attempt(run, attempt).read_start()
    assert start is not None, f"attempt {attempt} has no start.json"
    rank = dist.get_rank()
    world = dist.get_world_size()
    mesh = _mesh(device, world, spec)
    groups = Groups.made(spec, world)
    return Runtime(
        run,
        spec,
        start,
        rank,
        world,
        device,
        mesh,
        groups,
        fence or Fence(run, attempt),
        _context(spec),
    )


def with_spec(runtime: Runtime, spec: JobSpec) -> Runtime:
    """The runtime for a spec whose options were chosen. Called by all ranks together."""
    before = runtime.spec.distributed
    changed = replace(runtime, spec=spec)
    if spec.distributed.replicate != before.replicate:
        changed = replace(changed, mesh=_mesh(runtime.device, runtime.world, spec))
    if spec.distributed.ranks_per_sample != before.ranks_per_sample:
        changed = replace(changed, context=_context(spec))
    return changed


def _context(spec: JobSpec) -> ContextGroup | None:
    return ContextGroup.made(spec.distributed.ranks_per_sample, _timeout(spec))


def _mesh(device: torch.device, world: int, spec: JobSpec) -> DeviceMesh:
    mesh = make_mesh(device.type, world, spec.distributed.replicate)
    for group in mesh.get_all_groups():  # those that a mesh makes have torch's own limit
        _set_pg_timeout(_timeout(spec), group)
    return mesh


def read_spec(run: RunDir) -> JobSpec:
    """The spec of a run directory's job."""
    spec = run.read("spec.json", JobSpec)
    assert spec is not None, f"{run.root} holds no spec.json"
    return spec


def _timeout(spec: JobSpec) -> timedelta:
    return timedelta(seconds=spec.distributed.collective_timeout_seconds)


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group that it makes"
    return group


def report_failure(run: RunDir, attempt: int, error: BaseException) -> None:
    """Write this rank's error to `outcome.json`, unless another's is there, this rank only lost its
    peers, or the attempt is over.
    """
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, SealedError) or lost_peer(error):
        return
    code, message = _code_and_message(run, error)
    # The next attempt has documents of its own, and other processes beside its ranks; the job's
    # documents are the same.
    of_job = isinstance(error, UnreadableDocumentError) and "/" not in error.key
    passing = isinstance(error, UnreadableDocumentError | UnavailableError) and not of_job
    permanent = code != disk.DISK_FULL and (
        (isinstance(error, FtError) and not passing) or code == missing_package.CODE
    )
    info = ErrorInfo(
        code=code,
        message=message,
        param=error.param if isinstance(error, FtError) else None,
        traceback=text,
        rank=int(os.environ.get("RANK", "0")),
    )
    Attempt(run, attempt).write_outcome(
        Outcome(kind=OutcomeKind.FAILED, permanent=permanent, error=info)
    )


def lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank failed or went away; that rank's own error is
    then the one to show.
    """
    lost = isinstance(error, RuntimeError) and is_lost_connection(str(error))
    return lost or isinstance(error, FailedElsewhere)


def _code_and_message(run: RunDir, error: BaseException) -> tuple[str, str]:
    if isinstance(error, FtError):
        return error.code, error.message
    cause = disk.os_error(error)
    if isinstance(error, OutsideError):
        return disk.DISK_FULL if disk.is_no_room(cause) else error.code, str(error)
    if cause is not None and disk.is_no_room(cause):
        return disk.DISK_FULL, disk.no_room(run.root, cause)
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
        spec = run.readable("spec.json", JobSpec)
        seconds = f"{spec.distributed.collective_timeout_seconds} seconds " if spec else ""
        limit = f"{seconds}(distributed.collective_timeout_seconds)"
        return (
            COLLECTIVE_TIMEOUT,
            f"A rank is stuck, or cannot be reached: the others waited {limit} for it. {error}",
        )
    words = f"{type(error).__name__}: {error}"
    missing = missing_package.failed_import(words) if isinstance(error, ImportError) else None
    return (missing_package.CODE, missing) if missing else ("training_failed", words)


def leave(code: int) -> None:
    """End this process at once.

    Interpreter shutdown can hang in gloo's destructor, and nothing is left to clean up.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def quiet_libraries() -> None:
    """What libraries tell their own callers is no news for a job's user, and every rank would say
    it.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _reproducible(device: torch.device) -> None:
    """Fix the global random generators, in case a library draws from them; nothing of ours does.

    Sums are in fp32.

    cuBLAS may split a long sum over blocks of a GPU, as adapters' gradients are over all tokens,
    and would add the parts in bf16. It may still split it: cuBLAS's older interface, which PyTorch
    takes by default, refuses to be forbidden that.
    """
    random.seed(0)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else PyTorch writes NaN into every new tensor, 2 % of a step.
        torch._C._set_deterministic_fill_uninitialized_memory(False)
    elif device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def start_thread(
    name: str, device: torch.device, target: Callable[..., None], *args: Any
) -> threading.Thread:
    """Run `target` in a daemon thread whose current CUDA device is the rank's.

    CUDA's current device belongs to a thread, and a new thread begins on GPU 0: its first use of
    CUDA would take some hundred MB of GPU 0 on every rank.
    """
    thread = threading.Thread(
        target=_run_on_device, args=(device, target, args), name=name, daemon=True
    )
    thread.start()
    return thread


def _run_on_device(
    device: torch.device, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    target(*args)


def watch_seal(fence: Fence) -> None:
    """End this process once its attempt is sealed, whatever it is doing.

    The supervisor may be stopped, and the rank itself may wait in a collective for ever.
    """
    threading.Thread(target=_wait_for_seal, args=(fence,), name="fence", daemon=True).start()


def _wait_for_seal(fence: Fence) -> None:
    seal = None
    while seal is None:
        with contextlib.suppress(OSError):  # the file system may be away for a while
            seal = fence.seal()
        time.sleep(0.0 if seal else SEAL_SECONDS)
    print(
        f"Attempt {fence.attempt} is over ({seal} is there): this rank leaves.",
        file=sys.stderr,
        flush=True,
    )
    leave(1)
