"""Documents of a run directory: JSON objects, each written whole by one writer, which directory.py
names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from ft_service.rundir.directory import RunDir
from ft_service.rundir.engine import SeatSize
from ft_service.rundir.file_digest import NamedFile


class _RunDocument(BaseModel):
    model_config = ConfigDict(frozen=True)


class Start(_RunDocument):
    """What was decided of an attempt before anything of it runs: by the reconciler, or `ft run`."""

    job_id: str
    attempt: int
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    generation: int
    """Number of the user's request (`desired`) under which this attempt was started."""
    checkpoint: str | None
    """Folder name below `checkpoints/` to resume from; None: from the first step."""
    slots: list[int] = []
    """Slots of the host that the ranks hold: the GPUs that they see, on a host with GPUs.

    Empty: all of them.
    """
    nodes: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Number of hosts or pods, each with the same number of ranks."""
    priority: int = 0
    """Priority of the job, for clusters with a queue of their own and in the rounds of an
    engine.
    """
    engine: str | None = None
    """Absolute path of the directory of the engine that trains the attempt (engine.py); None: it
    has ranks of its own.
    """
    seat: SeatSize | None = None
    """What it takes there; None: it has no seat, or was not planned."""


class Desired(StrEnum):
    """State that a user asks for."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class Control(_RunDocument):
    """State that the user asks of the running attempt."""

    generation: int
    desired: Desired


class Stop(_RunDocument):
    """Request to write a checkpoint and exit because the host is going away; the job continues
    elsewhere.
    """

    reason: str


class Launched(_RunDocument):
    """The attempt's job in the cluster (Kubernetes or Slurm), written once it was created."""

    job: str
    """Name of the job."""
    uid: str
    """Id of the job in the cluster, which differs between jobs of one name."""


MOST_LOADS = 480
"""Moments that are kept of a node's GPUs. Of more, every second one is."""


class GpuLoad(_RunDocument):
    """What the GPUs of an attempt's node did at a moment."""

    time: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    """Seconds since the epoch."""
    memory: Annotated[int, Field(ge=0, le=2**53)]
    """Bytes in use on the fullest of them."""
    busy: Annotated[float, Field(ge=0, le=1)]
    """Mean share of the time in which they computed."""
    watts: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
    """Of all of them."""


class Energy(_RunDocument):
    """What the ranks of a node have taken since the attempt's start, as far as it was measured."""

    joules: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
    source: Literal["nvml", "rapl"]
    """The boards of its GPUs, or the ranks' part of its processors' energy."""
    loads: Annotated[list[GpuLoad], Field(max_length=MOST_LOADS)] = []
    """What its GPUs did, oldest first, at equal distances; empty: it has none, or they do not
    tell.
    """


class ErrorInfo(_RunDocument):
    """Failure as the user sees it (OpenAI's `error` object), with details for operators."""

    code: str
    message: str
    param: str | None = None
    traceback: str | None = None
    rank: int | None = None


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(_RunDocument):
    """End of the attempt as the ranks report it."""

    kind: OutcomeKind
    permanent: bool = False
    """Whether a retry cannot help; with `failed`."""
    checkpoint: str | None = None
    """Complete checkpoint to resume from; with `stopped`."""
    error: ErrorInfo | None = None


