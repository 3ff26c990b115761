from __future__ import annotations

import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from ft_service.errors import SpecError, UnavailableError
from ft_service.store import database
from ft_service.store.sql import migrate, open_store
from tests.support.databases import new_postgres_database


def test_the_clock_is_the_databases(store):
    first = store.now()
    assert abs(first - time.time()) < 60
    assert store.now() >= first


def test_sqlite_is_durable_and_checks_references(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")
    with store.reading() as connection:
        settings = {
            name: connection.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
        assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert connection.scalar(text("PRAGMA busy_timeout")) >= 1000
    store.close()


def test_a_write_on_sqlite_takes_the_lock_at_once(tmp_path):
    """One that reads first and asks for the lock later can be refused in the middle, whatever the
    timeout.
    """
    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")
    other = sqlite3.connect(tmp_path / "ft.db", timeout=0)
    with store.writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    with store.reading():
        other.execute("BEGIN IMMEDIATE")
    other.close()
    store.close()


def test_a_writer_to_sqlite_waits_for_others_of_its_process_no_longer_than_for_another_process(
    tmp_path, monkeypatch
):
    """While another process holds the lock, each writer waits for it, one after the other:
    `/readyz` would never answer.
    """
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.01)
    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")

    def write() -> None:
        with store.writing():
            pass

    with ThreadPoolExecutor(1) as pool:
        with store.writing():
            fault = pool.submit(write).exception(timeout=20)
        assert isinstance(fault, UnavailableError)
        assert (fault.code, fault.retry_after) == ("database_locked", 1)
        pool.submit(write).result()
    store.close()


def test_a_database_in_sql_ascii_keeps_texts(postgres_url):
    """As initdb makes them where there is no locale; the driver would give bytes."""
    url = new_postgres_database(postgres_url, "ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    migrate(url)
    store = open_store(url)
    store.projects.ensure_project("proj_a", "Größe")
    with store.reading() as connection:
        assert connection.scalar(text("SELECT organization FROM projects")) == "Größe"
    store.close()


def test_nothing_stays_prepared_in_a_session_that_a_pooler_may_give_to_others(emptied_postgres_url):
    store = open_store(emptied_postgres_url)
    for _ in range(10):
        store.projects.ensure_project("proj_a", "acme")
    with store.reading() as connection:
        assert connection.scalars(text("SELECT statement FROM pg_prepared_statements")).all() == []
    store.close()


def delete_and_fail(connection):
    connection.execute(text("DELETE FROM projects"))
    raise ZeroDivisionError


def test_an_exception_undoes_a_transaction(store):
    with pytest.raises(ZeroDivisionError), store.writing() as connection:
        delete_and_fail(connection)
    with store.reading() as connection:
        assert connection.scalar(text("SELECT count(*) FROM projects")) == 2


@pytest.mark.parametrize(
    "url", ["", "not a url", "mysql://localhost/x", "postgresql+asyncpg://localhost/x", "sqlite://"]
)
def test_a_url_of_another_database_is_refused(url):
    with pytest.raises(SpecError) as caught:
        open_store(url)
    assert caught.value.param == "FT_DATABASE_URL"


def test_a_database_that_is_away_is_unavailable():
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        store = open_store(f"postgresql://user:secret@127.0.0.1:{taken.getsockname()[1]}/ft")
        with pytest.raises(UnavailableError) as caught:
            store.check()
        with pytest.raises(UnavailableError):
            store.files.find_files(["file-a"])  # past SQLAlchemy
    assert "secret" not in str(caught.value)
    store.close()


def test_a_file_that_is_no_database_is_unavailable(tmp_path):
    (tmp_path / "ft.db").write_bytes(b"no database at all" * 100)
    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")
    with pytest.raises(UnavailableError):
        store.keys.authenticate("ft-secret")
    with pytest.raises(UnavailableError):
        store.files.find_files(["file-a"])
    store.close()


def test_the_folder_of_the_database_is_made(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'new' / 'ft.db'}")
    assert store.now() > 0
    store.close()


def test_a_damaged_page_that_a_request_has_met_is_told_to_who_asks_whether_all_is_well(
    tmp_path, monkeypatch
):
    url = f"sqlite:///{tmp_path}/ft.db"
    migrate(url)
    with sqlite3.connect(tmp_path / "ft.db") as connection:
        pages = [
            page
            for (page,) in connection.execute(
                "SELECT rootpage FROM sqlite_master WHERE tbl_name = 'sweeps'"
            )
        ]
        [(size,)] = connection.execute("PRAGMA page_size")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with (tmp_path / "ft.db").open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)
    store = open_store(url)
    try:
        store.check_writable()  # the page is not read for that
        with pytest.raises(UnavailableError) as met:
            store.sweeps.list_sweeps("default", limit=1)
        for _ in range(2):
            with pytest.raises(UnavailableError) as told:
                store.check_writable()
            assert (met.value.code, told.value.code) == ("database_damaged", "database_damaged")
        monkeypatch.setattr(database, "DAMAGE_SECONDS", 0.0)
        store.check_writable()
    finally:
        store.close()
