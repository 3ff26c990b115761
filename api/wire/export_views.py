"""Exports as answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ft_service.rundir.documents import Export, ExportFormat
from ft_service.spec import Strict


class ExportRequest(Strict):
    """The body of `POST …/exports`."""

    format: Annotated[ExportFormat, Field(strict=False)]


class ExportView(BaseModel):
    object: Literal["fine_tuning.job.export"] = "fine_tuning.job.export"
    id: str
    """The format: a job has one export of each."""
    job_id: str
    format: ExportFormat
    status: Literal["queued", "running", "succeeded", "failed"]
    created_at: int
    finished_at: int | None
    bytes: int | None
    """Of all its files; null: it is not made yet."""
    error: str | None
    """Why it could not be made; null: it could, or is under way."""
    report: dict[str, Any]
    """What this form costs: validation losses before and after, rounding, and what reading it again has shown."""


class DeletedExportView(BaseModel):
    object: Literal["fine_tuning.job.export"] = "fine_tuning.job.export"
    id: str
    deleted: Literal[True] = True


def export_view(job_id: str, export: Export) -> ExportView:
    return ExportView(
        id=export.format.value,
        job_id=job_id,
        format=export.format,
        status=export.status,
        created_at=int(export.created_at),
        finished_at=None if export.finished_at is None else int(export.finished_at),
        bytes=export.bytes,
        error=export.error,
        report=export.report,
    )
