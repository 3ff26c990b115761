"""The store on SQLite or PostgreSQL: one set of statements for both."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from ft_service.errors import UnavailableError
from ft_service.store.database import Database
from ft_service.store.files import FileStore
from ft_service.store.fleet.hosts import HostStore
from ft_service.store.fleet.statistics import StatisticsStore
from ft_service.store.integrations import IntegrationStore
from ft_service.store.jobs import JobStore
from ft_service.store.leases import LeaseStore
from ft_service.store.models import ModelStore
from ft_service.store.queue import QueueStore
from ft_service.store.sweeps.store import SweepStore
from ft_service.store.tenants.audit import AuditStore
from ft_service.store.tenants.keys import KeyStore, SessionStore
from ft_service.store.tenants.projects import ProjectStore
from ft_service.store.tenants.rates import RateStore
from ft_service.store.tenants.usage import UsageStore
from ft_service.store.uploads import UploadStore
from ft_service.store.webhooks import WebhookStore

log = logging.getLogger(__name__)

MIGRATION_LOCK = 7_316_004_150
"""Any number that no other application uses as an advisory lock in the same PostgreSQL database."""


class Store(
    ProjectStore,
    KeyStore,
    SessionStore,
    AuditStore,
    UsageStore,
    RateStore,
    FileStore,
    UploadStore,
    ModelStore,
    WebhookStore,
    IntegrationStore,
    JobStore,
    SweepStore,
    LeaseStore,
    QueueStore,
    HostStore,
    StatisticsStore,
):
    """Everything that the service keeps. Safe to share between threads. Forking with open connections is not: make one after
    the fork.

    Methods raise NotFoundError for a row that is not there, or is another project's, and UnavailableError if the database is
    away. Every read by a user names the project: another project's row does not exist for them.
    """

    def check(self) -> None:
        """Raise UnavailableError unless the database answers and its schema is this version's, or a newer one's: that only adds
        to it what this version can live with."""
        with self.reading() as connection:
            found = MigrationContext.configure(connection).get_current_heads()
        wanted = _newest_revisions()
        if found != wanted and not _is_newer(found):
            raise UnavailableError(
                f"The database has schema {_named(found)}, and this version of the service needs {_named(wanted)}. Bring it up "
                "to date: ft migrate"
            )


def open_store(url: str) -> Store:
    """A store on a database URL (see Settings.database_url). Nothing is connected or created yet; `check()` does the former."""
    return Store(url)


def migrate(url: str) -> None:
    """Bring a database to this version's schema; without effect if it has that or a newer one. Several may try at once: one
    does it, and the others wait for that. Whoever is killed in the middle leaves the schema as it was."""
    database = Database(url)
    try:
        with database.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
            if _is_newer(MigrationContext.configure(connection).get_current_heads()):
                log.warning("the database has the schema of a newer version of the service; it stays as it is")
                return
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        database.close()


def _config() -> Config:
    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


@cache
def _newest_revisions() -> tuple[str, ...]:
    return tuple(ScriptDirectory.from_config(_config()).get_heads())


@cache
def _known_revisions() -> frozenset[str]:
    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _is_newer(found: tuple[str, ...]) -> bool:
    """Whether a later release has made the schema. While one is rolled out, or taken back, older processes start on it too."""
    return bool(set(found) - _known_revisions())


def _named(revisions: tuple[str, ...]) -> str:
    return " and ".join(revisions) or "none"
