"""`/v1/uploads`: files that arrive in parts, since they are too large for one request."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from pydantic import Field

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import JsonBody, Services, Svc, body_schema, parse_body
from api.http.gone_clients import refuse_without_client
from api.http.routing import keyed_router
from api.http.threads import in_thread
from api.routes.files import ExpiresAfter, require_data_file
from api.transfer.multipart import (
    TEMPORARY_PREFIX,
    ReceivedFile,
    clean_filename,
    received,
)
from api.wire.views import FileView, UploadPartView, UploadView
from ft_service.control.cleanup.housekeeping import remove_unrecorded
from ft_service.errors import NotFoundError, SpecError, UnavailableError
from ft_service.ids import new_id
from ft_service.rundir.directory import sync_folder
from ft_service.spec import Strict
from ft_service.store.records import UPLOAD_PREFIX, File, Upload, UploadPart

router = keyed_router("/v1/uploads", "uploads")

LIFETIME_SECONDS = 3600
MAX_PART_BYTES = 64 * 1024**2
MAX_PARTS = 10_000
MAX_PENDING = 20
"""Pending uploads of a project: the disk must have room for as many of the largest size."""
_COPY_BYTES = 1024**2

_PART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {"data": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


class UploadRequest(Strict):
    """The file that will be sent."""

    bytes: Annotated[int, Field(ge=1)]
    """Size of the whole file; at most FT_MAX_UPLOAD_BYTES."""
    filename: Annotated[str, Field(min_length=1, max_length=4096)]
    mime_type: Annotated[str, Field(max_length=255)]
    """OpenAI's field. It has no effect: the job that uses the file checks its contents."""
    purpose: str
    expires_after: ExpiresAfter | None = None
    """Lifetime of the file that the upload becomes; None: until it is deleted."""


