"""The wire: OpenAI's objects as this service writes them, and how records become them. Pure.

OpenAI's fields come first in each class; what this service adds follows them. Times are whole seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from ft_service.rundir.events import Metrics
from ft_service.spec import TunedName
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
        expires_at=whole_seconds(file.expires_at),
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


def whole_seconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
