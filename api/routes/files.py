"""`/v1/files`: upload, list, read and delete."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import Cursor, Services, Svc, binary, parse_json
from api.http.gone_clients import refuse_without_client
from api.http.routing import keyed_router
from api.http.threads import in_thread, takes_turns
from api.transfer.multipart import ReceivedFile, keep, received
from api.wire.data_views import (
    FileCheckView,
    SamplesView,
    StatisticsView,
    file_check_view,
    samples_view,
    statistics_view,
)
from api.wire.views import DeletedView, FileView, ListView, list_view
from ft_service.bases.own_template import with_template_variables
from ft_service.control.checks.file_checks import FileCheck
from ft_service.control.checks.file_views import fetched, file_samples, file_statistics
from ft_service.control.cleanup.housekeeping import free, remove_unrecorded
from ft_service.data.formats.columns import Columns
from ft_service.data.formats.detect_format import refuse_no_data_file
from ft_service.data.sample_request import MOST_LINES, RecordRange
from ft_service.data.statistics import Measure
from ft_service.data.token_options import PixelBounds, TokenOptions
from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.verified_files import fault
from ft_service.spec import (
    PAIR_METHODS,
    DataFileRef,
    Strict,
    TrainingOptions,
    TrainOn,
    parse_request,
    spec_error,
)
from ft_service.spec.methods import OfferedMethod
from ft_service.spec.options import DataOptions
from ft_service.spec.templates import named_template
from ft_service.store.records import File, Order, Principal

router = keyed_router("/v1/files", "files")

PURPOSES = ("fine-tune", "evals")
"""Samples to train on, and items of evals."""
RESULTS = "fine-tune-results"
_PARTS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_DEFAULTS = TrainingOptions()
_ENCODED_CHUNK = 3 * 256 * 1024
"""A multiple of 3, so that the base64 of the pieces is the base64 of the whole."""


class ExpiresAfter(Strict):
    """Lifetime of a file: `seconds` (1 hour to 30 days) from `anchor`."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class _ExpiryForm(Strict):
    expires_after: ExpiresAfter


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
                        "purpose": {"enum": list(PURPOSES)},
                        "expires_after": ExpiresAfter.model_json_schema(),
                    },
                },
                "encoding": {"expires_after": {"style": "deepObject", "explode": True}},
            }
        },
    }
}


async def _upload(request: Request, caller: Caller, services: Svc) -> AsyncIterator[ReceivedFile]:
    instead = "Split it, or use /v1/uploads."
    most = services.settings.max_file_bytes
    async with received(
        request, services.settings.files_dir, most, part="file", instead=instead
    ) as upload:
        yield upload


