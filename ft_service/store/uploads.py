"""Uploads in parts, which become files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from ft_service.errors import ConflictError, SpecError
from ft_service.store.database import StorePart, database_time
from ft_service.store.files import insert_file
from ft_service.store.records import File, Upload, UploadPart
from ft_service.store.rows import columns_of, not_found
from ft_service.store.tables import upload_parts, uploads
from ft_service.store.tenants.projects import OPEN_UPLOAD, lock_project, refuse_bytes_beyond

UPLOAD = columns_of(Upload, uploads)
PART = columns_of(UploadPart, upload_parts)


class UploadStore(StorePart):
    """Uploads and their parts."""

    def add_upload(self, upload: Upload, *, seconds: int, at_most: int) -> Upload:
        """Store a pending upload that expires after `seconds`.

        Raises SpecError if the project has `at_most` already, LimitError if it may not store what
        they all have announced.
        """
        count = (
            select(func.count())
            .select_from(uploads)
            .where(uploads.c.project_id == upload.project_id, OPEN_UPLOAD)
        )
        with self._database.writing() as connection:
            lock_project(connection, upload.project_id)
            refuse_bytes_beyond(connection, upload.project_id, upload.bytes)
            if connection.scalars(count).one() >= at_most:
                message = (
                    f"This project has {at_most} uploads that are neither completed nor "
                    "cancelled. Cancel one first."
                )
                raise SpecError(message, code="too_many_uploads")
            now = connection.scalars(select(database_time())).one()
            row = _row(upload) | {"created_at": now, "expires_at": now + seconds}
            stored = (
                connection.execute(insert(uploads).values(row).returning(*UPLOAD)).mappings().one()
            )
        return Upload(**stored)

    def get_upload(self, project_id: str, upload_id: str) -> Upload:
        with self._database.reading() as connection:
            return _get(connection, project_id, upload_id)

    def add_part(
        self, part: UploadPart, *, slack: int, at_most: int, is_repeat: bool = False
    ) -> UploadPart:
        """Store a part of a pending upload; all parts together may have `slack` bytes more than the
        upload announced.

        Raises SpecError if they would have more, if there are `at_most` parts already, or if the
        upload is not pending; ConflictError if another try of a request that has a key, or is a
        repeat, was faster (`earlier_part`).
        """
        sums = select(func.count(), func.coalesce(func.sum(upload_parts.c.bytes), 0))
        with self._database.writing() as connection:
            upload = _get(connection, part.project_id, part.upload_id, lock=True)
            _check_pending(upload)
            if (part.idempotency_key is not None or is_repeat) and _earlier(
                connection, part
            ) is not None:
                raise ConflictError("Another try of this request has stored the part.")
            count, held = connection.execute(
                sums.where(upload_parts.c.upload_id == upload.id)
            ).one()
            if held + part.bytes > upload.bytes + slack:
                message = (
                    f"data: the parts would hold {held + part.bytes} bytes, and the upload "
                    f"announced {upload.bytes}."
                )
                raise SpecError(message, param="data", code="too_many_bytes")
            if count >= at_most:
                raise SpecError(
                    f"data: an upload has at most {at_most} parts. Send larger ones.", param="data"
                )
            row = _row(part) | {"created_at": database_time()}
            stored = (
                connection.execute(insert(upload_parts).values(row).returning(*PART))
                .mappings()
                .one()
            )
        return UploadPart(**stored)

    def earlier_part(self, part: UploadPart) -> UploadPart | None:
        """The part that another try of a request has stored: that of the same key; if `part` has
        none, the newest of the same contents in its upload.
        """
        with self._database.reading() as connection:
            return _earlier(connection, part)

    def list_parts(self, project_id: str, upload_id: str) -> list[UploadPart]:
        """Return the parts of a pending upload, the oldest first."""
        query = select(*PART).where(
            upload_parts.c.upload_id == upload_id, upload_parts.c.project_id == project_id
        )
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(upload_parts.c.position)).mappings()
            return [UploadPart(**row) for row in rows]

    def complete_upload(
        self, project_id: str, upload_id: str, part_ids: Sequence[str], file: File
    ) -> Upload:
        """Turn a pending upload into a file.

        An upload already completed with the same parts is returned unchanged.

        Raises SpecError for any other upload.
        """
        with self._database.writing() as connection:
            upload = _get(connection, project_id, upload_id, lock=True)
            if upload.status == "completed" and upload.part_ids == list(part_ids):
                return upload
            _check_pending(upload)
            insert_file(connection, file, upload.file_seconds, of_upload=upload_id)
            return _end(
                connection, upload_id, status="completed", part_ids=list(part_ids), file_id=file.id
            )

    def cancel_upload(self, project_id: str, upload_id: str) -> Upload:
        """Cancel a pending upload; a cancelled one stays as it is.

        Raises SpecError if it is completed or has expired.
        """
        with self._database.writing(makes_room=True) as connection:
            upload = _get(connection, project_id, upload_id, lock=True)
            if upload.status == "cancelled":
                return upload
            _check_pending(upload)
            return _end(connection, upload_id, status="cancelled")

    def pending_uploads(self) -> set[str]:
        """Return the ids of all projects' pending uploads."""
        with self._database.reading() as connection:
            return set(connection.scalars(select(uploads.c.id).where(OPEN_UPLOAD)))


def _row(record: Upload | UploadPart) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _get(connection: Connection, project_id: str, upload_id: str, *, lock: bool = False) -> Upload:
    """Read an upload. `lock`: until the end of the transaction; SQLite's writers exclude each other
    anyway.
    """
    query = select(*UPLOAD, database_time().label("now")).where(
        uploads.c.id == upload_id, uploads.c.project_id == project_id
    )
    row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    if row is None:
        raise not_found("upload", upload_id)
    return _upload(row)


def _earlier(connection: Connection, part: UploadPart) -> UploadPart | None:
    names = (
        "project_id",
        "upload_id",
        *(("idempotency_key",) if part.idempotency_key else ("bytes", "sha256")),
    )
    query = select(*PART).where(*(upload_parts.c[name] == getattr(part, name) for name in names))
    row = (
        connection.execute(query.order_by(upload_parts.c.position.desc()).limit(1))
        .mappings()
        .one_or_none()
    )
    return None if row is None else UploadPart(**row)


def _upload(row: RowMapping) -> Upload:
    values = dict(row)
    now = values.pop("now")
    upload = Upload(**values)
    return (
        replace(upload, status="expired")
        if upload.status == "pending" and upload.expires_at <= now
        else upload
    )


def _check_pending(upload: Upload) -> None:
    if upload.status == "pending":
        return
    ended = {"completed": "is completed", "cancelled": "was cancelled", "expired": "has expired"}[
        upload.status
    ]
    raise SpecError(
        f"Upload {upload.id} {ended}: start a new one.", param="upload_id", code="invalid_state"
    )


def _end(connection: Connection, upload_id: str, **values: Any) -> Upload:
    connection.execute(delete(upload_parts).where(upload_parts.c.upload_id == upload_id))
    statement = update(uploads).where(uploads.c.id == upload_id).values(**values).returning(*UPLOAD)
    return Upload(**connection.execute(statement).mappings().one())
