"""The server's answers as the client reads them: OpenAI's objects and what this service adds to them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ft_service.jobs.states import TERMINAL, State
from ft_service.rundir.events import Metrics


class Answer(BaseModel):
    """An answer of the server. Fields unknown to this version are kept, so that `--json` shows them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str


class RemoteFile(Answer):
    """OpenAI's FileObject."""

    filename: str
    bytes: int


class RemoteJob(Answer):
    """OpenAI's FineTuningJob. Times are seconds since the epoch."""

    model: str
    status: str
    created_at: int
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    training_file: str
    validation_file: str | None = None
    result_files: list[str] = []
    error: dict[str, Any] | None = None
    phase: str | None = None
    """While running: launching, training or stopping."""
    progress: dict[str, Any] | None = None
    """The newest numbers: step, total_steps, train_loss, …"""
    pending_reason: str | None = None
    """Why it does not start although its turn has come, or why nothing is known of it."""
    queue: dict[str, Any] | None = None
    """While it waits: position, reason, estimated_start, share."""
    precision: dict[str, Any] = {}
    training: dict[str, Any] = {}
    distributed: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    """Options that were "auto" → why they are what they are."""

    @property
    def choices(self) -> list[tuple[str, str]]:
        """Options that were "auto", dotted, and their values with the reason."""
        sections = {"precision": self.precision, "training": self.training, "distributed": self.distributed}
        found = []
        for option, why in self.chosen.items():
            section, _, name = option.partition(".")
            found.append((option, f"{sections.get(section, {}).get(name)} ({why})"))
        return found

    @property
    def over(self) -> bool:
        """Whether the job is in a final state."""
        return self.status in {str(state) for state in TERMINAL}

    @property
    def paused(self) -> bool:
        return self.status == State.PAUSED

    @property
    def error_text(self) -> str | None:
        """Why it failed, in one sentence. None: it has not failed."""
        return (self.error or {}).get("message")


class RemoteEvent(Answer):
    """OpenAI's FineTuningJobEvent."""

    created_at: int
    level: str
    message: str
    type: str | None = None
    data: dict[str, Any] | None = None

    def metrics(self) -> Metrics | None:
        """The numbers of a metrics event; None for any other."""
        if self.type != "metrics" or self.data is None:
            return None
        try:
            return Metrics.model_validate(self.data)
        except ValidationError:
            return None


class RemoteCheckpoint(Answer):
    """OpenAI's FineTuningJobCheckpoint."""

    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    created_at: int
    metrics: dict[str, Any] = {}


class RemoteModel(Answer):
    """OpenAI's Model."""

    created: int
    owned_by: str


class LogLine(BaseModel):
    """A line that one of a job's processes printed."""

    attempt: int
    source: str
    """`rank 0 stdout`, `torchrun.log`, …"""
    line: str
