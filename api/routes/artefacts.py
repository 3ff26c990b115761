"""Results of jobs: adapters by model name, permissions of other projects to use them, and exports
for other programs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from api.http.auth import Admin, Caller
from api.http.dependencies import Cursor, JsonBody, Services, Svc, binary, body_schema, parse_body
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from api.transfer import tar_stream
from api.wire.views import (
    Deleted,
    DeletedPermissionView,
    ListView,
    PermissionView,
    Seconds,
    View,
    list_view,
)
from ft_service.control.admission import tuned_models
from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.rundir.documents import ExportFormat, read_export
from ft_service.serving import exporting
from ft_service.spec import Strict, is_tuned
from ft_service.store.records import Permission, Principal

router = keyed_router("/v1/fine_tuning", "fine-tuning")

_EXPORTS = "/jobs/{job_id}/exports"
_PERMISSIONS = "/checkpoints/{fine_tuned_model_checkpoint:path}/permissions"


class PermissionRequest(Strict):
    """The projects that may use the model."""

    project_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=255)]],
        Field(min_length=1, max_length=100),
    ]


class ExportRequest(Strict):
    """The body of `POST …/exports`."""

    format: Annotated[ExportFormat, Field(strict=False)]


class ExportView(View):
    object: Literal["fine_tuning.job.export"] = "fine_tuning.job.export"
    id: str
    """The format: a job has one export of each."""
    job_id: str
    format: ExportFormat
    status: Literal["queued", "running", "succeeded", "failed"]
    created_at: Seconds
    finished_at: Seconds | None
    bytes: int | None
    """Bytes of all its files; null: it is not made yet."""
    error: str | None
    """Why it could not be made; null: it was made or is being made."""
    report: dict[str, Any]
    """The cost of this form: validation losses before and after, rounding errors, and the result of
    reading it back.
    """


class DeletedExportView(Deleted):
    object: Literal["fine_tuning.job.export"] = "fine_tuning.job.export"


@router.post(
    _PERMISSIONS,
    response_model=ListView[PermissionView],
    openapi_extra=body_schema(PermissionRequest),
)
def create(fine_tuned_model_checkpoint: str, body: JsonBody, caller: Admin, services: Svc) -> Any:
    """Allow projects to use a tuned model or one of its checkpoints: to find it, and to send chat
    completions to it.
    """
    project_ids = parse_body(body, PermissionRequest).project_ids
    tuned = tuned_models.find_own(fine_tuned_model_checkpoint, caller.project_id, services.store)
    tuned_models.refuse_pruned(tuned, services.places)
    return _permissions(services.store.models.grant(caller.project_id, tuned.name, project_ids))


class PermissionQuery(BaseModel):
    """Which permissions are listed."""

    after: Cursor = None
    limit: Annotated[int, Field(ge=1, le=100)] = 10
    order: Literal["ascending", "descending"] = "descending"
    project_id: str | None = None


@router.get(_PERMISSIONS, response_model=ListView[PermissionView])
def list_permissions(
    fine_tuned_model_checkpoint: str,
    query: Annotated[PermissionQuery, Query()],
    caller: Admin,
    services: Svc,
) -> Any:
    """List permissions by creation. `project_id`: only those of this project."""
    page = services.store.models.list_permissions(
        caller.project_id,
        tuned_models.find_own(fine_tuned_model_checkpoint, caller.project_id, services.store).name,
        after=query.after,
        limit=query.limit,
        order="asc" if query.order == "ascending" else "desc",
        grantee=query.project_id,
    )
    return _permissions(page.data, page.has_more)


@router.delete(_PERMISSIONS + "/{permission_id}")
def delete(
    fine_tuned_model_checkpoint: str, permission_id: str, caller: Admin, services: Svc
) -> DeletedPermissionView:
    services.store.models.revoke(caller.project_id, fine_tuned_model_checkpoint, permission_id)
    return DeletedPermissionView(id=permission_id)


@router.get(
    "/checkpoints/{checkpoint:path}/adapter",
    response_class=StreamingResponse,
    responses=binary("application/x-tar"),
)
@takes_turns("making")
def adapter(checkpoint: str, caller: Caller, services: Svc) -> StreamingResponse:
    """Not in OpenAI's API. Download an adapter as a tar archive: a folder `adapter/` that PEFT
    loads. It is named by a checkpoint (`ftckpt_…`, or its model name `ft:…:ckpt-step-<n>`) or by a
    tuned model (`ft:…`).
    """
    find = tuned_models.find_own if is_tuned(checkpoint) else tuned_models.find_checkpoint
    return tar_stream.adapter_archive(
        find(checkpoint, caller.project_id, services.store), services.places
    )


@router.post(_EXPORTS, response_model=ExportView, openapi_extra=body_schema(ExportRequest))
def create_export(job_id: str, caller: Caller, services: Svc, body: JsonBody) -> Any:
    """Not in OpenAI's API. Export the tuned model of a succeeded job to a form that another program
    reads. A process next to the server makes it after the answer; for an export that exists or is
    being made, the answer is its state.
    """
    to = parse_body(body, ExportRequest).format
    if to is ExportFormat.PEFT:
        raise SpecError(
            "format = 'peft': the adapter as it was trained is at …/adapter.", param="format"
        )
    job = _succeeded(job_id, caller, services)
    return ExportView.of(
        exporting.ask(job, to, services.settings, services.places), id=to.value, job_id=job.id
    )


@router.get(_EXPORTS, response_model=ListView[ExportView])
def list_exports(job_id: str, caller: Caller, services: Svc) -> Any:
    """Not in OpenAI's API. List the exports of a job, the newest first."""
    job = services.store.jobs.get_job(caller.project_id, job_id)
    run = services.places.run(job.id)
    exports = [export for to in ExportFormat if (export := read_export(run, to)) is not None]
    exports.sort(key=lambda export: export.created_at, reverse=True)
    views = [ExportView.of(export, id=export.format.value, job_id=job.id) for export in exports]
    return list_view(views, has_more=False)


