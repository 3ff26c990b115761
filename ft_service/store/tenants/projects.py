"""Projects: the tenants of a service, each with its own keys, limits and usage."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, and_, func, insert, or_, select, update

from ft_service.errors import LimitError, SpecError
from ft_service.ids import new_id
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.records import Page, Project, TenantLimits
from ft_service.store.rows import not_found, page
from ft_service.store.tables import (
    PENDING,
    TINKER_ROW_BYTES,
    VISIBLE,
    eval_runs,
    evals,
    files,
    projects,
    referred_to,
    tinker_samplers,
    tinker_sessions,
    uploads,
)
from ft_service.store.tenants.audit import record

PREFIX = "proj_"
MANAGING_PROJECT = "default"
"""The first project of a service. Its admin keys manage the other projects of its organisation."""

THERE = projects.c.deleted_at.is_(None)
OPEN_UPLOAD = and_(PENDING, uploads.c.expires_at > database_time())

_COLUMNS = (
    "id",
    "organization",
    "name",
    "created_at",
    "archived_at",
    "deleted_at",
    "max_slots",
    "limits",
)
_PROJECT = [projects.c[name] for name in _COLUMNS]


class ProjectStore(StorePart):
    """Projects and their limits."""

    def ensure_project(self, project_id: str, organization: str) -> None:
        """Create a project; one that exists stays as it is."""
        row = {"id": project_id, "organization": organization, "created_at": database_time()}
        with self._database.writing() as connection:
            connection.execute(upsert(connection, projects).values(row).on_conflict_do_nothing())

    def name_organization(self, project_id: str, organization: str) -> None:
        """Give a project's organization a name, in all of its projects, so that they stay
        together.
        """
        with self._database.writing() as connection:
            old = _get(connection, project_id, lock=True).organization
            if old != organization:
                mine = update(projects).where(projects.c.organization == old)
                connection.execute(mine.values(organization=organization))
                record(
                    connection,
                    project_id,
                    "organization.renamed",
                    project_id,
                    organization=organization,
                )

    def create_project(
        self,
        *,
        name: str,
        organization: str,
        limits: TenantLimits | None = None,
        project_id: str | None = None,
    ) -> Project:
        """Create a project. `project_id`: None: a random one.

        Raises ConflictError for one that exists.
        """
        row = {
            "id": project_id or new_id(PREFIX),
            "organization": organization,
            "name": name,
            "created_at": database_time(),
        }
        with self._database.writing() as connection:
            connection.execute(
                insert(projects).values(row | _limit_values(limits or TenantLimits()))
            )
            record(
                connection,
                row["id"],
                "project.created",
                row["id"],
                name=name,
                **_set_limits(limits or TenantLimits()),
            )
            return _get(connection, row["id"])

    def get_project(self, project_id: str) -> Project:
        with self._database.reading() as connection:
            return _get(connection, project_id)

    def list_projects(
        self,
        *,
        organization: str | None = None,
        archived: bool = False,
        deleted: bool = False,
        after: str | None = None,
        limit: int = 20,
    ) -> Page[Project]:
        """Projects in order of creation.

        `organization`: None: of all organizations. `archived`: include archived ones; `deleted`:
        and deleted ones of which something is left.
        """
        mine = [projects.c.organization == organization] if organization else []
        query: Select[Any] = (
            select(*_PROJECT).where(*mine).order_by(projects.c.created_at, projects.c.id)
        )
        if not archived:
            query = query.where(projects.c.archived_at.is_(None))
        query = query.where(projects.c.erased_at.is_(None) if deleted else THERE)
        with self._database.reading() as connection:
            if after is not None:
                there = connection.execute(
                    select(projects.c.created_at).where(projects.c.id == after, *mine)
                ).one_or_none()
                if there is None:
                    raise SpecError(
                        f"after = {after!r}: this list has no such item.", param="after"
                    )
                behind = (projects.c.created_at > there.created_at) | (
                    (projects.c.created_at == there.created_at) & (projects.c.id > after)
                )
                query = query.where(behind)
            return page(connection, query, limit, _project)

    def update_project(
        self, project_id: str, *, name: str | None = None, limits: dict[str, Any] | None = None
    ) -> Project:
        """Change a project. `limits`: those that change; None as a value removes a limit."""
        with self._database.writing() as connection:
            old = _get(connection, project_id, lock=True)
            new = replace(old.limits, **(limits or {}))
            values: dict[str, Any] = _limit_values(new)
            if name is not None:
                values["name"] = name
            before = {"name": old.name, **vars(old.limits)}
            asked = {**({"name": name} if name is not None else {}), **(limits or {})}
            changed = {what: value for what, value in asked.items() if before[what] != value}
            if changed:
                mine = update(projects).where(projects.c.id == project_id)
                connection.execute(mine.values(**values))
                record(connection, project_id, "project.updated", project_id, **changed)
            return _get(connection, project_id)

    def limited_by_bytes(self) -> list[str]:
        """Ids of the projects that have a limit of bytes."""
        query = select(*_PROJECT).where(
            projects.c.archived_at.is_(None), projects.c.limits.is_not(None)
        )
        with self._database.reading() as connection:
            found = [_project(row) for row in connection.execute(query).mappings()]
        return [project.id for project in found if project.limits.max_bytes is not None]

    def note_model_bytes(self, project_id: str, held: int) -> None:
        """Note the bytes of the commands and saved weights of a project's models, as they were
        counted.
        """
        with self._database.writing() as connection:
            connection.execute(
                update(projects).where(projects.c.id == project_id).values(model_bytes=held)
            )

    def add_model_bytes(self, project_id: str, more: int) -> None:
        """Count bytes of a command that is to be stored, until they are counted with all others.

        Raises LimitError if the project may not keep them.
        """
        with self._database.writing() as connection:
            refuse_bytes_beyond(connection, project_id, more, what="The call has")
            own = update(projects).where(projects.c.id == project_id)
            connection.execute(own.values(model_bytes=projects.c.model_bytes + more))

    def archive_project(self, project_id: str) -> Project:
        """Make a project's keys invalid; its data stay. Repeating it changes nothing."""
        if project_id == MANAGING_PROJECT:
            raise SpecError(
                f"{project_id}: the project that manages the others cannot be archived.",
                param="project_id",
            )
        with self._database.writing() as connection:
            if _get(connection, project_id, lock=True).archived_at is None:
                connection.execute(
                    update(projects)
                    .where(projects.c.id == project_id)
                    .values(archived_at=database_time())
                )
                record(connection, project_id, "project.archived", project_id)
            return _get(connection, project_id)


