"""OpenAI's objects as this service writes them, and their construction from records. Pure.

OpenAI's fields come first in each class; what this service adds follows them. Times are whole
seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ft_service.errors import SpecError
from ft_service.money import amount
from ft_service.rundir.events import Metrics
from ft_service.spec import TunedName
from ft_service.store.records import Checkpoint, StoredEvent

Item = TypeVar("Item")


def whole_seconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


Seconds = Annotated[int, BeforeValidator(whole_seconds)]
"""A time in whole seconds since the epoch."""


class View(BaseModel):
    """An object on the wire."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, record: object, **values: Any) -> Self:
        """Return the view of a record.

        `values`: fields that are not attributes of the record, or differ from them.
        """
        names = (name for name in cls.model_fields if name not in values and hasattr(record, name))
        return cls(**{name: getattr(record, name) for name in names}, **values)


class MoneyView(View):
    """An amount of money, exact to a millionth."""

    value: float
    currency: str
    """Its three letters (ISO 4217), such as EUR."""


class EnergyView(View):
    """Energy that was measured: of GPUs their boards', else a job's part of that of processors."""

    joules: float
    co2_grams: float | None
    """null: the operator has not said what a kWh weighs."""


def money_view(money: int | None, currency: str | None) -> MoneyView | None:
    """Return the view of millionths of a currency; None: there is no price."""
    if money is None or currency is None:
        return None
    return MoneyView(value=amount(money), currency=currency)


class ErrorBody(View):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorView(View):
    """Every answer of 400 and above."""

    error: ErrorBody


class ListView(View, Generic[Item]):
    """A page. The next one: `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileView(View):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: Seconds
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    """Clients wait for this word; a file is usable at once."""
    status_details: None = None
    expires_at: Seconds | None = None


class UploadView(View):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: Seconds
    expires_at: Seconds
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileView | None
    """The file, once the upload is completed."""


class UploadPartView(View):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: Seconds
    upload_id: str


class Deleted(View):
    """The answer to the deletion of an object."""

    id: str
    deleted: Literal[True] = True


class DeletedView(Deleted):
    object: Literal["file"] = "file"


class ModelView(View):
    id: str
    object: Literal["model"] = "model"
    created: Seconds
    owned_by: str
    shutdown_date: None = None

    root: str
    """The base of an alias, or the base that a tuned model was trained on; a base's own name."""
    parent: str | None = None
    """The model that a tuned model was trained from: its base, or the tuned model that its job
    continued.
    """
    job_id: str | None = None
    """The job that trained it, if the job is the project's own."""
    base: BaseView | None = None
    """Facts of a base or of an alias's base; null: a tuned model."""
    description: dict[str, Any] | None = None
    """What training finds in a base, or why the base is refused, if `include=description`; null:
    not described yet.
    """


class BaseView(View):
    """Not in OpenAI's API. Facts of a base that are known without training on it; null: the base
    does not say.
    """

    family: str | None
    """The decoder's model_type."""
    parameters: int | None
    """Parameters of its decoder."""
    format: str | None
    """The storage format of its weights: bf16, fp8, nf4, mxfp4, …"""
    context: int | None
    """Positions that it was trained for."""
    chat_template: bool
    """Whether it has one."""
    images: bool | None
    """Whether jobs learn from images in chats; null: it is not described yet."""
    licence: str | None
    repository: str | None
    """ORG/NAME that it was pulled from."""
    commit: str | None
    described: bool
    """False: it is being described, and facts that depend on the description are null."""
    trainable: bool | None
    """Whether a job with no options would be accepted; null: it is not described yet, and a job
    waits until it is.
    """
    why_not: str | None


class VerifyView(View):
    """Whether an adapter still is as it was written."""

    object: Literal["model.verification"] = "model.verification"
    model: str
    ok: bool
    checked: list[str]
    faults: list[str]


class DeletedModelView(Deleted):
    object: Literal["model"] = "model"


class DeletedJobView(Deleted):
    object: Literal["fine_tuning.job"] = "fine_tuning.job"

    deleted_models: list[str]
    """Names of the tuned model and the checkpoints that are deleted with it."""


class ModelsView(View):
    object: Literal["list"] = "list"
    data: list[ModelView]


class EventView(View):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: Seconds
    level: str
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any] | None


class PermissionView(View):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: Seconds
    project_id: str


class DeletedPermissionView(Deleted):
    object: Literal["checkpoint.permission"] = "checkpoint.permission"


class CheckpointMetricsView(View):
    step: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None
    full_valid_loss: float | None
    """The same as valid_loss: a validation always reads the whole file."""
    full_valid_mean_token_accuracy: float | None


class CheckpointView(View):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: Seconds
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: CheckpointMetricsView


def list_view(items: Sequence[Any], has_more: bool) -> ListView[Any]:
    """Return a page of views that have an id."""
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return ListView[Any](data=list(items), has_more=has_more, first_id=first, last_id=last)


def page_of(
    views: Sequence[Any], after: str | None, limit: int, *, newest_first: bool
) -> ListView[Any]:
    """Return the page behind the view `after` of all of a list, which has the oldest first.

    Raises SpecError if the list has no such view.
    """
    ordered = list(reversed(views)) if newest_first else views
    places = {view.id: number for number, view in enumerate(ordered, 1)}
    if after is not None and after not in places:
        raise SpecError(f"after = {after[:80]!r}: this list has no such item.", param="after")
    begin = 0 if after is None else places[after]
    return list_view(ordered[begin : begin + limit], len(ordered) > begin + limit)


def event_view(event: StoredEvent) -> EventView:
    metrics = event.metrics
    return EventView.of(
        event, type="metrics" if metrics else "message", data=metrics.flat() if metrics else None
    )


def checkpoint_view(checkpoint: Checkpoint, tuned_name: TunedName) -> CheckpointView:
    metrics = checkpoint.metrics or Metrics(step=checkpoint.step, total_steps=checkpoint.step)
    whole_file = {
        f"full_{name}": getattr(metrics, name)
        for name in ("valid_loss", "valid_mean_token_accuracy")
    }
    return CheckpointView.of(
        checkpoint,
        fine_tuning_job_id=checkpoint.job_id,
        fine_tuned_model_checkpoint=str(tuned_name.at(checkpoint.step)),
        step_number=checkpoint.step,
        metrics=CheckpointMetricsView.of(metrics, step=checkpoint.step, **whole_file),
    )
