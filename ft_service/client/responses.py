"""Responses of the server as the client reads them: OpenAI's objects with this service's
additions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ft_service.jobs.method_options import method_options
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import TERMINAL, State
from ft_service.money import energy_text, grams_text, micros, money_text
from ft_service.rundir.evaluations import SuiteTask
from ft_service.rundir.events import Metrics
from ft_service.spec import JobOptions


class RemoteObject(BaseModel):
    """Object in a response of the server.

    Fields unknown to this version are kept, so that `--json` shows them.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str


class Money(BaseModel):
    """An amount of a currency."""

    model_config = ConfigDict(extra="allow", frozen=True)

    value: float
    currency: str

    @property
    def text(self) -> str:
        """The amount to the cent: `12.40 EUR`."""
        return money_text(micros(self.value), self.currency)


class Energy(BaseModel):
    """Energy that was measured, and grams of CO2 as far as they are known."""

    model_config = ConfigDict(extra="allow", frozen=True)

    joules: float
    co2_grams: float | None = None

    @property
    def text(self) -> str:
        """`1.25 kWh, 425 g of CO2`."""
        weight = "" if self.co2_grams is None else f", {grams_text(self.co2_grams)} of CO2"
        return f"{energy_text(self.joules)}{weight}"


class RemoteChat(RemoteObject):
    """A chat completion that is kept, with the messages of its request."""

    model: str
    created: int
    choices: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None
    feedback: dict[str, Any] | None = None


class RemoteExport(RemoteObject):
    """Export of a job's outcome to another format."""

    status: str
    """queued, running, succeeded or failed."""
    bytes: int | None = None
    error: str | None = None
    report: dict[str, Any] = {}


class RemoteFile(RemoteObject):
    """OpenAI's FileObject."""

    filename: str
    bytes: int
    created_at: int = 0
    purpose: str = ""


class RemoteJob(RemoteObject):
    """OpenAI's FineTuningJob. Times are seconds since the epoch."""

    model: str
    status: str
    created_at: int
    finished_at: int | None = None
    fine_tuned_model: str | None = None
    trained_tokens: int | None = None
    training_file: str | None
    validation_file: str | None = None
    validation_split: float | None = None
    result_files: list[str] = []
    error: dict[str, Any] | None = None
    phase: str | None = None
    """Phase of a running job: launching, training or stopping."""
    progress: dict[str, Any] | None = None
    """Newest metrics: step, total_steps, train_loss, …"""
    pending_reason: str | None = None
    """Reason for which it does not start although it is next, or its state is unknown."""
    queue: dict[str, Any] | None = None
    """Place in the queue: position, reason, estimated_start, share."""
    suffix: str | None = None
    name: str | None = None
    note: str | None = None
    """How its users call it, and what they have noted about it."""
    seed: int | None = None
    method: dict[str, Any] = {}
    lora: dict[str, Any] = {}
    precision: dict[str, Any] = {}
    training: dict[str, Any] = {}
    distributed: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {}
    evaluation: dict[str, Any] | None = None
    chosen: dict[str, str] = {}
    """Options that were "auto" → reason for their value."""
    engine_id: str | None = None
    """Engine that trains it beside other jobs; None: it does not run, or has ranks of its own."""
    sweep: dict[str, Any] | None = None
    """Sweep that it belongs to: id, values of its own, reason for which it was stopped."""
    forgetting: dict[str, Any] | None = None
    """Comparison with the base alone, on general text and prompts; None: not measured."""
    suites: dict[str, SuiteTask] = {}
    """Task of `ft eval --suite` → accuracies."""
    reason: str | None = None
    """Why it is in its final state, or its last attempt ended."""
    max_cost: float | None = None
    """What it may cost, in the currency of `cost`."""
    cost: Money | None = None
    """What it has cost until now; None: its slots have no price."""
    planned_cost: Money | None = None
    energy: Energy | None = None
    """What was measured; None: nothing."""

    @property
    def options(self) -> dict[str, Any]:
        """All options by dotted name."""
        sections = ("lora", "precision", "training", "distributed", "checkpoint")
        named = {
            f"{section}.{name}": value
            for section in sections
            for name, value in getattr(self, section).items()
        }
        return self.method_options | named

    @property
    def method_options(self) -> dict[str, Any]:
        """The method by dotted name with the options that it alone has; of a grader, its name and
        type. Empty: supervised.
        """
        return method_options(self.method)

    @property
    def choices(self) -> list[tuple[str, str]]:
        """Options that were "auto", by dotted name, with value and reason."""
        return [
            (option, f"{shown(self.options.get(option))} ({why})")
            for option, why in self.chosen.items()
        ]

    @property
    def given_options(self) -> dict[str, Any]:
        """Options that differ from their defaults and were not chosen by the service."""
        defaults = JobOptions().model_dump()
        known = {
            f"{section}.{name}": value
            for section in defaults
            if isinstance(defaults[section], dict)
            for name, value in defaults[section].items()
        }
        return {
            name: value
            for name, value in self.options.items()
            if name not in self.chosen and not (name in known and known[name] == value)
        }

    @property
    def base(self) -> str:
        """Name of the base, also if the job continues a tuned model."""
        return (
            self.model.removeprefix("ft:").split(":", 1)[0]
            if self.model.startswith("ft:")
            else self.model
        )

    @property
    def ranks(self) -> int | None:
        """Number of training processes; None: unknown."""
        nodes = self.distributed.get("nnodes", 1)
        each = self.distributed.get("nproc_per_node")
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None

    @property
    def state_text(self) -> str:
        """Status in a few words."""
        if self.status == State.RUNNING and self.phase == "stopping":
            return "stopping at a checkpoint"
        if self.status == State.CANCELLED and self.phase == "stopping":
            return "cancelled; its processes are ending"
        if self.paused and self.reason == Reason.COST_LIMIT:
            return "paused, since it has cost as much as it may: ft resume --max-cost AMOUNT"
        return self.waiting_text or (f"{self.status} ({self.phase})" if self.phase else self.status)

    @property
    def waiting_text(self) -> str | None:
        """Reason for which a queued job waits; None: it is not queued."""
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
    def cost_text(self) -> str | None:
        """What it has cost, what was planned and what it may cost; None: there is no price."""
        if self.cost is None:
            return None
        planned = "" if self.planned_cost is None else f", planned {self.planned_cost.text}"
        limit = ""
        if self.max_cost is not None:
            limit = f", at most {money_text(micros(self.max_cost), self.cost.currency)}"
        return f"{self.cost.text}{planned}{limit}"

    @property
    def stopped_text(self) -> str | None:
        """Reason for which its sweep stopped it; None: it did not."""
        return (self.sweep or {}).get("stopped")

    def seconds(self, now: float) -> float:
        """Return the seconds from its creation to its end, or to now."""
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
        """Reason for which it failed; None: it has not failed."""
        return (self.error or {}).get("message")


