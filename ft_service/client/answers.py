"""The server's answers as the client reads them: OpenAI's objects and what this service adds to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ft_service.jobs.states import TERMINAL, State
from ft_service.rundir.events import Metrics
from ft_service.spec import JobOptions


class Answer(BaseModel):
    """An answer of the server. Fields unknown to this version are kept, so that `--json` shows them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str


class RemoteExport(Answer):
    """A form of a job's outcome that was asked for."""

    status: str
    """queued, running, succeeded or failed."""
    bytes: int | None = None
    error: str | None = None
    report: dict[str, Any] = {}


class RemoteFile(Answer):
    """OpenAI's FileObject."""

    filename: str
    bytes: int
    created_at: int = 0
    purpose: str = ""


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
    validation_split: float | None = None
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
    suffix: str | None = None
    seed: int | None = None
    lora: dict[str, Any] = {}
    precision: dict[str, Any] = {}
    training: dict[str, Any] = {}
    distributed: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {}
    evaluation: dict[str, Any] | None = None
    chosen: dict[str, str] = {}
    """Options that were "auto" → why they are what they are."""
    sweep: dict[str, Any] | None = None
    """Of the sweep that it is one of: id, the values that it has of its own, why it was stopped."""

    @property
    def options(self) -> dict[str, Any]:
        """All options by dotted name."""
        sections = ("lora", "precision", "training", "distributed", "checkpoint")
        return {f"{section}.{name}": value for section in sections for name, value in getattr(self, section).items()}

    @property
    def choices(self) -> list[tuple[str, str]]:
        """Options that were "auto", dotted, and their values with the reason."""
        return [(option, f"{shown(self.options.get(option))} ({why})") for option, why in self.chosen.items()]

    @property
    def given_options(self) -> dict[str, Any]:
        """Options that are not what they are by default, nor chosen by the service."""
        usual = JobOptions().model_dump()
        known = {
            f"{section}.{name}": value
            for section in usual
            if isinstance(usual[section], dict)
            for name, value in usual[section].items()
        }
        return {
            name: value
            for name, value in self.options.items()
            if name not in self.chosen and not (name in known and known[name] == value)
        }

    @property
    def base(self) -> str:
        """The base's name, also where the job goes on from a tuned model."""
        return self.model.removeprefix("ft:").split(":", 1)[0] if self.model.startswith("ft:") else self.model

    @property
    def ranks(self) -> int | None:
        """Processes that train; None: not known."""
        nodes, each = self.distributed.get("nnodes", 1), self.distributed.get("nproc_per_node")
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None

    @property
    def state_text(self) -> str:
        """The status in a word or a few."""
        if self.status == State.RUNNING and self.phase == "stopping":
            return "stopping at a checkpoint"
        if self.status == State.CANCELLED and self.phase == "stopping":
            return "cancelled; its processes are ending"
        return self.waiting_text or (f"{self.status} ({self.phase})" if self.phase else self.status)

    @property
    def waiting_text(self) -> str | None:
        """What a queued job waits for; None: it is not queued."""
        if self.status != State.QUEUED:
            return None
        if self.pending_reason:
            return f"queued: {self.pending_reason}"
        place = self.queue or {}
        if not place:
            return "queued"
        at = place.get("estimated_start")
        starts = f", starts about {datetime.fromtimestamp(at):%Y-%m-%d %H:%M}" if at else ""
        return f"queued: number {place.get('position')}{starts}. {place.get('reason')}"

    @property
    def stopped_text(self) -> str | None:
        """Why its sweep stopped it. None: it did not."""
        return (self.sweep or {}).get("stopped")

    def seconds(self, now: float) -> float:
        """From its creation to its end, or to now."""
        return max(0.0, (self.finished_at or now) - self.created_at)

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


class RemoteSweep(Answer):
    """A sweep, with its jobs best first."""

    model: str
    status: str
    created_at: int
    finished_at: int | None = None
    suffix: str | None = None
    options: list[str] = []
    """Those that are tried, dotted."""
    rungs: list[float] = []
    counts: dict[str, int] = {}
    best: dict[str, Any] | None = None
    """job_id, valid_loss, step, values, fine_tuned_model; so far, until it is over."""
    jobs: list[dict[str, Any]] = []
    """Each with id, values, status, phase, stopped, error, step, total_steps, valid_loss, best_step, fine_tuned_model."""

    @property
    def over(self) -> bool:
        return self.status != "running"

    @property
    def counts_text(self) -> str:
        """`2 succeeded, 1 running`."""
        return ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in self.counts.items())


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


class RemoteEvaluation(Answer):
    """What a job's model answers to its prompts at a step; step 0 is before training."""

    step: int
    created_at: int
    metrics: dict[str, float] = {}
    base_metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []


class RemoteModel(Answer):
    """OpenAI's Model."""

    created: int
    owned_by: str
    base: dict[str, Any] | None = None
    """Of a base: family, parameters, format, context, chat_template, licence, trainable, why_not."""


class LogLine(BaseModel):
    """A line that one of a job's processes printed."""

    attempt: int
    source: str
    """`rank 0 stdout`, `torchrun.log`, …"""
    line: str


def scores_text(metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Metrics with what they were before training."""
    return ", ".join(f"{name} {before.get(name, 0.0):.2f} → {value:.2f}" for name, value in metrics.items())


def shown(value: object) -> str:
    """An option's value as a SPEC writes it."""
    return value if isinstance(value, str) else json.dumps(value)