class CompleteRequest(Strict):
    """The parts of the file."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS)]
    """Ids of the parts, in the order of the file."""
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None
    """Digest of the whole file, in hexadecimal; None: not compared."""


@router.post("", openapi_extra=body_schema(UploadRequest))
def create(
    body: JsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> UploadView:
    """Announce a file. The upload expires after an hour."""
    given = parse_body(body, UploadRequest)
    most = services.settings.max_upload_bytes
    filename = clean_filename(given.filename)
    require_data_file(filename, "filename", given.purpose)
    if given.bytes > most:
        message = f"bytes = {given.bytes}: larger than {most} (FT_MAX_UPLOAD_BYTES). Split it."
        raise SpecError(message, param="bytes", code="file_too_large")
    keyed_id = idempotency.keyed_id(UPLOAD_PREFIX, idempotency_key, caller)
    new = Upload(
        id=keyed_id or new_id(UPLOAD_PREFIX),
        project_id=caller.project_id,
        filename=filename,
        purpose=given.purpose,
        bytes=given.bytes,
        file_seconds=given.expires_after.seconds if given.expires_after else None,
    )
    upload, is_new = idempotency.once(
        lambda: idempotency.earlier_upload(services.store, new, keyed_id),
        lambda: services.store.uploads.add_upload(
            new, seconds=LIFETIME_SECONDS, at_most=MAX_PENDING
        ),
    )
    return UploadView.of(upload, file=None) if is_new else _view(upload, services)


async def _part(
    request: Request, upload_id: str, caller: Caller, services: Svc
) -> AsyncIterator[ReceivedFile]:
    upload = await in_thread(services.store.uploads.get_upload, caller.project_id, upload_id)
    instead = "Send it in more parts."
    async with received(
        request,
        services.places.arrival_folder(upload.id),
        MAX_PART_BYTES,
        part="data",
        instead=instead,
    ) as part:
        yield part


@router.post("/{upload_id}/parts", openapi_extra=_PART)
def add_part(
    request: Request,
    upload_id: str,
    caller: Caller,
    services: Svc,
    sent: Annotated[ReceivedFile, Depends(_part)],
    idempotency_key: Annotated[str | None, Header()] = None,
) -> UploadPartView:
    """Send a part of at most 64 MiB; several may be sent at once.

    Their order is given when the upload is completed.
    """
    if sent.fields:
        name = next(iter(sent.fields))[:80]
        raise SpecError(
            f"{name}: there is no such part; known is data.", param=name, code="unknown_parameter"
        )
    if not sent.bytes:
        raise SpecError("data is empty.", param="data")
    upload = services.store.uploads.get_upload(caller.project_id, upload_id)
    new = UploadPart(
        id=new_id("part_"),
        project_id=caller.project_id,
        upload_id=upload.id,
        bytes=sent.bytes,
        sha256=sent.sha256,
        idempotency_key=idempotency.key_digest(idempotency_key, caller.project_id, upload.id),
    )

    def add() -> UploadPart:
        is_repeat = idempotency.is_retry(request.headers)
        try:
            services.places.keep_part(upload.id, new.id, sent.path)
            refuse_without_client(request)
            # Room for one part more than announced, which a user may send again after its answer
            # was lost.
            return services.store.uploads.add_part(
                new, slack=MAX_PART_BYTES, at_most=MAX_PARTS, is_repeat=is_repeat
            )
        except FileNotFoundError:
            raise _folder_gone(upload) from None
        except BaseException:
            _remove_unrecorded(new, services)
            raise

    part, _ = idempotency.once(
        lambda: idempotency.earlier_part(services.store, new, request.headers), add
    )
    return UploadPartView.of(part)


@router.post("/{upload_id}/complete", openapi_extra=body_schema(CompleteRequest))
def complete(upload_id: str, body: JsonBody, caller: Caller, services: Svc) -> UploadView:
    """Make the file. Repeating it gives the same answer."""
    given = parse_body(body, CompleteRequest)
    upload = services.store.uploads.get_upload(caller.project_id, upload_id)
    if upload.status == "pending":
        try:
            upload = _complete(upload, given, services)
        except (FileNotFoundError, SpecError) as error:
            # Another request, perhaps a repeat of this one, has just ended it; or its parts are on
            # another disk, if servers share neither FT_HOME nor object storage.
            upload = services.store.uploads.get_upload(caller.project_id, upload_id)
            if upload.status == "pending":
                raise (error if isinstance(error, SpecError) else _folder_gone(upload)) from None
    if upload.part_ids != given.part_ids:
        message = f"Upload {upload.id} is {upload.status}: start a new one."
        raise SpecError(message, param="upload_id", code="invalid_state")
    return _view(upload, services)


@router.post("/{upload_id}/cancel")
def cancel(upload_id: str, caller: Caller, services: Svc) -> UploadView:
    """Cancel the upload; its parts are removed."""
    upload = services.store.uploads.cancel_upload(caller.project_id, upload_id)
    _remove_parts(upload, services)
    return UploadView.of(upload, file=None)


def _complete(upload: Upload, request: CompleteRequest, services: Services) -> Upload:
    file = _assemble(upload, _chosen(upload, request.part_ids, services), request.md5, services)
    try:
        services.places.keep(file.id)
        done = services.store.uploads.complete_upload(
            upload.project_id, upload.id, request.part_ids, file
        )
    except BaseException:
        remove_unrecorded(services.places, services.store, file.id)
        raise
    if (
        done.file_id != file.id
    ):  # the same request arrived twice at once, and the other one was faster
        services.places.remove(file.id)
    _remove_parts(upload, services)
    return done


def _chosen(upload: Upload, part_ids: Sequence[str], services: Services) -> list[UploadPart]:
    """Return the parts of a file; a part may be used twice.

    Raises SpecError for an unknown part or a wrong total length.
    """
    known = {
        part.id: part for part in services.store.uploads.list_parts(upload.project_id, upload.id)
    }
    for number, part_id in enumerate(part_ids):
        if part_id not in known:
            message = f"part_ids.{number} = {part_id[:80]!r}: the upload has no such part."
            raise SpecError(message, param=f"part_ids.{number}", code="part_not_found")
    chosen = [known[part_id] for part_id in part_ids]
    total = sum(part.bytes for part in chosen)
    if total != upload.bytes:
        message = (
            f"part_ids: these parts hold {total} bytes, and the upload announced {upload.bytes}."
        )
        raise SpecError(message, param="part_ids", code="bytes_mismatch")
    return chosen


def _assemble(
    upload: Upload, parts: Sequence[UploadPart], md5: str | None, services: Services
) -> File:
    """Join the parts to one durable file below `files_dir`, and make its record.

    Raises SpecError if the checksum differs, and FileNotFoundError if the parts are gone.
    """
    folder = services.settings.files_dir
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=TEMPORARY_PREFIX, dir=folder) as target:
        sha256 = _copy(upload, parts, md5, target, services)
        file = File(
            id=new_id("file-"),
            project_id=upload.project_id,
            filename=upload.filename,
            purpose=upload.purpose,
            bytes=upload.bytes,
            sha256=sha256,
            created_at=0.0,
        )
        (folder / file.id).hardlink_to(target.name)
    sync_folder(folder)
    return file


def _copy(
    upload: Upload, parts: Sequence[UploadPart], md5: str | None, target: Any, services: Services
) -> str:
    """Write the parts in order, durably.

    Returns the SHA-256 of the whole. Raises SpecError if the MD5 differs from the given one.
    """
    whole = hashlib.sha256()
    check = hashlib.md5(usedforsecurity=False)
    for part in parts:
        with services.places.opened_part(upload.id, part.id) as source:
            while chunk := source.read(_COPY_BYTES):
                whole.update(chunk)
                check.update(chunk)
                target.write(chunk)
    if md5 is not None and check.hexdigest() != md5.lower():
        message = f"md5 = {md5}: the parts' is {check.hexdigest()}. Send them again."
        raise SpecError(message, param="md5", code="checksum_mismatch")
    target.flush()
    os.fsync(target.fileno())
    return whole.hexdigest()


def _remove_unrecorded(part: UploadPart, services: Services) -> None:
    """Remove the bytes of a part whose record could not be stored.

    They stay if it was stored all the same, since the connection was lost behind the commit: a
    repeat of the request finds it. If the database cannot say, they go with their upload.
    """
    with suppress(UnavailableError):
        if part.id not in {
            known.id for known in services.store.uploads.list_parts(part.project_id, part.upload_id)
        }:
            services.places.remove_part(part.upload_id, part.id)


def _folder_gone(upload: Upload) -> SpecError:
    """Return the error for an upload without a folder: it has just ended, or its parts are on
    another disk.
    """
    message = (
        f"Upload {upload.id} has just ended, or its parts are not on this server's disk. "
        "Start a new upload."
    )
    return SpecError(message, param="upload_id", code="invalid_state")


def _remove_parts(upload: Upload, services: Services) -> None:
    """Remove the parts of an ended upload. What cannot be removed now, housekeeping removes."""
    with suppress(OSError, UnavailableError):
        services.places.remove_parts(upload.id)


def _view(upload: Upload, services: Services) -> UploadView:
    try:
        file = services.store.files.get_file(upload.project_id, upload.file_id or "")
    except NotFoundError:  # deleted since
        file = None
    return UploadView.of(upload, file=FileView.of(file) if file else None)
