"""Messages for failures of the database: one sentence for each cause, independent of the
statement.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import tempfile
from pathlib import Path

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ft_service.errors import UnavailableError
from ft_service.host import disk
from ft_service.store.postgresql_engine import is_full

DATABASE_DISK = "The disk that holds the database"
DAMAGED = "database_damaged"
_UNKNOWN = "The database does not answer as it should; the service's log says how."


def fault_of(error: Exception, file: Path | None) -> UnavailableError:
    """The error that users see instead of a driver's. `file`: of SQLite; None: PostgreSQL."""
    if isinstance(error, PoolTimeoutError):
        return _fault(
            "Too many requests wait for the database. Try again in a moment.",
            "database_busy",
            retry_after=1,
        )
    cause = error.orig if isinstance(error, DBAPIError) else error
    return _of_postgresql(cause) if file is None else _of_sqlite(cause, file)


def _of_sqlite(cause: BaseException | None, file: Path) -> UnavailableError:
    match getattr(cause, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return disk.full(DATABASE_DISK)
        case sqlite3.SQLITE_READONLY:
            return disk.state_of(file.parent, DATABASE_DISK) or disk.read_only(
                f"{DATABASE_DISK}, or its file,"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return locked(file)
        case sqlite3.SQLITE_CORRUPT:
            return _fault(
                f"The database is damaged ({cause}). The operator must restore it from a backup.",
                DAMAGED,
            )
        case sqlite3.SQLITE_NOTADB:
            return _fault(
                f"The database's file is not a database ({cause}): {file.name} holds something "
                "else.",
                "not_a_database",
            )
        case sqlite3.SQLITE_CANTOPEN:
            message = (
                f"The database's file {file.name} cannot be opened: its folder is gone, "
                "full, or not this user's."
            )
            return disk.state_of(file.parent, DATABASE_DISK) or _fault(
                message, "database_unreachable"
            )
        case sqlite3.SQLITE_IOERR:
            message = (
                f"{DATABASE_DISK} cannot be read or written ({cause}); the service's log says more."
            )
            return disk.state_of(file.parent, DATABASE_DISK) or _fault(message, "disk_error")
    return _fault(_UNKNOWN, UnavailableError.code, retry_after=1)


def locked(file: Path) -> UnavailableError:
    """The error for an SQLite database that another process does not let go of."""
    if not _has_locks(file.parent):
        message = (
            "The file system that holds the database has no file locks, which SQLite needs: put "
            "FT_HOME on another, or use "
            "PostgreSQL (FT_DATABASE_URL)."
        )
        return _fault(message, "no_file_locks")
    message = (
        "The database is locked by another process, which has not let go of it for seconds: "
        "another server or command on this "
        "FT_HOME is in the middle of a write, or was stopped in one."
    )
    return _fault(message, "database_locked", retry_after=1)


def _has_locks(folder: Path) -> bool:
    """Whether files of a folder can be locked as SQLite does it; True if that cannot be tried."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _of_postgresql(cause: BaseException | None) -> UnavailableError:
    state = getattr(cause, "sqlstate", None)
    if is_full(cause):
        message = (
            "The database has no connection free: it has as many as it takes. The operator can "
            "let it take more, or set "
            "FT_DATABASE_CONNECTIONS lower."
        )
        return _fault(message, "too_many_connections", retry_after=1)
    match state:
        case "53100":
            return disk.full(DATABASE_DISK)
        case "25006":
            return disk.read_only("The database")
        case "57014":
            message = (
                "The database has not ended a statement in the time that it may take "
                "(FT_DATABASE_STATEMENT_SECONDS)."
            )
            return _fault(message, "database_slow", retry_after=1)
        case "55P03" | "40P01" | "40001":
            return _fault(
                "Another transaction holds what this one needs. Try again.",
                "database_locked",
                retry_after=1,
            )
        case "XX001" | "XX002":
            return _fault(
                f"The database is damaged ({state}). The operator must restore it.", DAMAGED
            )
        case "58030":
            return _fault(f"{DATABASE_DISK} cannot be read or written (58030).", "disk_error")
        case None:
            return _fault(
                "The database cannot be reached; the service's log says why.",
                "database_unreachable",
                retry_after=1,
            )
        case _ if state.startswith(("08", "57P", "25P03")):
            return _fault(
                "The database cannot be reached; the service's log says why.",
                "database_unreachable",
                retry_after=1,
            )
    return _fault(_UNKNOWN, UnavailableError.code, retry_after=1)


def _fault(message: str, code: str, *, retry_after: int | None = None) -> UnavailableError:
    return UnavailableError(message, code=code, retry_after=retry_after)