def limits_of(max_slots: int | None, limits: dict[str, Any] | None) -> TenantLimits:
    """Limits from a row. Limits that a newer version has added are left out."""
    known = {field.name for field in fields(TenantLimits)}
    values: dict[str, Any] = {
        name: value for name, value in (limits or {}).items() if name in known
    }
    for name in ("bases", "wandb_entities"):
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return TenantLimits(**{**values, "max_slots": max_slots})


def lock_project(connection: Connection, project_id: str) -> dict[str, Any]:
    """Lock a project's row until the end of the transaction.

    Returns its limits that are set, but for max_slots. Raises NotFoundError if it was deleted.
    """
    query = (
        select(projects.c.limits).where(projects.c.id == project_id).with_for_update(key_share=True)
    )
    limits = connection.scalars(query).one_or_none() or {}
    refuse_deleted(connection, project_id)
    return limits


def refuse_deleted(connection: Connection, project_id: str) -> None:
    """Raise NotFoundError for a deleted project: what is stored for it now would be left behind."""
    if (
        connection.scalars(
            select(projects.c.id).where(projects.c.id == project_id, ~THERE)
        ).one_or_none()
        is not None
    ):
        raise not_found("project", project_id)


def refuse_bytes_beyond(
    connection: Connection,
    project_id: str,
    more: int,
    *,
    of_upload: str = "",
    what: str = "The file has",
) -> None:
    """Raise LimitError if the project would keep more bytes than it may, with those that its open
    uploads have announced. The project's row is locked meanwhile. `of_upload`: the upload that the
    bytes are of. `what`: beginning of the message.
    """
    limit = lock_project(connection, project_id).get("max_bytes")
    if limit is None:
        return
    held = _kept_bytes(connection, project_id)
    pending = _announced(connection, project_id, of_upload)
    if held + pending + more > limit:
        announced = f", has announced {pending} in uploads" if pending else ""
        raise LimitError(
            f"{what} {more} bytes; this project keeps {held}{announced} and may keep {limit} (its "
            "limit max_bytes). "
            "Delete files or saved weights that are not needed any more, or ask an administrator "
            "for more.",
            code="storage_limit",
        )


def _announced(connection: Connection, project_id: str, besides: str) -> int:
    """Bytes that the open uploads of a project, besides one, have announced."""
    query = select(func.coalesce(func.sum(uploads.c.bytes), 0))
    return int(
        connection.scalars(
            query.where(uploads.c.project_id == project_id, uploads.c.id != besides, OPEN_UPLOAD)
        ).one()
    )


def _kept_bytes(connection: Connection, project_id: str) -> int:
    """Bytes of files that are kept: also of expired ones until they are removed, and of deleted
    ones that a job still needs; of what Tinker's clients keep, and of
    evals.
    """
    kept = files.c.freed_at.is_(None), or_(VISIBLE, referred_to())
    sums = [
        select(func.sum(files.c.bytes)).where(files.c.project_id == project_id, *kept),
        select(func.sum(tinker_sessions.c.bytes)).where(tinker_sessions.c.project_id == project_id),
        select(func.sum(evals.c.bytes)).where(evals.c.project_id == project_id),
        select(func.sum(eval_runs.c.bytes)).where(eval_runs.c.project_id == project_id),
        select(func.count() * TINKER_ROW_BYTES).where(tinker_samplers.c.project_id == project_id),
        select(projects.c.model_bytes).where(projects.c.id == project_id),
    ]
    return sum(int(connection.scalars(query).one_or_none() or 0) for query in sums)


def _get(connection: Connection, project_id: str, *, lock: bool = False) -> Project:
    query = select(*_PROJECT).where(projects.c.id == project_id, THERE)
    row = (
        connection.execute(query.with_for_update(key_share=True) if lock else query)
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise not_found("project", project_id)
    return _project(row)


def _project(row: RowMapping) -> Project:
    return Project(
        id=row["id"],
        organization=row["organization"],
        name=row["name"] or row["id"],
        created_at=row["created_at"],
        archived_at=row["archived_at"],
        deleted_at=row["deleted_at"],
        limits=limits_of(row["max_slots"], row["limits"]),
    )


def _limit_values(limits: TenantLimits) -> dict[str, Any]:
    values = _set_limits(limits)
    return {"max_slots": values.pop("max_slots", None), "limits": values}


def _set_limits(limits: TenantLimits) -> dict[str, Any]:
    """Limits by name, without those that are None."""
    return {name: value for name, value in vars(limits).items() if value is not None}
