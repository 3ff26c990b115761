"""The store on SQLite or PostgreSQL, its schema and its migrations."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, case, func, select, text

from ft_service.errors import UnavailableError
from ft_service.settings import Settings
from ft_service.store.chats import ChatStore
from ft_service.store.database import Database, DatabaseLimits, database_time
from ft_service.store.engines import EngineStore
from ft_service.store.erasure import ErasureStore
from ft_service.store.evals import EvalStore
from ft_service.store.files import FileStore
from ft_service.store.integrations import IntegrationStore
from ft_service.store.jobs import JobStore
from ft_service.store.leases import LeaseStore
from ft_service.store.models import ModelStore
from ft_service.store.queue import QueueStore
from ft_service.store.records import ProjectStatistics, ServiceStatistics
from ft_service.store.sweeps import SweepStore
from ft_service.store.tables import (
    LIVE,
    NEEDS_ATTENTION,
    QUEUED,
    SEATED,
    UNFINISHED,
    UNSENT,
    engines,
    files,
    jobs,
    slots,
    webhook_deliveries,
)
from ft_service.store.tenants.audit import AuditStore
from ft_service.store.tenants.audit_stream import STDOUT, AuditStream
from ft_service.store.tenants.keys import KeyStore, SessionStore
from ft_service.store.tenants.people import PeopleStore
from ft_service.store.tenants.projects import ProjectStore
from ft_service.store.tenants.request_buckets import BucketStore
from ft_service.store.tenants.usage import UsageStore
from ft_service.store.tinker import TinkerStore
from ft_service.store.uploads import UploadStore
from ft_service.store.webhooks import WebhookStore

log = logging.getLogger(__name__)

MIGRATION_LOCK = 7_316_004_150
"""Any number that no other application uses as an advisory lock in the same PostgreSQL database."""
MIGRATION_SECONDS = 3600.0
"""How long a statement of a migration may take, and how long one waits for another process's, or
for tables in use.
"""
TABLE_LOCK_SECONDS = 5.0
"""How long a migration waits for a table that a transaction uses; everybody else waits behind it.

Then it begins again.
"""
_TRY_AGAIN_SECONDS = 5.0


class Store(Database):
    """All records of the service. Safe to share between threads, but not across a fork.

    Methods raise NotFoundError for a row that does not exist or belongs to another project, and
    UnavailableError if the database does not answer. Every read by a user names the project.
    """

    def __init__(self, url: str, limits: DatabaseLimits | None = None) -> None:
        """Connects on first use. Raises SpecError if the URL is not one of the two databases'."""
        super().__init__(url, limits)
        self.projects = ProjectStore(self)
        self.keys = KeyStore(self)
        self.sessions = SessionStore(self)
        self.people = PeopleStore(self)
        self.audit = AuditStore(self)
        self.usage = UsageStore(self)
        self.request_buckets = BucketStore(self)
        self.files = FileStore(self)
        self.uploads = UploadStore(self)
        self.models = ModelStore(self)
        self.webhooks = WebhookStore(self)
        self.integrations = IntegrationStore(self)
        self.jobs = JobStore(self)
        self.sweeps = SweepStore(self)
        self.leases = LeaseStore(self)
        self.engines = EngineStore(self)
        self.queue = QueueStore(self)
        self.tinker = TinkerStore(self)
        self.chats = ChatStore(self)
        self.evals = EvalStore(self)
        self.erasure = ErasureStore(self)

    def close(self) -> None:
        self.keys.close()
        super().close()

    def keep_rules(self, settings: Settings, *, is_command: bool = False) -> None:
        """Hold keys to FT_MAX_KEY_DAYS and FT_OIDC_KEY_DAYS, and write the audit log to
        FT_AUDIT_LOG too.

        `is_command`: of the command line, whose standard output is its answer. Raises SpecError if
        FT_AUDIT_LOG cannot be written.
        """
        self.keys.max_days = settings.max_key_days
        self.keys.person_days = self.people.key_days = settings.oidc_key_days
        if settings.audit_log and not (is_command and settings.audit_log == STDOUT):
            self.audited = AuditStream(settings.audit_log)

    def statistics(self) -> ServiceStatistics:
        """Numbers over all projects, each from one statement that an index answers."""
        by_state = select(jobs.c.state, func.coalesce(jobs.c.reason, ""), func.count()).group_by(
            jobs.c.reason, jobs.c.state
        )
        by_host = select(slots.c.host, func.count()).group_by(slots.c.host)
        waiting = select(database_time() - func.min(jobs.c.queued_at)).where(QUEUED)
        overdue = select(database_time() - func.min(jobs.c.looked_at)).where(
            NEEDS_ATTENTION, jobs.c.looked_at > 0
        )
        live = select(func.count()).select_from(engines).where(LIVE)
        seats = select(func.count()).where(SEATED)
        kept = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.freed_at.is_(None))
        unsent = select(func.count()).select_from(webhook_deliveries).where(UNSENT)
        of_projects = (
            select(
                jobs.c.project_id,
                jobs.c.state,
                func.count(),
                database_time() - func.min(case((QUEUED, jobs.c.queued_at))),
            )
            .where(UNFINISHED)
            .group_by(jobs.c.project_id, jobs.c.state)
        )
        by_project = select(slots.c.project_id, func.count()).group_by(slots.c.project_id)
        with self.reading() as connection:
            return ServiceStatistics(
                jobs={
                    (state, reason): count for state, reason, count in connection.execute(by_state)
                },
                oldest_queued_seconds=max(0.0, connection.scalars(waiting).one() or 0.0),
                overdue_seconds=max(0.0, connection.scalars(overdue).one() or 0.0),
                slots_in_use={row[0]: row[1] for row in connection.execute(by_host)},
                engines=connection.scalars(live).one(),
                seats=connection.scalars(seats.select_from(jobs)).one(),
                file_bytes=int(connection.scalars(kept).one()),
                webhooks_waiting=connection.scalars(unsent).one(),
                projects=_projects(
                    connection.execute(of_projects).all(),
                    {row[0]: row[1] for row in connection.execute(by_project)},
                ),
            )

    def check(self) -> None:
        """Raise UnavailableError unless the database answers and has the schema of this version or
        a newer one, which only adds to it.
        """
        with self.reading() as connection:
            heads = MigrationContext.configure(connection).get_current_heads()
        wanted = _newest_revisions()
        if heads != wanted and not _is_newer(heads):
            raise UnavailableError(
                f"The database has schema {_named(heads)}, and this version of the service needs "
                f"{_named(wanted)}. Bring it up "
                "to date: ft migrate"
            )


