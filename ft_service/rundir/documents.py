"""The documents of a run directory: JSON objects, each written whole by one writer. directory.py says who writes which."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ft_service.rundir.directory import RunDir
from ft_service.rundir.file_digest import NamedFile


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True)


class Start(_Document):
    """What the launcher decided for one attempt."""

    job_id: str
    attempt: int
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    generation: int
    """Number of the wish (`desired`) that this attempt was started under."""
    checkpoint: str | None
    """Folder name below `checkpoints/` to resume from; None: from the first step."""
    slots: list[int] = []
    """Slots of the host that the ranks hold: the GPUs they see, on a host with GPUs. Empty: nobody shares the host."""
    nodes: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Hosts that the ranks are spread over evenly."""
    priority: int = 0
    """The job's, for a cluster that has an order of its own."""
    hosts: list[str] = []
    """Names of the hosts, node by node, where each has an agent. Empty: the host of whoever starts it, or pods."""
    node_slots: list[list[int]] = []
    """Of several such hosts, the slots that the ranks hold on each, in place of `slots`."""


class Desired(StrEnum):
    """What a user wants of a job."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class Control(_Document):
    """What the user wants of the running attempt."""

    generation: int
    desired: Desired


class Stop(_Document):
    """The host is going away: checkpoint and leave, as for a pause; the job is to go on elsewhere."""

    reason: str


class Launched(_Document):
    """The cluster's Job of the attempt was created."""

    job: str
    uid: str


class ErrorInfo(_Document):
    """A failure as the user sees it (OpenAI's `error` object), plus what an operator needs."""

    code: str
    message: str
    param: str | None = None
    traceback: str | None = None
    rank: int | None = None


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(_Document):
    """How the ranks say the attempt ends."""

    kind: OutcomeKind
    permanent: bool = False
    """Trying again cannot help; with `failed`."""
    checkpoint: str | None = None
    """The complete checkpoint to go on from; with `stopped`."""
    error: ErrorInfo | None = None


class ExitReason(StrEnum):
    """Why an attempt ended. What that means for its job is a `Reason` (jobs/reasons.py)."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """It was asked to, and left a checkpoint if it had begun."""
    CANCELLED = "cancelled"
    PERMANENT_ERROR = "permanent_error"
    """Trying again cannot help."""
    WORKER_ERROR = "worker_error"
    """A rank raised an error."""
    WORKER_KILLED = "worker_killed"
    """A rank or torchrun was killed from outside."""
    STOP_TIMEOUT = "stop_timeout"
    """It was asked to stop, did not, and was killed."""
    STALLED = "stalled"
    """It said nothing for longer than allowed, and was killed."""
    HOST_LOST = "host_lost"
    """A host that it ran on does not answer any more."""
    DISK_FULL = "disk_full"
    """It found no room on the disk."""
    UNREADABLE = "unreadable"
    """A document of it cannot be read. Nobody writes this: it is how readers see such an attempt."""


class Exit(_Document):
    """How the attempt ended, in the supervisor's words."""

    code: Literal[0, 1, 64, 75]
    """0 done; 1 failed, may be tried again; 64 failed for good; 75 stopped with a checkpoint."""
    reason: ExitReason
    message: str
    error: ErrorInfo | None = None


class CheckpointMarker(_Document):
    """`COMPLETE`: the last thing written to a checkpoint; a folder without it does not exist for any reader."""

    step: int
    attempt: int
    world_size: int
    files: list[NamedFile]
    valid_loss: float | None = None
    """Validation loss behind this step; None: it was not validated."""


class Damage(_Document):
    """`DAMAGED`: a checkpoint that was complete and is so no more; it does not exist for any reader either."""

    faults: list[str]


class Result(_Document):
    """`result.json`: the job is done and its adapter is in place."""

    attempt: int
    steps: Annotated[int, Field(ge=0, lt=2**31)]
    trained_tokens: Annotated[int, Field(ge=0, lt=2**62)]
    train_loss: float | None
    valid_loss: float | None
    adapter: str = "adapter"
    metrics: str = "metrics.csv"


class ExportFormat(StrEnum):
    """What another program reads."""

    PEFT = "peft"
    """The adapter as it was trained."""
    VLLM = "vllm"
    """The adapter with one rank and one scale, which vLLM reads."""
    MERGED = "merged"
    """Base and adapter as one model in bf16."""
    MERGED_FP8 = "merged-fp8"
    """The same with linear layers in FP8 by rows (compressed-tensors)."""
    MERGED_INT4 = "merged-int4"
    """The same with linear layers in INT4 by groups (compressed-tensors, pack-quantized)."""
    GGUF = "gguf"
    """The merged model for llama.cpp and Ollama, in bf16."""
    GGUF_Q8 = "gguf-q8_0"
    """The same with matrices in Q8_0."""
    GGUF_ADAPTER = "gguf-adapter"
    """The adapter alone for llama.cpp and Ollama."""


ExportStatus = Literal["queued", "running", "succeeded", "failed"]


class Export(BaseModel):
    """`exports/<format>.json` in a run directory: one that was asked of the service, which made `exports/<format>/`."""

    model_config = ConfigDict(frozen=True)

    format: ExportFormat
    status: ExportStatus
    created_at: float
    finished_at: float | None = None
    bytes: int | None = None
    """Of all its files."""
    error: str | None = None
    report: dict[str, Any] = {}
    """What making it cost: losses, rounding, what was read again."""


def export_key(to: ExportFormat) -> str:
    """The folder of an export in the run directory."""
    return f"exports/{to.value}"


def state_key(to: ExportFormat) -> str:
    return f"exports/{to.value}.json"


def read_export(run: RunDir, to: ExportFormat) -> Export | None:
    """None: it was not asked for, or what is there cannot be read."""
    return run.readable(state_key(to), Export)
