"""Deleted tuned models, and permissions of other projects to use one."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, exists, select

from ft_service.errors import SpecError
from ft_service.ids import new_id
from ft_service.jobs.states import State
from ft_service.store.database import StorePart, database_time, upsert
from ft_service.store.records import Order, Page, Permission
from ft_service.store.rows import Listing, columns_of, not_found, page
from ft_service.store.tables import deleted_models, jobs, permissions, projects
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import THERE

PERMISSION = columns_of(Permission, permissions)


class ModelStore(StorePart):
    """Deleted models and permissions."""

    def delete_model(self, project_id: str, model: str) -> None:
        """Hide a tuned model, or a checkpoint of one. Repeating it changes nothing."""
        row = {"model": model, "project_id": project_id, "deleted_at": database_time()}
        with self._database.writing(makes_room=True) as connection:
            statement = upsert(connection, deleted_models).values(row).on_conflict_do_nothing()
            if connection.scalars(statement.returning(deleted_models.c.model)).all():
                record(connection, project_id, "model.deleted", model)

    def is_deleted(self, model: str) -> bool:
        with self._database.reading() as connection:
            return connection.scalars(select(exists().where(deleted_models.c.model == model))).one()

    def deleted_models(self, project_id: str) -> set[str]:
        with self._database.reading() as connection:
            return set(
                connection.scalars(
                    select(deleted_models.c.model).where(deleted_models.c.project_id == project_id)
                )
            )

    def succeeded_jobs(self) -> list[tuple[str, str]]:
        """Project and id of every job that has succeeded, oldest first; not of deleted ones."""
        query = select(jobs.c.project_id, jobs.c.id).where(
            jobs.c.state == State.SUCCEEDED.value, jobs.c.deleted_at.is_(None)
        )
        with self._database.reading() as connection:
            return [
                (project, job)
                for project, job in connection.execute(query.order_by(jobs.c.position))
            ]

    def all_deleted_models(self) -> set[str]:
        with self._database.reading() as connection:
            return set(connection.scalars(select(deleted_models.c.model)))

    def deleted_after(self, model: str, limit: int) -> list[str]:
        """Names of deleted models of all projects in their order, from the one after `model`."""
        query = (
            select(deleted_models.c.model)
            .where(deleted_models.c.model > model)
            .order_by(deleted_models.c.model)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(query.limit(limit)))

    def grant(self, project_id: str, model: str, grantees: Sequence[str]) -> list[Permission]:
        """Let projects use a model, in their order; one that may already is answered as it is.

        All or none are granted.

        Raises SpecError naming the first project that there is not in this organization: of others
        nothing is said.
        """
        organization = (
            select(projects.c.organization).where(projects.c.id == project_id).scalar_subquery()
        )
        near = select(projects.c.id).where(
            projects.c.id.in_(grantees), projects.c.organization == organization, THERE
        )
        with self._database.writing() as connection:
            known = set(connection.scalars(near))
            added: list[str] = []
            for number, grantee in enumerate(grantees):
                if grantee not in known:
                    place = f"project_ids.{number}"
                    raise SpecError(
                        f"{place} = {grantee[:80]!r}: there is no such project in this "
                        "organization.",
                        param=place,
                    )
                row = {
                    "id": new_id("cp_"),
                    "project_id": project_id,
                    "model": model,
                    "grantee": grantee,
                }
                statement = upsert(connection, permissions).values(
                    {**row, "created_at": database_time()}
                )
                new = statement.on_conflict_do_nothing().returning(permissions.c.grantee)
                added += connection.scalars(new)
            if added:
                record(connection, project_id, "permission.created", model, project_ids=added)
            query = select(*PERMISSION).where(
                permissions.c.model == model, permissions.c.grantee.in_(grantees)
            )
            found = {
                row["grantee"]: Permission(**row) for row in connection.execute(query).mappings()
            }
        return [found[grantee] for grantee in dict.fromkeys(grantees)]

    def list_permissions(
        self,
        project_id: str,
        model: str,
        *,
        after: str | None = None,
        limit: int = 10,
        order: Order = "desc",
        grantee: str | None = None,
    ) -> Page[Permission]:
        """Permissions of a model in order of creation. `grantee`: only this project's."""
        mine = (permissions.c.project_id == project_id, permissions.c.model == model)
        query = select(*PERMISSION).where(*mine)
        if grantee is not None:
            query = query.where(permissions.c.grantee == grantee)
        with self._database.reading() as connection:
            query = Listing(permissions.c.position, permissions.c.id, mine, order == "desc").apply(
                connection, query, after
            )
            return page(connection, query, limit, lambda row: Permission(**row))

    def revoke(self, project_id: str, model: str, permission_id: str) -> None:
        """Delete a permission."""
        mine = (
            permissions.c.project_id == project_id,
            permissions.c.model == model,
            permissions.c.id == permission_id,
        )
        with self._database.writing() as connection:
            if connection.execute(delete(permissions).where(*mine)).rowcount == 0:
                raise not_found("permission", permission_id)
            record(connection, project_id, "permission.deleted", permission_id)

    def granted(self, grantee: str, model: str | None = None) -> list[Permission]:
        """Permissions that other projects of its organization give to this one, newest first.

        `model`: only for this model.
        """
        owner = projects.alias()
        own = projects.alias()
        query = (
            select(*PERMISSION)
            .where(permissions.c.grantee == grantee)
            .order_by(permissions.c.position.desc())
        )
        query = query.join(owner, owner.c.id == permissions.c.project_id).join(
            own, own.c.id == permissions.c.grantee
        )
        query = query.where(owner.c.organization == own.c.organization)
        if model is not None:
            query = query.where(permissions.c.model == model)
        with self._database.reading() as connection:
            return [Permission(**row) for row in connection.execute(query).mappings()]
