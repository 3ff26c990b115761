"""A job on the wire, and how a record becomes it. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.wire.views import whole_seconds
from ft_service.jobs.forecast import Place
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.events import Metrics
from ft_service.spec import DPO_LEARNING_RATE, LEARNING_RATE, Integration, JobSpec, Strict


class ResumeRanks(Strict):
    nproc_per_node: Annotated[int, Field(ge=1, le=64)]


class ResumeBody(Strict):
    """What a paused job goes on with. Not in OpenAI's API."""

    distributed: ResumeRanks | None = None
    """Another number of ranks per node than before; it trains on the same samples in the same order."""


class HyperparametersView(BaseModel):
    """Hyperparameters as resolved: no "auto" is left."""

    n_epochs: int | None
    """None: training.max_steps decides instead."""
    batch_size: int
    learning_rate_multiplier: float


class DpoHyperparametersView(HyperparametersView):
    """The same of direct preference optimisation; learning_rate_multiplier is of its own usual rate."""

    beta: float
    loss_type: str
    rpo_alpha: float | None


class SupervisedView(BaseModel):
    hyperparameters: HyperparametersView


class DpoView(BaseModel):
    hyperparameters: DpoHyperparametersView


class MethodView(BaseModel):
    type: Literal["supervised", "dpo"] = "supervised"
    supervised: SupervisedView | None = None
    dpo: DpoView | None = None


class JobErrorView(BaseModel):
    code: str
    message: str
    param: str | None


class ProgressView(BaseModel):
    """The newest numbers that training reported; `valid_loss`: of the last validation so far."""

    step: int
    total_steps: int
    epoch: float | None
    train_loss: float | None
    valid_loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    trained_tokens: int | None


class QueueView(BaseModel):
    """Where a waiting job stands."""

    position: int
    """1: no other waiting job is expected to start before it."""
    reason: str
    """Why it does not run yet."""
    estimated_start: int | None
    """Seconds since the epoch, by how long jobs took and take here; null: not known yet."""
    share: float
    """Its project's part, from 0 to 1, of what all projects have used lately (half of it is forgotten every three days). Of
    jobs of like priority those start first whose project has the smaller part."""


class MembershipView(BaseModel):
    """A job's part in a sweep."""

    id: str
    values: dict[str, Any]
    """What it has of its own: dotted option → value."""
    stopped: str | None
    """Why the sweep stopped it; null: it did not."""


class JobView(BaseModel):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: JobErrorView | None
    fine_tuned_model: str | None
    """Once succeeded."""
    finished_at: int | None
    hyperparameters: HyperparametersView
    model: str
    """The base, or the tuned model that the job goes on from."""
    organization_id: str
    result_files: list[str]
    seed: int
    status: str
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    validation_split: float | None
    """Share of the training file's samples that is set aside for validation."""
    estimated_finish: int | None
    integrations: list[Integration]
    metadata: dict[str, str] | None
    method: MethodView

    phase: str | None
    """While running: launching, training or stopping; while cancelled: stopping, until the processes are gone."""
    reason: str | None
    """Why the job is in its final state, or why its last attempt ended."""
    attempt: int
    """Runs of the workers so far; 0: none yet."""
    progress: ProgressView | None
    pending_reason: str | None
    """Why a job does not start although its turn has come, or why nothing is known of it now; null: it waits for its turn, or
    runs."""
    queue: QueueView | None
    """While queued."""
    suffix: str | None
    data: dict[str, str]
    """What the data files call the columns of their format; empty: by their names."""
    chat_template: str | None
    """The text of the chat template in place of the base's; null: the base's."""
    serve: str | None
    """The inference server that the adapter is meant for; null: none was named."""
    priority: int
    max_seconds: int | None
    lora: dict[str, Any]
    precision: dict[str, Any]
    training: dict[str, Any]
    distributed: dict[str, Any]
    checkpoint: dict[str, Any]
    evaluation: dict[str, Any] | None
    chosen: dict[str, str]
    """Options that were "auto" → why they are what they are."""
    sweep: MembershipView | None
    """The sweep that it is one of."""


