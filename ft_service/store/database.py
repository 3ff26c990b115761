"""Connections, transactions, the database's clock and the values that it can hold: the base of
every part of the store.

The differences between SQLite and PostgreSQL are handled here: how a connection is set up, how a
write begins, how the time is read, which text is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    JSON,
    URL,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Table,
    Text,
    Transaction,
    TypeDecorator,
    create_engine,
    event,
    make_url,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql.functions import FunctionElement

from ft_service.errors import ConflictError, SpecError, UnavailableError
from ft_service.host.disk import FileReserve, state_of
from ft_service.host.home import create_home, create_private_file
from ft_service.settings import Settings
from ft_service.store.database_errors import DAMAGED, DATABASE_DISK, fault_of, locked
from ft_service.store.postgresql_engine import (
    ANSWER_SECONDS,
    Patience,
    begin_statement,
    is_full,
    new_engine,
)

log = logging.getLogger(__name__)

BUSY_SECONDS = 10
"""How long a write waits for another one, and how long a connection to PostgreSQL, and the begin of
a transaction there, may take.
"""
LEAVING_SECONDS = 3.0
"""How long an answer of PostgreSQL is waited for once the process was asked to end."""
_KEPT_CONNECTIONS = 8
"""Of a process's connections, those that stay open."""
_PAUSES = (0.05, 1.0)
"""Shortest and longest pause before PostgreSQL is asked again for a connection that it has refused
for their number.
"""

AUDITED = "audited"
"""Entries of the audit log that a transaction has written, in the connection's `info`."""
CHECK_SECONDS = 5.0
"""Age up to which the last write tells whether the database can be written."""
DAMAGE_SECONDS = 600.0
"""Time for which damage is told after it was met: most requests may never touch the page."""


class database_time(FunctionElement[float]):
    """Seconds since the epoch on the database's clock, at the moment the statement runs."""

    type = Double()
    inherit_cache = True


@compiles(database_time, "sqlite")
def _sqlite_time(element: database_time, compiler: Any, **kw: Any) -> str:
    # unixepoch('subsec') needs SQLite 3.42; Debian 12 has 3.40.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_time, "postgresql")
