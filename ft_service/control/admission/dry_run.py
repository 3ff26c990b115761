"""The checks of creating a job or a sweep, without storing it and before its files are uploaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ft_service.control.admission.job_admission import AdmissionContext, new_job, read
from ft_service.control.admission.sweep_admission import sweep_jobs
from ft_service.data.formats.detect_format import refuse_no_data_file
from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.spec import Strict
from ft_service.spec.request import SWEEP
from ft_service.store.records import File

PURPOSE = "fine-tune"


class AnnouncedFile(Strict):
    """A file that would be uploaded."""

    filename: Annotated[str, Field(min_length=1, max_length=4096)]
    bytes: Annotated[int, Field(ge=0, le=2**53)]


class CheckRequest(Strict):
    """The body of `POST /v1/fine_tuning/check`."""

    job: dict[str, Any]
    """The create body of a job or, with `sweep`, of a sweep, without the files that `files`
    announces.
    """
    files: dict[Literal["training_file", "validation_file"], AnnouncedFile] = Field(
        default_factory=dict
    )
    """Files that would be uploaded, by the field of the body that would name them."""


def check(asked: CheckRequest, context: AdmissionContext) -> int:
    """Check the uploads and the creation of a job or a sweep, and store nothing.

    Returns the number of jobs.

    Raises as they would: SpecError naming the field, its value and the limit, LimitError. The
    contents of files that are not uploaded yet are not checked.
    """
    announced = {
        param: _announced(param, file, asked.job, context) for param, file in asked.files.items()
    }
    files = list(announced.values())
    context.store.files.refuse_bytes(
        context.principal.project_id, sum(file.bytes for file in files)
    )
    body = asked.job | {param: file.id for param, file in announced.items()}
    if SWEEP in body:
        new, _ = sweep_jobs(body, context, sweep_id="", announced=files)
    else:
        new = [new_job(read(body, context), context, files)]
    context.store.jobs.refuse_more_waiting(new)
    return len(new)


def _announced(
    param: str, file: AnnouncedFile, job: dict[str, Any], context: AdmissionContext
) -> File:
    if param in job:
        raise SpecError(
            f"{param} is given twice, in job and in files: keep one.", param=f"files.{param}"
        )
    refuse_no_data_file(file.filename, f"files.{param}.filename")
    if file.bytes > (limit := context.settings.max_file_bytes):
        raise SpecError(
            f"{param}: {file.filename} has {file.bytes:,} bytes, and this server takes files of "
            "at most "
            f"{limit:,} (FT_MAX_FILE_BYTES).",
            param=f"files.{param}.bytes",
            code="file_too_large",
        )
    return File(
        id=new_id("file-"),
        project_id=context.principal.project_id,
        filename=file.filename,
        purpose=PURPOSE,
        bytes=file.bytes,
        sha256="",
        created_at=0.0,
    )
