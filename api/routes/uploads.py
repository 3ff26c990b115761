"""`/v1/uploads`: a file that arrives in parts, for what is too large for one request."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import Field

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import JsonBody, Services, Svc, body_schema, parse_body
from api.http.routing import keyed_router
from api.http.threads import in_thread
from api.routes.files import require_chat_file
from api.transfer.multipart import TEMPORARY_PREFIX, clean_filename, keep, received, sync_folder
from api.transfer.multipart import ReceivedFile as Received
from api.wire.expiry import ExpiresAfter
from api.wire.views import UploadPartView, UploadView, upload_part_view, upload_view
from ft_service.errors import NotFoundError, SpecError
from ft_service.ids import new_id
from ft_service.spec import Strict
from ft_service.store.records import File, Upload, UploadPart

router = keyed_router("/v1/uploads", "uploads")

LIFETIME_SECONDS = 3600
MAX_PART_BYTES = 64 * 1024**2
MAX_PARTS = 10_000
MAX_PENDING = 20
"""Pending uploads of a project: with the largest upload, what the disk must have room for."""
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
    """What is going to be sent."""

    bytes: Annotated[int, Field(ge=1)]
    """Of the whole file; at most FT_MAX_UPLOAD_BYTES."""
    filename: Annotated[str, Field(min_length=1, max_length=4096)]
    mime_type: Annotated[str, Field(max_length=255)]
    """OpenAI's field. The contents are checked by the job that uses them, whatever it says."""
    purpose: str
    expires_after: ExpiresAfter | None = None
    """Lifetime of the file that the upload becomes; None: until it is deleted."""