def job_view(
    job: Job,
    *,
    organization: str,
    metrics: Metrics | None = None,
    ends_at: float | None = None,
    place: Place | None = None,
    valid_loss: float | None = None,
) -> JobView:
    """A job as the wire shows it. `metrics`: the job's newest; `ends_at`: when it likely ends; `place`: in the queue,
    if it is known; `valid_loss`: of the last validation."""
    spec = job.spec
    hyperparameters = _hyperparameters(spec)
    return JobView(
        id=job.id,
        created_at=int(job.created_at),
        error=JobErrorView.model_validate(job.error) if job.error else None,
        fine_tuned_model=spec.tuned_name if job.state is State.SUCCEEDED else None,
        finished_at=whole_seconds(job.finished_at),
        hyperparameters=hyperparameters,
        model=spec.parent.name if spec.parent else spec.model.name,
        organization_id=organization,
        result_files=[job.result_file] if job.result_file else [],
        seed=spec.seed,
        status=State.QUEUED.value if job.phase is Phase.WAITING else job.state.value,
        trained_tokens=job.trained_tokens,
        training_file=job.request["training_file"],
        validation_file=job.request.get("validation_file"),
        validation_split=spec.validation_split,
        estimated_finish=whole_seconds(ends_at),
        integrations=[Integration.model_validate(given) for given in job.request.get("integrations") or ()],
        metadata=job.request.get("metadata"),
        method=_method(spec, hyperparameters),
        phase=job.phase.value if job.phase else None,
        reason=job.reason.value if job.reason else None,
        attempt=job.attempt,
        progress=_progress(metrics, valid_loss) if metrics else None,
        pending_reason=job.pending if job.state in (State.VALIDATING, State.QUEUED, State.RUNNING) else None,
        queue=_queue(place) if place and job.state is State.QUEUED else None,
        suffix=job.request.get("suffix"),
        data=dict(spec.data.pairs),
        chat_template=spec.chat_template or None,
        serve=job.request.get("serve"),
        priority=job.priority,
        max_seconds=job.max_seconds,
        evaluation={**spec.evaluation.model_dump(), "prompts": spec.evaluation.count} if spec.evaluation else None,
        chosen=spec.chosen,
        sweep=_membership(job),
        **{name: getattr(spec, name).model_dump() for name in ("lora", "precision", "training", "distributed", "checkpoint")},
    )


def _membership(job: Job) -> MembershipView | None:
    if job.sweep_id is None:
        return None
    return MembershipView(id=job.sweep_id, values=job.sweep_values or {}, stopped=job.stopped)


def _method(spec: JobSpec, hyperparameters: HyperparametersView) -> MethodView:
    if spec.dpo is None:
        return MethodView(supervised=SupervisedView(hyperparameters=hyperparameters))
    own = DpoHyperparametersView(**hyperparameters.model_dump(), **spec.dpo.model_dump())
    return MethodView(type="dpo", dpo=DpoView(hyperparameters=own))


def _hyperparameters(spec: JobSpec) -> HyperparametersView:
    training, of_one = spec.training, LEARNING_RATE if spec.dpo is None else DPO_LEARNING_RATE
    return HyperparametersView(
        n_epochs=training.epochs if training.max_steps is None else None,
        batch_size=training.batch,
        # Back to the number the user wrote: 1e-4 / 2e-4 and its kind carry the noise of two roundings.
        learning_rate_multiplier=float(f"{training.rate / of_one:.12g}"),
    )


def _progress(metrics: Metrics, valid_loss: float | None) -> ProgressView:
    speed = metrics.tokens / metrics.step_seconds if metrics.tokens and metrics.step_seconds else None
    known = metrics.model_dump(include=set(ProgressView.model_fields))
    return ProgressView(**{**known, "tokens_per_second": speed, "valid_loss": valid_loss})


def _queue(place: Place) -> QueueView:
    forecast = place.forecast
    return QueueView(
        position=forecast.position,
        reason=forecast.reason,
        estimated_start=whole_seconds(forecast.starts_at),
        share=round(place.share, 4),
    )
