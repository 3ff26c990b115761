"""Whether a job or a sweep would be taken, asked before its files are uploaded: the very check of its creation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission import door_for, new_job, read
from ft_service.control.sweeps.admission import sweep_jobs
from ft_service.data.formats.recognise import refuse_no_data_file
from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.settings import Settings
from ft_service.spec import Strict
from ft_service.spec.request import SWEEP
from ft_service.store.records import File, NewJob, Principal
from ft_service.store.sql import Store

PURPOSE = "fine-tune"


class AnnouncedFile(Strict):
    """A file that would be uploaded."""

    filename: Annotated[str, Field(min_length=1, max_length=4096)]
    bytes: Annotated[int, Field(ge=0, le=2**53)]


class CheckRequest(Strict):
    """The body of `POST /v1/fine_tuning/check`."""

    job: dict[str, Any]
    """A create body of a job or, with `sweep`, of a sweep; without the files that `files` announces."""
    files: dict[Literal["training_file", "validation_file"], AnnouncedFile] = Field(default_factory=dict)
    """Files that would be uploaded, by the field of the body that would name them."""


def check(asked: CheckRequest, *, principal: Principal, store: Store, settings: Settings, catalogue: Catalogue) -> int:
    """Go through the creation of a job or a sweep, and through the uploads before it, and store nothing; how many jobs it
    would be.

    Raises what either would: SpecError naming the field, its value and the limit, LimitError. What depends on the contents of
    files that are not here is not known.
    """
    announced = {param: _announced(param, file, asked.job, principal, settings) for param, file in asked.files.items()}
    store.refuse_bytes(principal.project_id, sum(file.bytes for file in announced.values()))
    new = _jobs(
        asked.job | {param: file.id for param, file in announced.items()},
        list(announced.values()),
        principal=principal,
        store=store,
        settings=settings,
        catalogue=catalogue,
    )
    store.refuse_more_waiting(new)
    return len(new)


def _announced(param: str, file: AnnouncedFile, job: dict[str, Any], principal: Principal, settings: Settings) -> File:
    if param in job:
        raise SpecError(f"{param} is given twice, in job and in files: keep one.", param=f"files.{param}")
    refuse_no_data_file(file.filename, f"files.{param}.filename")
    if file.bytes > settings.max_file_bytes:
        raise SpecError(
            f"{param}: {file.filename} has {file.bytes:,} bytes, and this server takes files of at most "
            f"{settings.max_file_bytes:,} (FT_MAX_FILE_BYTES).",
            param=f"files.{param}.bytes",
            code="file_too_large",
        )
    return File(
        id=new_id("file-"),
        project_id=principal.project_id,
        filename=file.filename,
        purpose=PURPOSE,
        bytes=file.bytes,
        sha256="",
        created_at=0.0,
    )


def _jobs(
    body: dict[str, Any],
    announced: list[File],
    *,
    principal: Principal,
    store: Store,
    settings: Settings,
    catalogue: Catalogue,
) -> list[NewJob]:
    if SWEEP in body:
        jobs, _ = sweep_jobs(
            body,
            principal=principal,
            store=store,
            settings=settings,
            catalogue=catalogue,
            sweep_id="",
            announced=announced,
        )
        return jobs
    asked = read(body, principal=principal, store=store, settings=settings)
    outcome = new_job(asked, door_for([asked], store=store, settings=settings, catalogue=catalogue, announced=announced))
    if isinstance(outcome, Exception):
        raise outcome
    return [outcome]
