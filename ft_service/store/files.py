"""Records of uploaded and produced files. Their bytes are stored elsewhere (storage/)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, and_, bindparam, insert, or_, select, update

from ft_service.errors import ConflictError
from ft_service.store.database import StorePart, database_time
from ft_service.store.records import File, Order, Page
from ft_service.store.rows import FILE, Listing, file_row, not_found, page
from ft_service.store.tables import TO_FREE, VISIBLE, files, referred_to
from ft_service.store.tenants.audit import acting_key, record
from ft_service.store.tenants.projects import lock_project, refuse_bytes_beyond
from ft_service.store.tenants.usage import add_use

LIVE = and_(VISIBLE, or_(files.c.expires_at.is_(None), files.c.expires_at > database_time()))

_SELECT_FILE = select(*FILE).where(
    files.c.id == bindparam("file_id"), files.c.project_id == bindparam("of_project"), LIVE
)


class FileStore(StorePart):
    """Records of files."""

    def add_file(
        self, file: File, *, seconds: int | None = None, repeats_within: float | None = None
    ) -> File:
        """Store a record; the database sets `created_at`.

        `seconds`: until it expires; None: never. `repeats_within`: how old, in seconds, what a
        repeated request repeats may be; None: it is no repeat.

        Raises ConflictError if the id is taken, or if another try of the request was faster
        (`earlier_file`).
        """
        with self._database.writing() as connection:
            if file.idempotency_key is not None or repeats_within is not None:
                lock_project(connection, file.project_id)
                if _earlier(connection, file, repeats_within) is not None:
                    raise ConflictError("Another try of this request has stored the file.")
            return insert_file(connection, file, seconds)

    def earlier_file(self, file: File, within: float) -> File | None:
        """The file that another try of a request has stored: that of the same key, hidden or not;
        if `file` has none, a visible one of the same name and contents that is at most `within`
        seconds old.
        """
        with self._database.reading() as connection:
            return _earlier(connection, file, within)

    def refuse_bytes(self, project_id: str, more: int, *, what: str = "The file has") -> None:
        """Raise LimitError if the project may not store `more` additional bytes.

        `what`: beginning of the message.
        """
        with self._database.reading() as connection:
            refuse_bytes_beyond(connection, project_id, more, what=what)

    def get_file(self, project_id: str, file_id: str) -> File:
        with self._database.reading() as connection:
            row = (
                connection.execute(_SELECT_FILE, {"file_id": file_id, "of_project": project_id})
                .mappings()
                .one_or_none()
            )
        if row is None:
            raise not_found("file", file_id)
        return File(**row)

    def find_files(self, file_ids: Collection[str]) -> dict[str, File]:
        """Visible files of all projects by id; unknown ids are left out."""
        query = select(*FILE).where(files.c.id.in_(list(file_ids)), LIVE)
        with self._database.reading() as connection:
            records = [File(**row) for row in connection.execute(query).mappings()]
        return {file.id: file for file in records}

    def list_files(
        self,
        project_id: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Order = "desc",
        purpose: str | None = None,
        sha256: str | None = None,
    ) -> Page[File]:
        """A project's files in order of creation.

        `after` may name a deleted file, so that a client may delete what it lists. `sha256`: only
        files with these contents.
        """
        mine = files.c.project_id == project_id
        query = select(*FILE).where(mine, LIVE)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if sha256 is not None:
            query = query.where(files.c.sha256 == sha256)
        with self._database.reading() as connection:
            query = Listing(files.c.position, files.c.id, [mine], order == "desc").apply(
                connection, query, after
            )
            return page(connection, query, limit, lambda row: File(**row))

    def delete_file(self, project_id: str, file_id: str) -> bool:
        """Hide a file. True if no unfinished job refers to it, so that its bytes may be removed."""
        mine = (files.c.id == file_id, files.c.project_id == project_id)
        with self._database.writing(makes_room=True) as connection:
            if (
                connection.execute(
                    update(files).where(*mine, LIVE).values(deleted_at=database_time())
                ).rowcount
                == 0
            ):
                raise not_found("file", file_id)
            record(connection, project_id, "file.deleted", file_id)
            return connection.scalars(select(~referred_to()).where(*mine)).one()

    def freeable_files(self, limit: int = 100) -> list[str]:
        """Ids of deleted and expired files of all projects to which no unfinished job refers, and
        whose bytes still exist.
        """
        over = or_(files.c.deleted_at.is_not(None), files.c.expires_at <= database_time())
        query = (
            select(files.c.id)
            .where(TO_FREE, over, ~referred_to())
            .order_by(files.c.position)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def digests_of_files(self, file_ids: Sequence[str]) -> set[str]:
        """SHA-256 digests of these files, freed ones included."""
        with self._database.reading() as connection:
            return set(connection.scalars(select(files.c.sha256).where(files.c.id.in_(file_ids))))

    def old_files(self, seconds: float, *, after: str | None = None, limit: int) -> list[File]:
        """Visible files of all projects older than `seconds` to which no unfinished job refers, the
        oldest first, from the one after the file `after`.
        """
        old = files.c.created_at <= database_time() - seconds
        query = (
            select(*FILE).where(old, LIVE, ~referred_to()).order_by(files.c.position).limit(limit)
        )
        if after is not None:
            query = query.where(
                files.c.position
                > select(files.c.position).where(files.c.id == after).scalar_subquery()
            )
        with self._database.reading() as connection:
            return [File(**row) for row in connection.execute(query).mappings()]

    def kept_files(self, file_ids: Sequence[str]) -> set[str]:
        """Those of these ids that a file of any project has whose bytes may be on the disk."""
        with self._database.reading() as connection:
            return set(
                connection.scalars(
                    select(files.c.id).where(files.c.id.in_(file_ids), files.c.freed_at.is_(None))
                )
            )

    def mark_freed(self, file_ids: Sequence[str]) -> None:
        """Note that the bytes of these files are removed."""
        with self._database.writing(makes_room=True) as connection:
            connection.execute(
                update(files).where(files.c.id.in_(file_ids)).values(freed_at=database_time())
            )


def _earlier(connection: Connection, file: File, within: float | None) -> File | None:
    if file.idempotency_key is not None:
        query = select(*FILE).where(files.c.idempotency_key == file.idempotency_key)
    else:
        same = [
            files.c[name] == getattr(file, name)
            for name in ("project_id", "purpose", "filename", "sha256")
        ]
        young = files.c.created_at >= database_time() - within
        query = select(*FILE).where(*same, young, LIVE).order_by(files.c.position.desc()).limit(1)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else File(**row)


def insert_file(
    connection: Connection, file: File, seconds: int | None, *, of_upload: str = ""
) -> File:
    """`add_file` within a transaction.

    `of_upload`: the upload that becomes the file. Raises LimitError if the project may not store so
    much.
    """
    refuse_bytes_beyond(connection, file.project_id, file.bytes, of_upload=of_upload)
    now = connection.scalars(select(database_time())).one()
    row = file_row(file) | {
        "created_at": now,
        "expires_at": None if seconds is None else now + seconds,
    }
    add_use(connection, file.project_id, acting_key(), now, bytes=file.bytes)
    record(
        connection,
        file.project_id,
        "file.created",
        file.id,
        filename=file.filename,
        bytes=file.bytes,
    )
    return File(**connection.execute(insert(files).values(row).returning(*FILE)).mappings().one())