@router.get(_EXPORTS + "/{format}")
def retrieve_export(job_id: str, format: ExportFormat, caller: Caller, services: Svc) -> ExportView:
    """Not in OpenAI's API."""
    job = services.store.jobs.get_job(caller.project_id, job_id)
    export = read_export(services.places.run(job.id), format)
    if export is None:
        raise NotFoundError(
            f"Job {job.id} has no export {format.value}.", param="format", code="no_export"
        )
    return ExportView.of(export, id=format.value, job_id=job.id)


@router.get(
    _EXPORTS + "/{format}/content",
    response_class=StreamingResponse,
    responses=binary("application/x-tar"),
)
def export_content(
    job_id: str, format: ExportFormat, caller: Caller, services: Svc
) -> StreamingResponse:
    """Not in OpenAI's API. Download the files of an export as a tar archive."""
    job = _succeeded(job_id, caller, services)
    folder = exporting.folder_of(job, format, services.places)
    return tar_stream.folder_archive(folder, f"{job.id}-{format.value}", format.value)


@router.delete(_EXPORTS + "/{format}")
def delete_export(
    job_id: str, format: ExportFormat, caller: Caller, services: Svc
) -> DeletedExportView:
    """Not in OpenAI's API. Delete the files of an export; it can be made again."""
    job = services.store.jobs.get_job(caller.project_id, job_id)
    exporting.remove(job, format, services.settings, services.places)
    return DeletedExportView(id=format.value)


def _permissions(permissions: list[Permission], has_more: bool = False) -> ListView[Any]:
    views = [
        PermissionView.of(permission, project_id=permission.grantee) for permission in permissions
    ]
    return list_view(views, has_more)


def _succeeded(job_id: str, caller: Principal, services: Services) -> Job:
    """Return a job whose tuned model exists. Raises NotFoundError, also for a deleted model."""
    job = services.store.jobs.get_job(caller.project_id, job_id)
    if job.state is not State.SUCCEEDED:
        message = (
            f"Job {job.id} is {job.state.value} and has no adapter; only a job that has "
            "succeeded has one."
        )
        raise NotFoundError(message, param="job_id", code="no_adapter")
    return tuned_models.find_own(str(job.tuned_name), caller.project_id, services.store).job