class ExitReason(StrEnum):
    """Reason why an attempt ended. `Reason` (jobs/reasons.py) says what it means for the job."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """It was asked to stop, and left a checkpoint if it had begun."""
    CANCELLED = "cancelled"
    PERMANENT_ERROR = "permanent_error"
    """A retry cannot help."""
    WORKER_ERROR = "worker_error"
    """A rank raised an error."""
    WORKER_KILLED = "worker_killed"
    """A rank or torchrun was killed by a signal; its error says if the job did that itself."""
    LAUNCH_FAILED = "launch_failed"
    """Its host or place did not start its processes."""
    STOP_TIMEOUT = "stop_timeout"
    """It was asked to stop, did not stop in time, and was killed."""
    STALLED = "stalled"
    """It wrote no event for longer than allowed, and was killed."""
    HOST_LOST = "host_lost"
    """One of its hosts no longer answers."""
    DISK_FULL = "disk_full"
    """The disk was full."""
    ENGINE_LOST = "engine_lost"
    """The engine that trained it beside other attempts was killed or failed."""
    UNREADABLE = "unreadable"
    """One of its documents cannot be read. No process writes this reason: readers report it."""


class Exit(_RunDocument):
    """End of the attempt as the supervisor reports it."""

    code: Literal[0, 1, 64, 75]
    """0 succeeded; 1 failed, can be retried; 64 failed for good; 75 stopped with a checkpoint."""
    reason: ExitReason
    message: str
    error: ErrorInfo | None = None


class CheckpointMarker(_RunDocument):
    """`COMPLETE`: the last file of a checkpoint; readers ignore a checkpoint without it."""

    step: int
    attempt: int
    world_size: int
    files: list[NamedFile]
    criterion: Annotated[
        float | None, Field(validation_alias=AliasChoices("criterion", "valid_loss"))
    ] = None
    """What checkpoints are compared by, the lower the better: the validation loss after this step
    (valid_loss in version 0.2), or the negative mean reward. None: it was not validated.
    """


class Damage(_RunDocument):
    """`DAMAGED`: mark of a complete checkpoint whose files are damaged; readers ignore it."""

    faults: list[str]


class Result(_RunDocument):
    """`result.json`: the job has succeeded and its adapter is in place."""

    attempt: int
    steps: Annotated[int, Field(ge=0, lt=2**31)]
    trained_tokens: Annotated[int, Field(ge=0, lt=2**62)]
    train_loss: float | None
    valid_loss: float | None
    adapter: str = "adapter"
    metrics: str = "metrics.csv"


class ExportFormat(StrEnum):
    """Format of an export for other programs."""

    PEFT = "peft"
    """Adapter as it was trained."""
    VLLM = "vllm"
    """Adapter with one rank and one scale, as vLLM needs it."""
    MERGED = "merged"
    """Base and adapter as one model in bf16."""
    MERGED_FP8 = "merged-fp8"
    """As `merged`, with linear layers in FP8 per row (compressed-tensors)."""
    MERGED_INT4 = "merged-int4"
    """As `merged`, with linear layers in INT4 per group (compressed-tensors, pack-quantized)."""
    MERGED_NVFP4 = "merged-nvfp4"
    """As `merged`, with linear layers in NVFP4 (compressed-tensors, nvfp4-pack-quantized)."""
    MERGED_MXFP4 = "merged-mxfp4"
    """As `merged`, with linear layers in MXFP4 (compressed-tensors, mxfp4-pack-quantized), or what
    the base was published with in MXFP4.
    """
    GGUF = "gguf"
    """Merged model for llama.cpp and Ollama, in bf16."""
    GGUF_Q8 = "gguf-q8_0"
    """As `gguf`, with matrices in Q8_0."""
    GGUF_ADAPTER = "gguf-adapter"
    """Adapter alone, for llama.cpp and Ollama."""
    TORCHAO_INT8 = "torchao-int8"
    """As `merged`, with linear layers in INT8 by rows, rounded and written by torchao."""
    TORCHAO_FP8 = "torchao-fp8"
    """The same in FP8 by rows."""
    TORCHAO_NVFP4 = "torchao-nvfp4"
    """The same in NVFP4."""
    TORCHAO_8DA4W = "torchao-8da4w"
    """The same in INT4 by 32 columns, inputs rounded to INT8 by whatever runs it, the embedding in
    INT8: for phones, by ExecuTorch.
    """


ExportStatus = Literal["queued", "running", "succeeded", "failed"]


class Export(_RunDocument):
    """`exports/<format>.json` in a run directory: state of a requested export, whose files are in
    `exports/<format>/`.
    """

    format: ExportFormat
    status: ExportStatus
    created_at: float
    finished_at: float | None = None
    bytes: int | None = None
    """Size of all its files."""
    error: str | None = None
    report: dict[str, Any] = {}
    """Figures of the export: losses, rounding, results of reading it back."""


def export_key(to: ExportFormat) -> str:
    """Return the key of an export's folder."""
    return f"exports/{to.value}"


def state_key(to: ExportFormat) -> str:
    return f"exports/{to.value}.json"


def read_export(run: RunDir, to: ExportFormat) -> Export | None:
    """Read the state of an export; None: it was not requested, or is unreadable."""
    return run.readable(state_key(to), Export)
