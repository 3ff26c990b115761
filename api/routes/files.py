"""`/v1/files`: upload, list, read and delete."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Depends, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import After, Services, Svc, binary, parse_json
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from api.transfer.multipart import ReceivedFile, keep, received
from api.wire import expiry
from api.wire.file_check_views import FileCheckView, file_check_view
from api.wire.sample_views import SamplesView, samples_view
from api.wire.statistics_views import StatisticsView, statistics_view
from api.wire.views import DeletedView, FileView, ListView, file_view, list_view
from ft_service.control.checks.file_checks import FileCheck
from ft_service.control.checks.file_statistics import file_statistics
from ft_service.control.checks.samples import fetched, file_samples
from ft_service.control.housekeeping import free
from ft_service.data.formats.recognise import refuse_no_data_file
from ft_service.data.samples import MOST_LINES, Page
from ft_service.data.statistics import Measure
from ft_service.data.token_options import TokenOptions
from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.intact import fault
from ft_service.spec import DataFileRef, TrainingOptions, TrainOn, spec_error
from ft_service.spec.options import DataOptions
from ft_service.spec.templates import check_template, named_template
from ft_service.store.records import File, Order, Principal

router = keyed_router("/v1/files", "files")

Model = Annotated[str, Query(min_length=1, description="A base, or an alias of one.")]

PURPOSE = "fine-tune"
RESULTS = "fine-tune-results"
_PARTS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_USUAL = TrainingOptions()
_ENCODED_CHUNK = 3 * 256 * 1024
"""A multiple of 3: base64 of the pieces is the base64 of the whole."""

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": PURPOSE},
                        "expires_after": expiry.ExpiresAfter.model_json_schema(),
                    },
                },
                "encoding": {"expires_after": {"style": "deepObject", "explode": True}},
            }
        },
    }
}


async def _upload(request: Request, caller: Caller, services: Svc) -> AsyncIterator[ReceivedFile]:
    async with received(request, services.settings.files_dir, services.settings.max_file_bytes) as upload:
        yield upload


@router.post("", openapi_extra=_FORM)
def create(request: Request, caller: Caller, services: Svc, upload: Annotated[ReceivedFile, Depends(_upload)]) -> FileView:
    """Upload a data file (purpose `fine-tune`): OpenAI's chat lines or preference pairs, prompts with completions, text,
    ShareGPT, Alpaca or TRL's pairs, as JSON lines, a JSON array, CSV or Parquet, also compressed by gzip or zstd. What it is
    is seen from its contents, which are checked when a job uses it."""
    _check_form(upload)
    seconds = expiry.from_form(upload.fields)
    new = File(
        id=new_id("file-"),
        project_id=caller.project_id,
        filename=upload.filename,
        purpose=PURPOSE,
        bytes=upload.bytes,
        sha256=upload.sha256,
        created_at=0.0,
    )
    if earlier := idempotency.repeated_file(request.headers, services.store, caller, new):
        return file_view(earlier)
    path = services.settings.files_dir / new.id
    keep(upload, path)
    try:
        services.places.keep(new.id)
        return file_view(services.store.add_file(new, seconds=seconds))
    except BaseException:
        services.places.remove(new.id)
        raise


@router.get("", response_model=ListView[FileView])
def list_files(
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
    purpose: str | None = None,
    sha256: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$", description="Digest of the contents, in hex.")] = None,
) -> Any:
    """The newest first. `sha256`, which OpenAI's API has not: only files with these contents, so that none need be uploaded
    twice."""
    project = caller.project_id
    page = services.store.list_files(project, after=after, limit=limit, order=order, purpose=purpose, sha256=sha256)
    return list_view([file_view(file) for file in page.data], page.has_more)


@router.get("/{file_id}")
def retrieve(file_id: str, caller: Caller, services: Svc) -> FileView:
    return file_view(services.store.get_file(caller.project_id, file_id))


@router.delete("/{file_id}")
def delete(file_id: str, caller: Caller, services: Svc) -> DeletedView:
    """Hide a file. Jobs that use it go on; its bytes go when no unfinished job refers to it."""
    if services.store.delete_file(caller.project_id, file_id):
        free(services.places, services.store, [file_id])
    return DeletedView(id=file_id)


@router.get("/{file_id}/content", response_class=Response, responses=binary("application/octet-stream"))
def content(file_id: str, caller: Caller, services: Svc) -> Response:
    """The bytes. Metrics of a job (purpose `fine-tune-results`) come base64-encoded, as OpenAI's scripts expect, unless the
    operator has set FT_RESULT_FILES_PLAIN."""
    file = services.store.get_file(caller.project_id, file_id)
    path = services.places.file(file.id)
    if not path.is_file():
        raise NotFoundError(f"The contents of {file.id} are gone from the service's disk.", param="file_id")
    if wrong := fault(path, FileDigest(bytes=file.bytes, sha256=file.sha256)):
        message = f"The contents of {file.id} are damaged on the service's disk: it {wrong}. Upload the file again."
        raise NotFoundError(message, param="file_id", code="file_damaged")
    disposition = {"content-disposition": f"attachment; filename*=utf-8''{quote(file.filename, safe='')}"}
    if file.purpose == RESULTS and not services.settings.result_files_plain:
        return StreamingResponse(_encoded(path), media_type="application/octet-stream", headers=disposition)
    return FileResponse(path, media_type="application/octet-stream", headers=disposition)


@router.get("/{file_id}/check")
async def check(
    file_id: str,
    caller: Caller,
    services: Svc,
    method: Literal["supervised", "dpo"] | None = None,
    data: str | None = None,
) -> FileCheckView:
    """Not in OpenAI's API. What a file is, and why lines of it cannot be trained on, before any job and without a base.
    `method`: the job's; `data`: what the file calls its columns, as JSON, such as `{"prompt": "question"}`. Of a file that
    takes more than ten seconds the beginning is read."""
    file = await run_in_threadpool(_data_file, file_id, "file_id", caller, services)
    asked = FileCheck(file.sha256, _columns(data).pairs, None if method is None else method == "dpo")
    path = await run_in_threadpool(fetched, file, services.places)
    return file_check_view(file_id, file.name, await services.file_checks.report(caller.project_id, asked, path))


@router.get("/{file_id}/samples")
@takes_turns("reading")
def samples(
    file_id: str,
    model: Model,
    caller: Caller,
    services: Svc,
    chat_template: str | None = None,
    train_on: TrainOn = "all_assistant",
    max_length: Annotated[int, Query(ge=8, le=1_048_576)] = TrainingOptions().max_length,
    after: Annotated[int, Query(ge=0, le=MOST_LINES)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> SamplesView:
    """Not in OpenAI's API. Samples of a file as a base would see them, before any job: behind the line `after`, every token
    with its text and its role. `chat_template`, `train_on` and `max_length` are a job's."""
    data = _data_file(file_id, "file_id", caller, services)
    options = TokenOptions(_template(chat_template), train_on=train_on)
    base = services.catalogue.find(model).ref()
    return samples_view(file_samples(data, base.path, options, max_length, Page(after, limit), services.places))


