"""The wire: OpenAI's objects as this service writes them, and how records become them. Pure.

OpenAI's fields come first in each class; what this service adds follows them. Times are whole seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from ft_service.jobs.forecast import Place
from ft_service.jobs.states import Job, Phase, State
from ft_service.rundir.events import Metrics
from ft_service.spec import DPO_LEARNING_RATE, LEARNING_RATE, Integration, JobSpec, Strict, TunedName
from ft_service.store.records import Checkpoint, File, Permission, StoredEvent, Upload, UploadPart

View = TypeVar("View")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorView(BaseModel):
    """Every answer of 400 and above."""

    error: ErrorBody


class ListView(BaseModel, Generic[View]):
    """A page. The next one: `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[View]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ResumeRanks(Strict):
    nproc_per_node: Annotated[int, Field(ge=1, le=64)]


class ResumeBody(Strict):
    """What a paused job goes on with. Not in OpenAI's API."""

    distributed: ResumeRanks | None = None
    """Another number of ranks per node than before; it trains on the same samples in the same order."""


class FileView(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    """A file is usable as soon as it is there: clients wait for this word."""
    status_details: None = None
    expires_at: int | None = None


class UploadView(BaseModel):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileView | None
    """Once completed."""


class UploadPartView(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class DeletedView(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    shutdown_date: None = None

    root: str
    """The base that an alias stands for, or that a tuned model was trained on; of a base itself its name."""
    parent: str | None = None
    """What a tuned model was trained on from: its base, or the tuned model that its job went on from."""
    job_id: str | None = None
    """The project's own job that trained it."""
    base: BaseView | None = None
    """Of a base and its aliases; null: a tuned model."""


class BaseView(BaseModel):
    """Not in OpenAI's API. What is known of a base without training on it; null: it does not say."""

    family: str | None
    """model_type of its decoder."""
    parameters: int | None
    """Of its decoder."""
    format: str | None
    """How its weights are published: bf16, fp8, nf4, mxfp4, …"""
    context: int | None
    """Positions that it was made for."""
    chat_template: bool
    """Whether it brings one."""
    licence: str | None
    repository: str | None
    """ORG/NAME that it was pulled from."""
    commit: str | None
    trainable: bool
    """Whether a job with no options would be accepted."""
    why_not: str | None


class VerifyView(BaseModel):
    """Whether an adapter still is what was written."""

    object: Literal["model.verification"] = "model.verification"
    model: str
    ok: bool
    checked: list[str]
    faults: list[str]


class DeletedModelView(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class ModelsView(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelView]


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


class EventView(BaseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None


class PermissionView(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str


class DeletedPermissionView(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: Literal[True] = True


class CheckpointMetricsView(BaseModel):
    step: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None
    full_valid_loss: float | None
    """The same as valid_loss: a validation always reads the whole file."""
    full_valid_mean_token_accuracy: float | None


class CheckpointView(BaseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: CheckpointMetricsView


def list_view(items: Sequence[Any], has_more: bool) -> ListView[Any]:
    """A ListView of views that have an id."""
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return ListView[Any](data=list(items), has_more=has_more, first_id=first, last_id=last)


def file_view(file: File) -> FileView:
    return FileView(
        id=file.id,
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=_whole(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
    )


def upload_view(upload: Upload, file: File | None) -> UploadView:
    return UploadView(
        id=upload.id,
        bytes=upload.bytes,
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.status,
        file=file_view(file) if file else None,
    )


def upload_part_view(part: UploadPart) -> UploadPartView:
    return UploadPartView(id=part.id, created_at=int(part.created_at), upload_id=part.upload_id)


def job_view(
    job: Job,
    *,
    organization: str,
    metrics: Metrics | None = None,
    now: float = 0.0,
    place: Place | None = None,
    valid_loss: float | None = None,
) -> JobView:
    """A job as the wire shows it. `metrics`: the job's newest; `now`: database time, for the estimate; `place`: in the queue,
    if it is known; `valid_loss`: of the last validation."""
    spec = job.spec
    hyperparameters = _hyperparameters(spec)
    return JobView(
        id=job.id,
        created_at=int(job.created_at),
        error=JobErrorView.model_validate(job.error) if job.error else None,
        fine_tuned_model=spec.tuned_name if job.state is State.SUCCEEDED else None,
        finished_at=_whole(job.finished_at),
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
        estimated_finish=_whole(_estimate(job, metrics, now)),
        integrations=[Integration.model_validate(given) for given in job.request.get("integrations") or ()],
        metadata=job.request.get("metadata"),
        method=_method(spec, hyperparameters),
        phase=job.phase.value if job.phase else None,
        reason=job.reason.value if job.reason else None,
        attempt=job.attempt,
        progress=_progress(metrics, valid_loss) if metrics else None,
        pending_reason=job.pending if job.state in (State.QUEUED, State.RUNNING) else None,
        queue=_queue(place) if place and job.state is State.QUEUED else None,
        suffix=job.request.get("suffix"),
        chat_template=spec.chat_template or None,
        serve=job.request.get("serve"),
        priority=job.priority,
        max_seconds=job.max_seconds,
        lora=spec.lora.model_dump(),
        precision=spec.precision.model_dump(),
        training=spec.training.model_dump(),
        distributed=spec.distributed.model_dump(),
        checkpoint=spec.checkpoint.model_dump(),
        evaluation={**spec.evaluation.model_dump(), "prompts": spec.evaluation.count} if spec.evaluation else None,
        chosen=spec.chosen,
        sweep=_membership(job),
    )


def event_view(event: StoredEvent) -> EventView:
    return EventView(
        id=event.id,
        created_at=int(event.created_at),
        level=event.level,
        message=event.message,
        type="metrics" if event.metrics else "message",
        data=event.metrics.flat() if event.metrics else None,
    )


def checkpoint_view(checkpoint: Checkpoint, tuned_name: TunedName) -> CheckpointView:
    known = checkpoint.metrics or Metrics(step=checkpoint.step, total_steps=checkpoint.step)
    return CheckpointView(
        id=checkpoint.id,
        created_at=int(checkpoint.created_at),
        fine_tuning_job_id=checkpoint.job_id,
        fine_tuned_model_checkpoint=str(tuned_name.at(checkpoint.step)),
        step_number=checkpoint.step,
        metrics=CheckpointMetricsView(
            step=checkpoint.step,
            train_loss=known.train_loss,
            train_mean_token_accuracy=known.train_mean_token_accuracy,
            valid_loss=known.valid_loss,
            valid_mean_token_accuracy=known.valid_mean_token_accuracy,
            full_valid_loss=known.valid_loss,
            full_valid_mean_token_accuracy=known.valid_mean_token_accuracy,
        ),
    )


def permission_view(permission: Permission) -> PermissionView:
    return PermissionView(id=permission.id, created_at=int(permission.created_at), project_id=permission.grantee)


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


def _estimate(job: Job, metrics: Metrics | None, now: float) -> float | None:
    if job.state is not State.RUNNING or metrics is None or metrics.step_seconds is None:
        return None
    return now + (metrics.total_steps - metrics.step) * metrics.step_seconds


def _queue(place: Place) -> QueueView:
    forecast = place.forecast
    return QueueView(
        position=forecast.position,
        reason=forecast.reason,
        estimated_start=_whole(forecast.starts_at),
        share=round(place.share, 4),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