def _postgresql_time(element: database_time, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


def is_over(
    moment: ColumnElement[float], longest: float | ColumnElement[float]
) -> ColumnElement[bool]:
    """Condition: a moment has come.

    A moment more than `longest` seconds ahead was stored before the clock was set back and counts
    as past; otherwise it would be waited for as long as the clock was set back.
    """
    return or_(moment <= database_time(), moment > database_time() + longest)


UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that PostgreSQL cannot store in text: NUL and half surrogate pairs."""
_SUSPECT = re.compile(r"\\u0000|\\u[dD][89a-fA-F]|NaN|Infinity")


def storable(value: Any) -> Any:
    """A JSON value that both databases can store: without NUL, lone surrogates, NaN and infinity.

    Output of workers and input of clients may contain them, and must not make a job impossible to
    store.
    """
    # One search of the whole as JSON, which escapes these characters, is faster than a search of
    # each string.
    return _without_unstorable(value) if _SUSPECT.search(json.dumps(value)) else value


def storable_text(value: str) -> str:
    return _without_unstorable(value) if UNSTORABLE.search(value) else value


def _without_unstorable(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {
                _without_unstorable(key): _without_unstorable(inner) for key, inner in value.items()
            }
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


@dataclass(frozen=True, kw_only=True)
class DatabaseLimits:
    """What a process may ask of its database. As in Settings."""

    connections: int = Settings.model_fields["database_connections"].default
    statement_seconds: float = Settings.model_fields["database_statement_seconds"].default
    """Of PostgreSQL alone, like the next one."""
    lock_seconds: float = BUSY_SECONDS

    @classmethod
    def of(cls, settings: Settings) -> DatabaseLimits:
        return cls(
            connections=settings.database_connections,
            statement_seconds=settings.database_statement_seconds,
        )


class Database:
    """An engine with transactions for reading and writing.

    Errors of the driver are raised as this service's own.
    """

    def __init__(self, url: str, limits: DatabaseLimits | None = None) -> None:
        """Connects on first use. Raises SpecError if the URL is not one of the two databases'."""
        parsed = _parse(url)
        limits = limits or DatabaseLimits()
        self.most_connections = limits.connections
        self._patience = Patience(BUSY_SECONDS, limits.statement_seconds + ANSWER_SECONDS)
        self._engine = _create_engine(parsed, limits, self._patience)
        self._begin = begin_statement(limits.statement_seconds, limits.lock_seconds)
        """Of PostgreSQL; those of SQLite differ in what they do."""
        self._file = (
            Path(parsed.database)
            if parsed.get_backend_name() == "sqlite" and parsed.database
            else None
        )
        self._reserve = (
            None
            if self._file is None
            else FileReserve(self._file.with_name(f"{self._file.name}-reserve"))
        )
        self._last_write: _Write | None = None
        self._damage: _Write | None = None
        """The last statement that met a damaged page, which others may not touch."""
        self.audited: Callable[[dict[str, Any]], None] = lambda entry: None
        """Called with each entry of the audit log, once it is stored."""
        self._checking = threading.Lock()
        self.changed = threading.Event()
        """Set when this process has written something that the reconciler should look at now; the
        reconciler clears it.
        """
        # SQLite waits for another writer by sleeping ever longer, so that one of many waiting
        # writers may wait for seconds.
        self._turn = threading.Lock()

    @property
    def connections(self) -> int:
        """Connections that this process uses now, of `most_connections`."""
        pool = self._engine.pool
        return pool.checkedout() if isinstance(pool, QueuePool) else 0

    @property
    def is_shared(self) -> bool:
        """Whether processes of several hosts may use it."""
        return self._engine.dialect.name == "postgresql"

    def now(self) -> float:
        with self.reading() as connection:
            return connection.scalars(select(database_time())).one()

    def close(self) -> None:
        self._engine.dispose()

    def hurry(self) -> None:
        """Let no thread wait long for a database that does not answer, since the process ends."""
        self._patience.end_within(LEAVING_SECONDS)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent snapshot on SQLite; on PostgreSQL every statement sees all that is committed
        by then.
        """
        with self._our_errors(), self._begun("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, makes_room: bool = False) -> Iterator[Connection]:
        """A transaction, committed at the end and rolled back by any exception.

        On SQLite it excludes other writers: be quick.

        `makes_room`: it deletes data, or ends what fills the disk; on a full disk it may use the
        reserve.
        """
        if makes_room and self._reserve is not None:
            self._reserve.give_up_if_full()
        # A transaction that writes only after reading can fail half-way; one that takes the write
        # lock at once waits.
        with (
            self._in_turn(),
            self._our_errors(write=True),
            self._begun("BEGIN IMMEDIATE") as connection,
        ):
            connection.info.pop(AUDITED, None)  # of a transaction that was rolled back
            yield connection
            entries = connection.info.pop(AUDITED, [])
        for entry in entries:
            self.audited(entry)

    def keep_reserve(self) -> None:
        """Reserve a little space on the disk of an SQLite database, so that data can be deleted
        once it is full.
        """
        if self._reserve is not None:
            self._reserve.keep()

    def check_writable(self) -> None:
        """Raise UnavailableError with the reason while nothing can be written, or for
        DAMAGE_SECONDS after a statement has met damage. The result of a write in the last
        CHECK_SECONDS is reused; otherwise a row is written unchanged. A full disk is recognised by
        its free space, since a small write may still fit into SQLite's log.
        """
        with self._checking:
            if (
                self._damage is not None
                and self._damage.fault
                and time.monotonic() - self._damage.at < DAMAGE_SECONDS
            ):
                raise self._damage.fault
            if (
                self._file is not None
                and (fault := state_of(self._file.parent, DATABASE_DISK)) is not None
            ):
                raise fault
            if self._last_write is None or time.monotonic() - self._last_write.at > CHECK_SECONDS:
                with contextlib.suppress(UnavailableError), self.writing() as connection:
                    connection.exec_driver_sql(
                        "UPDATE alembic_version SET version_num = version_num"
                    )
            if self._last_write is not None and self._last_write.fault is not None:
                raise self._last_write.fault

    @contextlib.contextmanager
    def _begun(self, sqlite_begin: str) -> Iterator[Connection]:
        begin = self._begin if self.is_shared else sqlite_begin
        with self._connected(begin) as connection, cast(Transaction, connection.get_transaction()):
            yield connection

    def _connected(self, begin: str) -> Connection:
        """Return a connection in a new transaction, which neither driver begins by itself.

        Its begin shows whether a connection that was kept still lives; if not, none of its age is
        used again. If the server has no connection free, wait for one.
        """
        began, pause, (_, longest) = time.monotonic(), _PAUSES[0], _PAUSES
        dead = False
        while True:
            try:
                return self._new_transaction(begin)
            except DBAPIError as error:
                if error.connection_invalidated and not dead:
                    dead = True
                    continue
                if not is_full(error.orig) or time.monotonic() - began > BUSY_SECONDS:
                    raise
                log.info("database: %s", error.orig)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    def _new_transaction(self, begin: str) -> Connection:
        connection = self._engine.connect()
        try:
            connection.begin()
            connection.exec_driver_sql(begin)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Let writers to SQLite follow each other.

        Each waits for its turn as long as for another process: while that holds the database, those
        of many writers would add up.
        """
        if self._file is None:
            yield
            return
        if not self._turn.acquire(timeout=BUSY_SECONDS):
            fault = locked(self._file)
            self._last_write = _Write(time.monotonic(), fault)
            raise fault
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _our_errors(self, *, write: bool = False) -> Iterator[None]:
        """Raise errors of the driver as ours; those of a connection's set-up are not wrapped by
        SQLAlchemy. `write`: remember the result.
        """
        dbapi = self._engine.dialect.loaded_dbapi
        try:
            yield
        except IntegrityError as error:
            log.info("database refused a write: %s", error.orig)
            raise ConflictError(
                "Somebody else has stored this already, or removed what it refers to."
            ) from error
        except (SQLAlchemyError, dbapi.Error) as error:
            log.warning("database: %s", error.orig if isinstance(error, DBAPIError) else error)
            fault = fault_of(error, self._file)
            if write:
                self._last_write = _Write(time.monotonic(), fault)
            if fault.code == DAMAGED:
                self._damage = _Write(time.monotonic(), fault)
            raise fault from error
        if write:
            self._last_write = _Write(time.monotonic())


class StorePart:
    """A part of the store, for one kind of record. All parts share a database."""

    def __init__(self, database: Database) -> None:
        self._database = database


@dataclass(frozen=True)
class _Write:
    """Time and result of a write."""

    at: float
    fault: UnavailableError | None = None


def upsert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number is a ValueError
        raise SpecError(
            "FT_DATABASE_URL is not a database URL. Use sqlite:////path/ft.db or "
            "postgresql+psycopg://user:password@host/name.",
            param="FT_DATABASE_URL",
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise SpecError(
            f"FT_DATABASE_URL begins with {parsed.drivername!r}; only sqlite and "
            "postgresql+psycopg are supported.",
            param="FT_DATABASE_URL",
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise SpecError(
            "FT_DATABASE_URL names an SQLite database in memory, which only one thread would see: "
            "name a file.",
            param="FT_DATABASE_URL",
        )
    return parsed


def _create_engine(url: URL, limits: DatabaseLimits, patience: Patience) -> Engine:
    kept = min(_KEPT_CONNECTIONS, limits.connections)
    pool = {
        "pool_size": kept,
        "max_overflow": limits.connections - kept,
        "pool_timeout": BUSY_SECONDS,
    }
    if url.get_backend_name() == "postgresql":
        return new_engine(url, patience, BUSY_SECONDS, **pool)
    assert url.database, "checked by _parse"
    create_home(Path(url.database).parent)
    with contextlib.suppress(OSError):  # SQLite then reports the cause
        create_private_file(Path(url.database))
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS}, **pool)
    event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # the driver begins no transactions by itself; `_begun` does
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Turn on the write-ahead log.

    SQLite ignores its timeout if two processes that open a new file would wait for each other, and
    refuses one of them: try again.
    """
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