@router.get("/{file_id}/statistics")
@takes_turns("reading")
def statistics(
    file_id: str,
    model: Model,
    caller: Caller,
    services: Svc,
    chat_template: str | None = None,
    train_on: TrainOn = "all_assistant",
    max_length: Annotated[int, Query(ge=8, le=1_048_576)] = _USUAL.max_length,
    batch_size: Annotated[int, Query(ge=1, le=8192)] = _USUAL.batch,
    n_epochs: Annotated[int, Query(ge=1, le=50)] = _USUAL.epochs,
    validation_file: str | None = None,
    validation_split: Annotated[float | None, Query(gt=0, lt=1)] = None,
    seed: Annotated[int, Query(ge=0, le=2_147_483_647)] = 0,
) -> StatisticsView:
    """Not in OpenAI's API. A file in numbers, as a job on a base would train on it, before any job: lengths, targets, doubles,
    overlap with `validation_file`, steps, and warnings that say what to change. The options are a job's. Of files above 32 MiB
    only those whose tokens a job has made before."""
    if validation_file is not None and validation_split is not None:
        message = "validation_file and validation_split are both given: keep one."
        raise SpecError(message, param="validation_split")
    data = _data_file(file_id, "file_id", caller, services)
    held_out = None if validation_file is None else _data_file(validation_file, "validation_file", caller, services)
    training = TrainingOptions(max_length=max_length, batch_size=batch_size, n_epochs=n_epochs, train_on=train_on)
    asked = Measure(data, held_out, training, validation_split, seed)
    base = services.catalogue.find(model).ref()
    options = TokenOptions(_template(chat_template), train_on=train_on)
    return statistics_view(file_statistics(asked, base.path, options, services.places), asked)


def _data_file(file_id: str, param: str, caller: Principal, services: Services) -> DataFileRef:
    """Raises NotFoundError, and SpecError for a file that holds no samples."""
    file = services.store.get_file(caller.project_id, file_id)
    if file.purpose != PURPOSE:
        raise SpecError(f"{param} = {file.id!r}: its purpose is {file.purpose}, and holds no samples.", param=param)
    return DataFileRef(name=file.filename, path=str(services.settings.files_dir / file.id), sha256=file.sha256)


def _columns(given: str | None) -> DataOptions:
    """Raises SpecError for what is no mapping of names to columns."""
    if given is None:
        return DataOptions()
    found = parse_json(given.encode())
    try:
        return DataOptions.model_validate(found)
    except ValidationError as error:
        raise spec_error(error, DataOptions) from None


def _template(given: str | None) -> str:
    try:
        return named_template(check_template(given)) if given else ""
    except ValueError as error:
        raise SpecError(f"chat_template = {given!r:.80}: {error}.", param="chat_template") from None


def _check_form(upload: ReceivedFile) -> None:
    """Raises SpecError naming the wrong part of the form."""
    for name in upload.fields:
        if name not in _PARTS:
            message = f"{name[:80]}: there is no such part; known are {', '.join(_PARTS)}."
            raise SpecError(message, param=name[:80], code="unknown_parameter")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise SpecError("purpose is required.", param="purpose", code="missing_required_parameter")
    require_chat_file(upload.filename, "file", purpose)


def require_chat_file(filename: str, param: str, purpose: str) -> None:
    """Whether a file of this name and purpose is taken. Raises SpecError; `param`: what the name was sent as."""
    if purpose != PURPOSE:
        message = f"purpose = {purpose[:80]!r}: only {PURPOSE!r} is available in this version."
        raise SpecError(message, param="purpose", code="not_available")
    refuse_no_data_file(filename, param)


def _encoded(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_ENCODED_CHUNK):
            yield base64.b64encode(chunk)