class RemoteSweep(RemoteObject):
    """Sweep with its jobs, the best first."""

    model: str
    status: str
    created_at: int
    finished_at: int | None = None
    suffix: str | None = None
    options: list[str] = []
    """Dotted names of the varied options."""
    rungs: list[float] = []
    counts: dict[str, int] = {}
    best: dict[str, Any] | None = None
    """Best job so far: job_id, valid_loss, step, values, fine_tuned_model."""
    jobs: list[dict[str, Any]] = []
    """Jobs with id, values, status, phase, stopped, error, step, total_steps, valid_loss,
    best_step, fine_tuned_model, cost.
    """
    cost: Money | None = None
    """What they have cost together."""
    energy: Energy | None = None

    @property
    def over(self) -> bool:
        return self.status != "running"

    @property
    def counts_text(self) -> str:
        """Number of jobs by status: `2 succeeded, 1 running`."""
        return ", ".join(
            f"{number} {status.replace('_', ' ')}" for status, number in self.counts.items()
        )


class RemoteEngineJob(RemoteObject):
    """Job that an engine trains."""

    since: int
    slot_seconds: float
    """Its share of the time of the engine's slots."""


class RemoteEngine(RemoteObject):
    """Engine that trains several jobs on one base."""

    created_at: int
    base: str | None = None
    """None: it has no job now."""
    ranks: int
    most_jobs: int
    jobs: list[RemoteEngineJob] = []
    ending: bool = False

    @property
    def jobs_text(self) -> str:
        """Number of its jobs: `3 of 8`, or `3 of 8, ending`."""
        return f"{len(self.jobs)} of {self.most_jobs}{', ending' if self.ending else ''}"

    @property
    def shares(self) -> dict[str, str]:
        """Share of each of its jobs in what they have used, by id: `25%`; empty if they have used
        nothing yet.
        """
        whole = sum(job.slot_seconds for job in self.jobs)
        return {job.id: f"{job.slot_seconds / whole:.0%}" for job in self.jobs} if whole else {}


class RemoteEvent(RemoteObject):
    """OpenAI's FineTuningJobEvent."""

    created_at: int
    level: str
    message: str
    type: str | None = None
    data: dict[str, Any] | None = None

    def metrics(self) -> Metrics | None:
        """Return the metrics of a metrics event; None for any other."""
        if self.type != "metrics" or self.data is None:
            return None
        try:
            return Metrics.of_flat(self.data)
        except ValidationError:
            return None


class RemoteCheckpoint(RemoteObject):
    """OpenAI's FineTuningJobCheckpoint."""

    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    created_at: int
    metrics: dict[str, Any] = {}


class RemoteEvaluation(RemoteObject):
    """Answers of a job's model to its prompts at a step; step 0 is before training."""

    step: int
    created_at: int
    metrics: dict[str, float] = {}
    base_metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []


class RemoteModel(RemoteObject):
    """OpenAI's Model."""

    created: int
    owned_by: str
    base: dict[str, Any] | None = None
    """Facts on a base: family, parameters, format, context, chat_template, licence, described,
    trainable, why_not.
    """


class LogLine(BaseModel):
    """Line of output of one of a job's processes."""

    attempt: int
    source: str
    """`rank 0 stdout`, `torchrun.log`, …"""
    line: str


def scores_text(metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Return metrics with their values before training."""
    return ", ".join(
        f"{name} {before.get(name, 0.0):.2f} → {value:.2f}" for name, value in metrics.items()
    )


def shown(value: object) -> str:
    """Return an option's value as a SPEC writes it."""
    return value if isinstance(value, str) else json.dumps(value)