@router.post("", openapi_extra=_FORM)
def create(
    request: Request,
    caller: Caller,
    services: Svc,
    upload: Annotated[ReceivedFile, Depends(_upload)],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> FileView:
    """Upload a data file (purpose `fine-tune`; `evals` for items of evals): OpenAI's chat lines or
    preference pairs, prompts with completions, text, ShareGPT, Alpaca or TRL's pairs, as JSON
    lines, a JSON array, CSV or Parquet, also compressed with gzip or zstd. The format is
    detected from the contents, which are checked when a job uses them.
    """
    _check_form(upload)
    seconds = _lifetime(upload.fields)
    new = File(
        id=new_id("file-"),
        project_id=caller.project_id,
        filename=upload.filename,
        purpose=upload.fields["purpose"],
        bytes=upload.bytes,
        sha256=upload.sha256,
        created_at=0.0,
        idempotency_key=idempotency.key_digest(idempotency_key, caller.project_id),
    )

    def add() -> File:
        keep(upload, services.settings.files_dir / new.id)
        try:
            services.places.keep(new.id)
            refuse_without_client(request)
            repeats_within = (
                idempotency.WINDOW_SECONDS if idempotency.is_retry(request.headers) else None
            )
            return services.store.files.add_file(
                new, seconds=seconds, repeats_within=repeats_within
            )
        except BaseException:
            remove_unrecorded(services.places, services.store, new.id)
            raise

    file, _ = idempotency.once(
        lambda: idempotency.earlier_file(services.store, new, seconds, request.headers), add
    )
    return FileView.of(file)


class FileQuery(BaseModel):
    """Which files are listed."""

    after: Cursor = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Order = "desc"
    purpose: str | None = None
    sha256: Annotated[
        str | None, Field(pattern="^[0-9a-f]{64}$", description="Digest of the contents, in hex.")
    ] = None


@router.get("", response_model=ListView[FileView])
def list_files(caller: Caller, services: Svc, query: Annotated[FileQuery, Query()]) -> Any:
    """List files, the newest first.

    `sha256` (not in OpenAI's API): only files with these contents, so that a client need not upload
    them twice.
    """
    page = services.store.files.list_files(caller.project_id, **query.model_dump())
    return list_view([FileView.of(file) for file in page.data], page.has_more)


@router.get("/{file_id}")
def retrieve(file_id: str, caller: Caller, services: Svc) -> FileView:
    return FileView.of(services.store.files.get_file(caller.project_id, file_id))


@router.delete("/{file_id}")
def delete(file_id: str, caller: Caller, services: Svc) -> DeletedView:
    """Hide a file. Jobs that use it continue; its bytes are deleted once no unfinished job refers
    to it.
    """
    if services.store.files.delete_file(caller.project_id, file_id):
        free(services.places, services.store, [file_id])
    return DeletedView(id=file_id)


@router.get(
    "/{file_id}/content", response_class=Response, responses=binary("application/octet-stream")
)
def content(file_id: str, caller: Caller, services: Svc) -> Response:
    """Download the contents.

    Metrics of a job (purpose `fine-tune-results`) are base64-encoded, as OpenAI's scripts expect,
    unless the operator has set FT_RESULT_FILES_PLAIN.
    """
    file = services.store.files.get_file(caller.project_id, file_id)
    path = services.places.file(file.id)
    if not path.is_file():
        raise NotFoundError(
            f"The contents of {file.id} are gone from the service's disk.", param="file_id"
        )
    if wrong := fault(path, FileDigest(bytes=file.bytes, sha256=file.sha256)):
        message = (
            f"The contents of {file.id} are damaged on the service's disk: it {wrong}. "
            "Upload the file again."
        )
        raise NotFoundError(message, param="file_id", code="file_damaged")
    disposition = {
        "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename, safe='')}"
    }
    if file.purpose == RESULTS and not services.settings.result_files_plain:
        return StreamingResponse(
            _encoded(path), media_type="application/octet-stream", headers=disposition
        )
    return FileResponse(path, media_type="application/octet-stream", headers=disposition)


@router.get("/{file_id}/check")
async def check(
    file_id: str,
    caller: Caller,
    services: Svc,
    method: OfferedMethod | None = None,
    data: str | None = None,
    sensitive: bool = False,
) -> FileCheckView:
    """Not in OpenAI's API. Check a file before any job and without a base: its format, and the
    lines that cannot be trained on. `method`: the job's; `data`: the file's names of the format's
    columns, as JSON, such as `{"prompt": "question"}`; `sensitive`: whether the warnings also name
    lines with secrets and personal data, by kind. If a check takes more than ten seconds, only the
    beginning of the file is read.
    """
    file = await in_thread(_data_file, file_id, "file_id", caller, services)
    columns = Columns.of(_columns(data), method)
    request = FileCheck(
        file.sha256, columns, None if method is None else method in PAIR_METHODS, sensitive
    )
    path = await in_thread(fetched, file, services.places)
    return file_check_view(
        file_id, file.name, await services.file_checks.report(caller.project_id, request, path)
    )


class TokenQuery(BaseModel):
    """A base and the options of a job on which the tokens of its samples depend."""

    model: Annotated[str, Field(min_length=1, description="A base, or an alias of one.")]
    chat_template: str | None = None
    chat_template_kwargs: Annotated[
        str | None, Field(description='As JSON, such as {"enable_thinking": false}.')
    ] = None
    data: Annotated[
        str | None, Field(description="The file's names of the format's columns, as JSON.")
    ] = None
    method: OfferedMethod | None = None
    train_on: TrainOn = "all_assistant"
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = _DEFAULTS.max_length

    def options(self, base: Path) -> TokenOptions:
        """The options of a job on this base's folder.

        Raises SpecError for those that cannot be used.
        """
        given: dict[str, Any] = {"model": self.model, "training_file": "file"}
        given |= {"chat_template": self.chat_template} if self.chat_template else {}
        if self.chat_template_kwargs is not None:
            given["chat_template_kwargs"] = parse_json(self.chat_template_kwargs.encode())
        request = with_template_variables(parse_request(given), base)
        data = _columns(self.data)
        template = request.chat_template
        return TokenOptions(
            named_template(template) if template else "",
            train_on=self.train_on,
            columns=Columns.of(data, self.method or "supervised"),
            pixels=PixelBounds.of(data),
        )


class SamplesQuery(TokenQuery):
    after: Annotated[int, Field(ge=0, le=MOST_LINES)] = 0
    limit: Annotated[int, Field(ge=1, le=100)] = 10


class StatisticsQuery(TokenQuery):
    batch_size: Annotated[int, Field(ge=1, le=8192)] = _DEFAULTS.batch
    n_epochs: Annotated[int, Field(ge=1, le=50)] = _DEFAULTS.epochs
    validation_file: str | None = None
    validation_split: Annotated[float | None, Field(gt=0, lt=1)] = None
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 0


@router.get("/{file_id}/samples")
@takes_turns("reading")
def samples(
    file_id: str, query: Annotated[SamplesQuery, Query()], caller: Caller, services: Svc
) -> SamplesView:
    """Not in OpenAI's API. Samples of a file as a base would see them, before any job: those after
    line `after`, every token with its text and its role. All other options are a job's.
    """
    data = _data_file(file_id, "file_id", caller, services)
    base = services.catalogue.find(query.model).ref()
    options = query.options(Path(base.path))
    records = RecordRange(query.after, query.limit)
    return samples_view(
        file_samples(data, base.path, options, query.max_length, records, services.places)
    )


@router.get("/{file_id}/statistics")
@takes_turns("reading")
def statistics(
    file_id: str, query: Annotated[StatisticsQuery, Query()], caller: Caller, services: Svc
) -> StatisticsView:
    """Not in OpenAI's API. Statistics of a file as a job on a base would train on it, before any
    job: lengths, targets, duplicates, overlap with `validation_file`, steps, and warnings with
    suggested changes. The options are a job's. A file of more than 32 MiB has statistics only if a
    job has made its tokens before.
    """
    if query.validation_file is not None and query.validation_split is not None:
        message = "validation_file and validation_split are both given: keep one."
        raise SpecError(message, param="validation_split")
    data = _data_file(file_id, "file_id", caller, services)
    other = query.validation_file
    held_out = None if other is None else _data_file(other, "validation_file", caller, services)
    training = TrainingOptions(
        **query.model_dump(include={"max_length", "batch_size", "n_epochs", "train_on"})
    )
    measure = Measure(data, held_out, training, query.validation_split, query.seed)
    base = services.catalogue.find(query.model).ref()
    options = query.options(Path(base.path))
    return statistics_view(file_statistics(measure, base.path, options, services.places), measure)


def _data_file(file_id: str, param: str, caller: Principal, services: Services) -> DataFileRef:
    """Return a file of samples.

    Raises NotFoundError, and SpecError for a file of another purpose.
    """
    file = services.store.files.get_file(caller.project_id, file_id)
    if file.purpose not in PURPOSES:
        raise SpecError(
            f"{param} = {file.id!r}: its purpose is {file.purpose}, so it holds no samples.",
            param=param,
        )
    return DataFileRef(
        name=file.filename, path=str(services.settings.files_dir / file.id), sha256=file.sha256
    )


def _columns(given: str | None) -> DataOptions:
    """Return a mapping of names to columns from its JSON. Raises SpecError for anything else."""
    if given is None:
        return DataOptions()
    columns = parse_json(given.encode())
    try:
        return DataOptions.model_validate(columns)
    except ValidationError as error:
        raise spec_error(error, DataOptions) from None


def _lifetime(fields: Mapping[str, str]) -> int | None:
    """Return the seconds of the form's `expires_after[…]` parts; None without them.

    Raises SpecError.
    """
    given: dict[str, Any] = {
        name: fields[part]
        for name in ExpiresAfter.model_fields
        if (part := f"expires_after[{name}]") in fields
    }
    if not given:
        return None
    if re.fullmatch(r"[0-9]{1,12}", given.get("seconds", "")):
        given["seconds"] = int(given["seconds"])
    try:
        return _ExpiryForm.model_validate({"expires_after": given}).expires_after.seconds
    except ValidationError as error:
        raise spec_error(error, _ExpiryForm) from None


def _check_form(upload: ReceivedFile) -> None:
    """Raise SpecError naming the wrong part of the form."""
    for name in upload.fields:
        if name not in _PARTS:
            message = f"{name[:80]}: there is no such part; known are {', '.join(_PARTS)}."
            raise SpecError(message, param=name[:80], code="unknown_parameter")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise SpecError("purpose is required.", param="purpose", code="missing_required_parameter")
    require_data_file(upload.filename, "file", purpose)


def require_data_file(filename: str, param: str, purpose: str) -> None:
    """Raise SpecError unless files of this name and purpose are accepted.

    `param`: the field that held the name.
    """
    if purpose not in PURPOSES:
        known = " and ".join(map(repr, PURPOSES))
        message = f"purpose = {purpose[:80]!r}: only {known} are available in this version."
        raise SpecError(message, param="purpose", code="not_available")
    refuse_no_data_file(filename, param)


def _encoded(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_ENCODED_CHUNK):
            yield base64.b64encode(chunk)
