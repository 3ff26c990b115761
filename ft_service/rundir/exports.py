"""The forms in which a tuned model leaves, and what is said of one that was asked for."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ft_service.rundir.directory import RunDir


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
    try:
        return run.read(state_key(to), Export)
    except ValidationError:
        return None
