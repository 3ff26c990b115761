"""Connections, transactions, the database's clock and the values that it can hold: what every part of the store stands on.

SQLite and PostgreSQL differ here and nowhere else: how a connection is set up, how a write begins, how the time is spelled,
which text is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    URL,
    ColumnElement,
    Connection,
    Dialect,
    Double,
    Engine,
    Insert,
    Select,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
    literal_column,
    make_url,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from ft_service.errors import ConflictError, SpecError, UnavailableError
from ft_service.host.disks import Reserve, state_of
from ft_service.host.home import create_home, create_private_file
from ft_service.store.faults import DATABASE_DISK, fault_of

log = logging.getLogger(__name__)

BUSY_SECONDS = 10
"""How long a write waits for another one on SQLite, and a connection attempt for PostgreSQL."""


CHECK_SECONDS = 5.0
"""How old the last write may be that says whether the database can be written."""


class database_time(FunctionElement[float]):
    """Seconds since the epoch on the database's clock, at the moment the statement runs."""

    type = Double()
    inherit_cache = True


@compiles(database_time, "sqlite")
def _sqlite_time(element: database_time, compiler: Any, **kw: Any) -> str:
    # unixepoch('subsec') says it shorter, from SQLite 3.42 on; Debian 12 has 3.40.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_time, "postgresql")
