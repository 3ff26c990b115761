"""What a job leaves: any adapter by what the wire calls it, and the exports of a job for other programs."""

from __future__ import annotations

from typing import Any

from fastapi.responses import StreamingResponse

from api.http.auth import Caller
from api.http.dependencies import JsonBody, Services, Svc, binary, body_schema, parse_body
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from api.transfer import adapter_download
from api.wire.export_views import DeletedExportView, ExportRequest, ExportView, export_view
from api.wire.views import ListView, list_view
from ft_service.control import tuned_models
from ft_service.errors import NotFoundError, SpecError
from ft_service.jobs.states import Job, State
from ft_service.rundir.documents import ExportFormat, read_export
from ft_service.serving import exporting
from ft_service.spec import is_tuned
from ft_service.store.records import Principal

router = keyed_router("/v1/fine_tuning", "fine-tuning")

_EXPORTS = "/jobs/{job_id}/exports"


@router.get("/checkpoints/{checkpoint:path}/adapter", response_class=StreamingResponse, responses=binary("application/x-tar"))
@takes_turns("making")
def adapter(checkpoint: str, caller: Caller, services: Svc) -> StreamingResponse:
    """The adapter of a checkpoint (`ftckpt_…`, or its model name `ft:…:ckpt-step-<n>`) or of a job's outcome (`ft:…`) as a tar
    archive: a folder `adapter/` that PEFT loads."""
    if is_tuned(checkpoint):
        tuned = tuned_models.find_own(checkpoint, caller.project_id, services.store)
    else:
        tuned = tuned_models.find_checkpoint(checkpoint, caller.project_id, services.store)
    return adapter_download.archived(tuned, services.places)


@router.post(_EXPORTS, response_model=ExportView, openapi_extra=body_schema(ExportRequest))
def create_export(job_id: str, caller: Caller, services: Svc, body: JsonBody) -> Any:
    """Not in OpenAI's API. Have a succeeded job's outcome made into a form that another program reads. It is made after the
    answer, by a process beside the server; one that is made or under way is answered as it is."""
    asked = parse_body(body, ExportRequest)
    if asked.format is ExportFormat.PEFT:
        raise SpecError("format = 'peft': the adapter as it was trained is at …/adapter.", param="format")
    job = _succeeded(job_id, caller, services)
    return export_view(job.id, exporting.ask(job, asked.format, services.settings, services.places))


@router.get(_EXPORTS, response_model=ListView[ExportView])
def list_exports(job_id: str, caller: Caller, services: Svc) -> Any:
    """Not in OpenAI's API. The exports of a job that were asked for, the newest first."""
    job = services.store.get_job(caller.project_id, job_id)
    run = services.places.run(job.id)
    found = [export for to in ExportFormat if (export := read_export(run, to)) is not None]
    found.sort(key=lambda export: export.created_at, reverse=True)
    return list_view([export_view(job.id, export) for export in found], has_more=False)


@router.get(_EXPORTS + "/{format}")
def retrieve_export(job_id: str, format: ExportFormat, caller: Caller, services: Svc) -> ExportView:
    job = services.store.get_job(caller.project_id, job_id)
    export = read_export(services.places.run(job.id), format)
    if export is None:
        raise NotFoundError(f"Job {job.id} has no export {format.value}.", param="format", code="no_export")
    return export_view(job.id, export)


@router.get(_EXPORTS + "/{format}/content", response_class=StreamingResponse, responses=binary("application/x-tar"))
def export_content(job_id: str, format: ExportFormat, caller: Caller, services: Svc) -> StreamingResponse:
    """Not in OpenAI's API. The files of an export as a tar archive."""
    job = _succeeded(job_id, caller, services)
    folder = exporting.folder_of(job, format, services.places)
    return adapter_download.as_tar(folder, f"{job.id}-{format.value}", format.value)


@router.delete(_EXPORTS + "/{format}")
def delete_export(job_id: str, format: ExportFormat, caller: Caller, services: Svc) -> DeletedExportView:
    """Not in OpenAI's API. Free the disk of an export; it can be made again."""
    job = services.store.get_job(caller.project_id, job_id)
    exporting.remove(job, format, services.settings, services.places)
    return DeletedExportView(id=format.value)


def _succeeded(job_id: str, caller: Principal, services: Services) -> Job:
    """A job whose outcome is there. Raises NotFoundError, also for a deleted model."""
    job = services.store.get_job(caller.project_id, job_id)
    if job.state is not State.SUCCEEDED:
        message = f"Job {job.id} is {job.state.value} and has no adapter; a job that has succeeded has one."
        raise NotFoundError(message, param="job_id", code="no_adapter")
    return tuned_models.find_own(str(job.tuned_name), caller.project_id, services.store).job
