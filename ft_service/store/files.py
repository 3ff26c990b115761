"""Records of uploaded and produced files. Their bytes are kept elsewhere."""

from __future__ import annotations

from sqlalchemy import exists, insert, or_, select, update

from ft_service.store.base import File, Order, Page
from ft_service.store.database import Database, database_time
from ft_service.store.rows import FILE, cursor, file_row, not_found, page, to_file
from ft_service.store.tables import UNFINISHED, VISIBLE, files, jobs


class FileStore(Database):
    def add_file(self, file: File) -> File:
        """Store the record; `created_at` is set by the database. Raises ConflictError if the id is taken."""
        with self.writing() as connection:
            row = connection.execute(insert(files).values(file_row(file)).returning(*FILE)).mappings().one()
        return to_file(row)

    def get_file(self, project_id: str, file_id: str) -> File:
        query = select(*FILE).where(files.c.id == file_id, files.c.project_id == project_id, VISIBLE)
        with self.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found("file", file_id)
        return to_file(row)

    def list_files(
        self,
        project_id: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> Page[File]:
        """By creation. `after` may name a file deleted since, so that a reader may delete what it lists."""
        place = files.c.position
        query = select(*FILE).where(files.c.project_id == project_id, VISIBLE)
        query = query.order_by(place.desc() if order == "desc" else place.asc())
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self.reading() as connection:
            if after is not None:
                last = cursor(connection, place, files.c.id == after, files.c.project_id == project_id, after=after)
                query = query.where(place < last if order == "desc" else place > last)
            return page(connection, query, limit, to_file)

    def delete_file(self, project_id: str, file_id: str) -> bool:
        """Hide a file. True if no unfinished job refers to it, so that its bytes may go now."""
        hide = (
            update(files)
            .where(files.c.id == file_id, files.c.project_id == project_id, VISIBLE)
            .values(deleted_at=database_time())
        )
        referring = exists().where(
            jobs.c.project_id == project_id,
            UNFINISHED,
            or_(*(jobs.c.request[name].as_string() == file_id for name in ("training_file", "validation_file"))),
        )
        with self.writing() as connection:
            if connection.execute(hide).rowcount == 0:
                raise not_found("file", file_id)
            return not connection.scalars(select(referring)).one()