def _postgresql_time(element: database_time, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


def is_over(moment: ColumnElement[float], longest: float | ColumnElement[float]) -> ColumnElement[bool]:
    """Whether a moment until which something waits has come. `longest`: seconds that it may be off at most: what is further off
    was written before the clock went back, and is over too, or it would wait for as long as the clock went back."""
    # In the statement's text: a statement that goes to the driver as it is (`Direct`) has no values but those that it names.
    ahead = literal_column(f"{longest:.1f}", Double) if isinstance(longest, float) else longest
    return or_(moment <= database_time(), moment > database_time() + ahead)


UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that PostgreSQL keeps in no text: NUL and half surrogate pairs."""
_SUSPECT = re.compile(r"\\u0000|\\u[dD][89a-fA-F]|NaN|Infinity")


def storable(value: Any) -> Any:
    """A JSON value as both databases can hold it: no NUL, no lone surrogate, no NaN or infinity.

    What a worker prints or a client sends may hold any of them, and a job must not become unwritable over it.
    """
    return storable_json(value)[0]


def storable_json(value: Any) -> tuple[Any, str]:
    """`storable` and what it is in JSON."""
    # One look at the whole as JSON, which escapes what must not be in it, is faster than one at each of its strings.
    text = json.dumps(value)
    if _SUSPECT.search(text):
        value = _without_unstorable(value)
        text = json.dumps(value)
    return value, text


def storable_text(value: str) -> str:
    return _without_unstorable(value) if UNSTORABLE.search(value) else value


def _without_unstorable(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {_without_unstorable(key): _without_unstorable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_without_unstorable(inner) for inner in value]
        case _:
            return value


class StorableText(TypeDecorator[str]):
    """Text without what PostgreSQL refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return storable_text(value) if value else value


class StorableJson(TypeDecorator[Any]):
    """JSON; None is NULL."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return storable(value) if value else value

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self.impl_instance.coerce_compared_value(op, value)


class Database:
    """An engine and the two ways to use it. Errors of the driver leave it as this service's own."""

    def __init__(self, url: str) -> None:
        """Connects on first use. Raises SpecError if the URL is not one of the two databases'."""
        parsed = _parse(url)
        self._engine = _create_engine(parsed)
        self._file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
        self._reserve = None if self._file is None else Reserve(self._file.with_name(f"{self._file.name}-reserve"))
        self._last_write: _Write | None = None
        self._checking = threading.Lock()
        self.stirred = threading.Event()
        """Set when this process has written something that whoever moves jobs should look at now; they clear it."""
        # SQLite's own wait for another writer is a sleep that grows, and of many who sleep so one may wait for seconds.
        self._turn: AbstractContextManager[Any] = (
            threading.Lock() if self._engine.dialect.name == "sqlite" else contextlib.nullcontext()
        )

    @property
    def is_shared(self) -> bool:
        """Whether processes of several hosts may use it."""
        return self._engine.dialect.name == "postgresql"

    def now(self) -> float:
        with self.reading() as connection:
            return connection.scalars(select(database_time())).one()

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent look at the database on SQLite; on PostgreSQL every statement sees what is committed by then."""
        with self._our_errors(), self._begun("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, makes_room: bool = False) -> Iterator[Connection]:
        """A transaction, committed at the end, undone by any exception. On SQLite it excludes other writers: be quick.

        `makes_room`: somebody deletes, or ends what fills the disk: on a full one it gets the room of the reserve.
        """
        if makes_room and self._reserve is not None:
            self._reserve.give_up_if_full()
        # A transaction that reads first and writes later can fail half-way; one that takes the write lock at once waits.
        with self._turn, self._our_errors(write=True), self._begun("BEGIN IMMEDIATE") as connection:
            yield connection

    def keep_reserve(self) -> None:
        """Keep a little room on the disk of an SQLite database, so that things can be deleted once it is full."""
        if self._reserve is not None:
            self._reserve.keep()

    def check_writable(self) -> None:
        """Raise UnavailableError, which says why, while nothing can be written. Another write of the last CHECK_SECONDS is
        taken for granted; without one a row is written as it is. A full disk is seen by its room: where SQLite's log has room
        of its own, a small write still succeeds."""
        with self._checking:
            if self._file is not None and (fault := state_of(self._file.parent, DATABASE_DISK)) is not None:
                raise fault
            if self._last_write is None or time.monotonic() - self._last_write.at > CHECK_SECONDS:
                with contextlib.suppress(UnavailableError), self.writing() as connection:
                    connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")
            if self._last_write is not None and self._last_write.fault is not None:
                raise self._last_write.fault

    @contextlib.contextmanager
    def driving(self, *, write: bool) -> Iterator[Driver]:
        """The same without SQLAlchemy between statements (`Direct`) and driver: it takes longer than the database, and some
        requests wait for nothing else."""
        with self._turn if write else contextlib.nullcontext(), self._our_errors(write=write):
            connection = self._engine.raw_connection()
            try:
                cursor = connection.cursor()
                if write and self._engine.dialect.name == "sqlite":
                    cursor.execute("BEGIN IMMEDIATE")
                yield Driver(cursor, self._engine.dialect)
                cursor.close()
                connection.commit()
            finally:
                connection.close()  # back to the pool, which undoes what was not committed

    @contextlib.contextmanager
    def _begun(self, sqlite_begin: str) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            if connection.dialect.name == "sqlite":  # whose driver is told to begin none of its own
                connection.exec_driver_sql(sqlite_begin)
            yield connection

    @contextlib.contextmanager
    def _our_errors(self, *, write: bool = False) -> Iterator[None]:
        """Errors of the driver, which may come unwrapped, as ours. `write`: remember whether it could be done."""
        dbapi = self._engine.dialect.loaded_dbapi
        try:
            yield
        except (IntegrityError, dbapi.IntegrityError) as error:
            log.info("database refused a write: %s", error.orig if isinstance(error, DBAPIError) else error)
            raise ConflictError("Somebody else has stored this already, or removed what it refers to.") from error
        except (SQLAlchemyError, dbapi.Error) as error:
            log.warning("database: %s", error.orig if isinstance(error, DBAPIError) else error)
            fault = fault_of(error, self._file)
            if write:
                self._last_write = _Write(time.monotonic(), fault)
            raise fault from error
        if write:
            self._last_write = _Write(time.monotonic())


@dataclass(frozen=True)
class _Write:
    """What has become of a write."""

    at: float
    fault: UnavailableError | None = None


class Direct:
    """A statement whose text is made once, and whose values go to the driver as they are (`Database.driving`).

    Values must be what both drivers take: JSON as text, text that PostgreSQL keeps (`storable_text`). Rows are as the
    driver gives them.
    """

    def __init__(self, statement: Insert | Select[*tuple[Any, ...]], names: Collection[str] | None = None) -> None:
        """`names`: an INSERT's columns whose values are given; None: a SELECT, whose values are named in it."""
        self._statement = statement
        self._names = names and list(names)
        self._made: dict[str, tuple[str, Sequence[str] | None]] = {}

    def run(self, driver: Driver, values: Mapping[str, Any]) -> Sequence[Any]:
        """The statement with one set of values. Returns its rows."""
        text, order = self._text(driver.dialect)
        driver.cursor.execute(text, values if order is None else [values[name] for name in order])
        return driver.cursor.fetchall()

    def run_all(self, driver: Driver, many: Sequence[Mapping[str, Any]]) -> None:
        """The statement with one set of values after the other; it must return nothing."""
        text, order = self._text(driver.dialect)
        driver.cursor.executemany(text, many if order is None else [[values[name] for name in order] for values in many])

    def _text(self, dialect: Dialect) -> tuple[str, Sequence[str] | None]:
        """The statement in the driver's words, and the order of the values if they are given by place."""
        if (made := self._made.get(dialect.name)) is None:
            compiled = self._statement.compile(dialect=dialect, column_keys=self._names)
            assert isinstance(compiled, SQLCompiler)
            made = self._made[dialect.name] = (compiled.string, compiled.positiontup)
        return made


@dataclass(frozen=True)
class Driver:
    """A transaction as the database's driver sees it."""

    cursor: DBAPICursor
    dialect: Dialect


def upsert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise SpecError(
            "FT_DATABASE_URL is not a database URL. Use sqlite:////path/ft.db or postgresql+psycopg://user:password@host/name.",
            param="FT_DATABASE_URL",
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise SpecError(
            f"FT_DATABASE_URL begins with {parsed.drivername!r}; only sqlite and postgresql+psycopg are supported.",
            param="FT_DATABASE_URL",
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise SpecError(
            "FT_DATABASE_URL names an SQLite database in memory, which only one thread would see: name a file.",
            param="FT_DATABASE_URL",
        )
    return parsed


def _create_engine(url: URL) -> Engine:
    # More connections than threads that may ask (web server and reconciler), so that none waits for a connection.
    pool = {"pool_size": 8, "max_overflow": 56, "pool_timeout": BUSY_SECONDS}
    if url.get_backend_name() == "postgresql":
        return create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": BUSY_SECONDS}, **pool)
    assert url.database, "checked by _parse"
    create_home(Path(url.database).parent)
    with contextlib.suppress(OSError):  # SQLite says what is wrong
        create_private_file(Path(url.database))
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS}, **pool)
    event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own; `_begun` does
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait, whatever its timeout, where two that open a new file would wait for each other: one is refused."""
    ends = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
            time.sleep(0.01)
        else:
            return
