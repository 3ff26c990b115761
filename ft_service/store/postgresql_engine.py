"""Connections to PostgreSQL that end though their server has fallen silent: a node that is lost, or
a pooler that takes what it is sent and answers nothing.

The server ends what takes too long, and does so for each transaction, since a pooler in transaction
mode hands sessions on. The kernel ends a connection whose peer acknowledges nothing. What
acknowledges and does not answer, only the client can tell.
"""

from __future__ import annotations

import time
from typing import Any, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import URL, Engine, create_engine, event

ANSWER_SECONDS = 5.0
"""How much longer than a statement may take its answer is waited for."""
_FULL = (
    "too many clients",
    "remaining connection slots",
    "too many connections",
    "no more connections allowed",
)
"""Parts of the texts by which PostgreSQL and pgbouncer refuse a connection for their number. libpq
tells no code of it.
"""
_DEFAULTS: dict[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    # A database in SQL_ASCII, as initdb makes them without a locale: the driver would read bytes.
    "client_encoding": "utf8",
}
"""What a URL may say otherwise, in libpq's words: seconds, seconds, number, milliseconds."""


class Patience:
    """How long the connections of an engine wait for their server. Shared between threads."""

    def __init__(self, begin_seconds: float, statement_seconds: float) -> None:
        """`begin_seconds`: for the begin of a transaction, which shows whether the connection
        lives.
        """
        self.begin_seconds = begin_seconds
        self.statement_seconds = statement_seconds

    def end_within(self, seconds: float) -> None:
        """Wait no longer than this for any answer, waits that have begun included."""
        self.begin_seconds = min(self.begin_seconds, seconds)
        self.statement_seconds = min(self.statement_seconds, seconds)


class _Connection(psycopg.Connection[Any]):
    patience = Patience(10.0, 10.0)

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        begins = self.pgconn.transaction_status == TransactionStatus.IDLE
        try:
            return super().wait(_answered(gen, self.patience, begins), *args, **kwargs)
        except _SilentError as error:
            # tells SQLAlchemy that the connection is gone, and waits for nobody
            self.pgconn.finish()
            raise psycopg.OperationalError(
                f"the server has not answered for {error.seconds:g} seconds"
            ) from None


class _SilentError(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _answered(gen: Any, patience: Patience, begins: bool) -> Any:
    """The generator of a wait, which raises once nothing has come from the server for too long.
    psycopg asks it ten times a second at least.
    """
    try:
        wanted = next(gen)
        heard = time.monotonic()
        while True:
            ready = yield wanted
            silent = time.monotonic() - heard
            if ready:
                heard += silent
            elif silent > (patience.begin_seconds if begins else patience.statement_seconds):
                raise _SilentError(silent)
            wanted = gen.send(ready)
    except StopIteration as ended:
        return ended.value


def new_engine(url: URL, patience: Patience, connect_seconds: int, **pool: Any) -> Engine:
    """Return an engine whose driver begins no transactions by itself.

    Parameters of libpq in the URL go before ours.
    """
    # Nothing prepared on the server: behind a pooler that gives each transaction another connection
    # (pgbouncer), the name of a prepared statement is unknown, or another client's statement has
    # it.
    ours = {
        "connect_timeout": connect_seconds,
        **_DEFAULTS,
        "prepare_threshold": None,
        "autocommit": True,
    }
    engine = create_engine(
        url,
        connect_args={name: value for name, value in ours.items() if name not in url.query},
        **pool,
    )

    def connect(
        dialect: object, record: object, args: list[Any], parameters: dict[str, Any]
    ) -> _Connection:
        connection = _Connection.connect(*args, **parameters)
        connection.patience = patience
        return cast(_Connection, connection)

    event.listen(engine, "do_connect", connect)
    return engine


def begin_statement(statement_seconds: float, lock_seconds: float) -> str:
    """Return what begins a transaction: one round trip, with limits that end with the transaction.

    A session whose client is gone in the middle of one lets go of its locks.
    """
    statement, lock = (round(1000 * seconds) for seconds in (statement_seconds, lock_seconds))
    limits = {
        "statement_timeout": statement,
        "idle_in_transaction_session_timeout": statement,
        "lock_timeout": lock,
    }
    return "; ".join(
        ["BEGIN", *(f"SET LOCAL {name} = {milliseconds}" for name, milliseconds in limits.items())]
    )


def is_full(error: BaseException | None) -> bool:
    """Whether the server has refused a connection because it has as many as it takes."""
    return getattr(error, "sqlstate", None) == "53300" or any(text in str(error) for text in _FULL)