def _projects(
    rows: Iterable[Sequence[Any]], held: Mapping[str, int]
) -> dict[str, ProjectStatistics]:
    """Return the numbers of projects. `rows`: (project, state, jobs, age of the oldest one that is
    queued). `held`: project → slots.
    """
    states: dict[str, dict[str, int]] = {project: {} for project in held}
    oldest: dict[str, float] = {}
    for project, state, count, age in rows:
        states.setdefault(project, {})[state] = count
        oldest[project] = max(oldest.get(project, 0.0), age or 0.0)
    return {
        project: ProjectStatistics(
            jobs=counted,
            oldest_queued_seconds=oldest.get(project, 0.0),
            slots=held.get(project, 0),
        )
        for project, counted in states.items()
    }


def open_store(url: str, limits: DatabaseLimits | None = None) -> Store:
    """A store on a database URL (see Settings.database_url).

    It connects on first use. `limits`: None: the defaults.
    """
    return Store(url, limits)


def migrate(url: str) -> None:
    """Bring a database to this version's schema; without effect if it has that or a newer one.

    Of several processes one does it while the others wait. A process killed half-way leaves the
    schema unchanged. Raises UnavailableError if the database does not answer, or its tables are in
    use for MIGRATION_SECONDS.
    """
    limits = DatabaseLimits(statement_seconds=MIGRATION_SECONDS, lock_seconds=MIGRATION_SECONDS)
    database = Database(url, limits)
    ends = time.monotonic() + MIGRATION_SECONDS
    try:
        while True:
            try:
                with database.writing() as connection:
                    _upgrade(connection)
                return
            except UnavailableError as error:
                if (
                    not database.is_shared
                    or error.code != "database_locked"
                    or time.monotonic() > ends
                ):
                    raise
                log.warning(
                    "the migration waits for a table that a transaction uses: %s", error.message
                )
            time.sleep(_TRY_AGAIN_SECONDS)
    finally:
        database.close()


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        connection.execute(text(f"SET LOCAL lock_timeout = {round(1000 * TABLE_LOCK_SECONDS)}"))
    if _is_newer(MigrationContext.configure(connection).get_current_heads()):
        log.warning(
            "the database has the schema of a newer version of the service; it stays as it is"
        )
        return
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def alembic_config() -> Config:
    """Alembic's configuration, with the folder of the revisions."""
    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


@cache
def _newest_revisions() -> tuple[str, ...]:
    return tuple(ScriptDirectory.from_config(alembic_config()).get_heads())


@cache
def _known_revisions() -> frozenset[str]:
    return frozenset(
        script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()
    )


def _is_newer(found: tuple[str, ...]) -> bool:
    """Whether a later release made the schema.

    During a roll-out or a roll-back, older processes start on it too.
    """
    return bool(set(found) - _known_revisions())


def _named(revisions: tuple[str, ...]) -> str:
    return " and ".join(revisions) or "none"