class CompleteRequest(Strict):
    """Which parts make the file."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS)]
    """In the order of the file."""
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None
    """Of the whole file, in hexadecimal; None: not compared."""


@router.post("", openapi_extra=body_schema(UploadRequest))
def create(body: JsonBody, caller: Caller, services: Svc) -> UploadView:
    """Announce a file. The upload expires after an hour."""
    asked = parse_body(body, UploadRequest)
    filename = clean_filename(asked.filename)
    require_chat_file(filename, "filename", asked.purpose)
    if asked.bytes > services.settings.max_upload_bytes:
        message = f"bytes = {asked.bytes}: larger than {services.settings.max_upload_bytes} (FT_MAX_UPLOAD_BYTES). Split it."
        raise SpecError(message, param="bytes", code="file_too_large")
    upload = Upload(
        id=new_id("upload_"),
        project_id=caller.project_id,
        filename=filename,
        purpose=asked.purpose,
        bytes=asked.bytes,
        file_seconds=asked.expires_after.seconds if asked.expires_after else None,
    )
    return upload_view(services.store.add_upload(upload, seconds=LIFETIME_SECONDS, at_most=MAX_PENDING), None)


async def _part(request: Request, upload_id: str, caller: Caller, services: Svc) -> AsyncIterator[Received]:
    upload = await in_thread(services.store.get_upload, caller.project_id, upload_id)
    async with received(request, _folder(upload, services), MAX_PART_BYTES, part="data") as part:
        yield part


@router.post("/{upload_id}/parts", openapi_extra=_PART)
def add_part(
    request: Request, upload_id: str, caller: Caller, services: Svc, sent: Annotated[Received, Depends(_part)]
) -> UploadPartView:
    """Send a part of at most 64 MiB; several may be sent at once. Their order is given when the upload is completed."""
    if sent.fields:
        name = next(iter(sent.fields))[:80]
        raise SpecError(f"{name}: there is no such part; known is data.", param=name, code="unknown_parameter")
    if not sent.bytes:
        raise SpecError("data is empty.", param="data")
    upload = services.store.get_upload(caller.project_id, upload_id)
    new = UploadPart(
        id=new_id("part_"), project_id=caller.project_id, upload_id=upload.id, bytes=sent.bytes, sha256=sent.sha256
    )
    if earlier := idempotency.repeated_part(request.headers, services.store, new):
        return upload_part_view(earlier)
    path = _folder(upload, services) / new.id
    try:
        keep(sent, path)
        # Room for one part more than announced: one whose answer was lost, and which was sent again by hand.
        return upload_part_view(services.store.add_part(new, slack=MAX_PART_BYTES, at_most=MAX_PARTS))
    except FileNotFoundError:
        raise _being_ended(upload) from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@router.post("/{upload_id}/complete", openapi_extra=body_schema(CompleteRequest))
def complete(upload_id: str, body: JsonBody, caller: Caller, services: Svc) -> UploadView:
    """Make the file. Repeating it gives the same answer."""
    asked = parse_body(body, CompleteRequest)
    upload = services.store.get_upload(caller.project_id, upload_id)
    if upload.status == "pending":
        try:
            upload = _complete(upload, asked, services)
        except (FileNotFoundError, SpecError) as error:
            # Ended in the same moment, perhaps by the same request; or its parts are on another disk.
            upload = services.store.get_upload(caller.project_id, upload_id)
            if upload.status == "pending":
                raise (error if isinstance(error, SpecError) else _being_ended(upload)) from None
    if upload.part_ids != asked.part_ids:
        message = f"Upload {upload.id} is {upload.status}: start a new one."
        raise SpecError(message, param="upload_id", code="invalid_state")
    return _view(upload, services)


@router.post("/{upload_id}/cancel")
def cancel(upload_id: str, caller: Caller, services: Svc) -> UploadView:
    """Give the upload up; its parts are removed."""
    upload = services.store.cancel_upload(caller.project_id, upload_id)
    shutil.rmtree(_folder(upload, services), ignore_errors=True)
    return upload_view(upload, None)


def _complete(upload: Upload, asked: CompleteRequest, services: Services) -> Upload:
    parts = _chosen(upload, asked.part_ids, services)
    file = _assemble(upload, parts, asked.md5, services)
    try:
        services.places.keep(file.id)
        done = services.store.complete_upload(upload.project_id, upload.id, asked.part_ids, file)
    except BaseException:
        services.places.remove(file.id)
        raise
    if done.file_id != file.id:  # the same request arrived twice at once, and the other one was faster
        services.places.remove(file.id)
    shutil.rmtree(_folder(upload, services), ignore_errors=True)
    return done


def _chosen(upload: Upload, part_ids: Sequence[str], services: Services) -> list[UploadPart]:
    """The parts of a file; one may be used twice. Raises SpecError if one is unknown or their length is not as announced."""
    known = {part.id: part for part in services.store.list_parts(upload.project_id, upload.id)}
    for number, part_id in enumerate(part_ids):
        if part_id not in known:
            message = f"part_ids.{number} = {part_id[:80]!r}: the upload has no such part."
            raise SpecError(message, param=f"part_ids.{number}", code="part_not_found")
    chosen = [known[part_id] for part_id in part_ids]
    total = sum(part.bytes for part in chosen)
    if total != upload.bytes:
        message = f"part_ids: these parts hold {total} bytes, and the upload announced {upload.bytes}."
        raise SpecError(message, param="part_ids", code="bytes_mismatch")
    return chosen


def _assemble(upload: Upload, parts: Sequence[UploadPart], md5: str | None, services: Services) -> File:
    """Join the parts to one durable file below `files_dir`, and make its record. Raises SpecError if the checksum differs,
    and FileNotFoundError if the parts are gone.
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


def _copy(upload: Upload, parts: Sequence[UploadPart], md5: str | None, target: Any, services: Services) -> str:
    """Write the parts in order, durably. Returns the SHA-256 of the whole. Raises SpecError if the MD5 differs from the given
    one.
    """
    whole, check = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    for part in parts:
        with (_folder(upload, services) / part.id).open("rb") as source:
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


def _being_ended(upload: Upload) -> SpecError:
    """The error for an upload whose folder vanished: completed or cancelled in the same moment, or its parts are on another
    disk.
    """
    message = (
        f"Upload {upload.id} is being ended, or its parts are not on this server's disk: look at it again, or begin a new one."
    )
    return SpecError(message, param="upload_id", code="invalid_state")


def _folder(upload: Upload, services: Services) -> Path:
    return services.settings.uploads_dir / upload.id


def _view(upload: Upload, services: Services) -> UploadView:
    try:
        file = services.store.get_file(upload.project_id, upload.file_id or "")
    except NotFoundError:  # deleted since
        file = None
    return upload_view(upload, file)
