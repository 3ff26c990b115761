"""Projects: the tenants of a service, each with keys, limits and use of its own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, func, insert, select, update

from ft_service.errors import LimitError, SpecError
from ft_service.ids import new_id
from ft_service.store.database import Database, database_time, upsert
from ft_service.store.records import Limits, Page, Project
from ft_service.store.rows import not_found, page
from ft_service.store.tables import VISIBLE, files, projects
from ft_service.store.tenants.audit import record

MANAGING_PROJECT = "default"
"""The project that a service begins with. Its admin keys manage the other projects of its organisation."""

_PROJECT = [projects.c[name] for name in ("id", "organization", "name", "created_at", "archived_at", "max_slots", "limits")]


class ProjectStore(Database):
    """Projects and their limits."""

    def ensure_project(self, project_id: str, organization: str) -> None:
        """Create a project, or give it this organization's name."""
        row = {"id": project_id, "organization": organization, "created_at": database_time()}
        with self.writing() as connection:
            statement = upsert(connection, projects).values(row)
            connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_={"organization": organization}))

    def create_project(self, *, name: str, organization: str, limits: Limits | None = None) -> Project:
        row = {"id": new_id("proj_"), "organization": organization, "name": name, "created_at": database_time()}
        with self.writing() as connection:
            connection.execute(insert(projects).values(row | _limit_values(limits or Limits())))
            record(connection, row["id"], "project.created", row["id"], name=name, **_shown(limits or Limits()))
            return _get(connection, row["id"])

    def get_project(self, project_id: str) -> Project:
        with self.reading() as connection:
            return _get(connection, project_id)

    def list_projects(
        self, *, organization: str | None = None, archived: bool = False, after: str | None = None, limit: int = 20
    ) -> Page[Project]:
        """By creation. `organization`: of this one; None: of all. `archived`: those too."""
        mine = [projects.c.organization == organization] if organization else []
        query: Select[Any] = select(*_PROJECT).where(*mine).order_by(projects.c.created_at, projects.c.id)
        if not archived:
            query = query.where(projects.c.archived_at.is_(None))
        with self.reading() as connection:
            if after is not None:
                there = connection.execute(select(projects.c.created_at).where(projects.c.id == after, *mine)).one_or_none()
                if there is None:
                    raise SpecError(f"after = {after!r}: this list has no such item.", param="after")
                behind = (projects.c.created_at > there.created_at) | (
                    (projects.c.created_at == there.created_at) & (projects.c.id > after)
                )
                query = query.where(behind)
            return page(connection, query, limit, _project)

    def update_project(self, project_id: str, *, name: str | None = None, limits: dict[str, Any] | None = None) -> Project:
        """Change a project. `limits`: those that change; a value of None takes a limit away."""
        with self.writing() as connection:
            old = _get(connection, project_id, lock=True)
            new = replace(old.limits, **(limits or {}))
            values: dict[str, Any] = _limit_values(new)
            if name is not None:
                values["name"] = name
            connection.execute(update(projects).where(projects.c.id == project_id).values(**values))
            changed = {**({"name": name} if name is not None else {}), **(limits or {})}
            record(connection, project_id, "project.updated", project_id, **changed)
            return _get(connection, project_id)

    def archive_project(self, project_id: str) -> Project:
        """From now on its keys open nothing; what it has stays. Repeating it changes nothing."""
        if project_id == MANAGING_PROJECT:
            raise SpecError(f"{project_id}: the project that manages the others cannot be archived.", param="project_id")
        with self.writing() as connection:
            if _get(connection, project_id, lock=True).archived_at is None:
                connection.execute(update(projects).where(projects.c.id == project_id).values(archived_at=database_time()))
                record(connection, project_id, "project.archived", project_id)
            return _get(connection, project_id)


def limits_of(max_slots: int | None, limits: dict[str, Any] | None) -> Limits:
    """Limits from a row. Those that a newer version has added are left out."""
    known = {field.name for field in fields(Limits)}
    values: dict[str, Any] = {name: value for name, value in (limits or {}).items() if name in known}
    for name in ("bases", "wandb_entities"):
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return Limits(**{**values, "max_slots": max_slots})


def refuse_bytes_beyond(connection: Connection, project_id: str, more: int) -> None:
    """Raise LimitError if the project would keep more bytes of files than it may. The project's row is locked meanwhile."""
    query = select(projects.c.limits).where(projects.c.id == project_id).with_for_update(key_share=True)
    limit = (connection.scalars(query).one_or_none() or {}).get("max_bytes")
    if limit is None:
        return
    kept = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.project_id == project_id, VISIBLE)
    held = int(connection.scalars(kept).one())
    if held + more > limit:
        raise LimitError(
            f"The file has {more} bytes; this project keeps {held} and may keep {limit} (its limit max_bytes). Delete files "
            "that are not needed any more, or ask an administrator for more.",
            code="storage_limit",
        )


def _get(connection: Connection, project_id: str, *, lock: bool = False) -> Project:
    query = select(*_PROJECT).where(projects.c.id == project_id)
    row = connection.execute(query.with_for_update(key_share=True) if lock else query).mappings().one_or_none()
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
        limits=limits_of(row["max_slots"], row["limits"]),
    )


def _limit_values(limits: Limits) -> dict[str, Any]:
    values = {field.name: getattr(limits, field.name) for field in fields(Limits)}
    max_slots = values.pop("max_slots")
    return {"max_slots": max_slots, "limits": {name: value for name, value in values.items() if value is not None}}


def _shown(limits: Limits) -> dict[str, Any]:
    values = {field.name: getattr(limits, field.name) for field in fields(Limits)}
    return {name: value for name, value in values.items() if value is not None}
