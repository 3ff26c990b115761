"""What a database that cannot be used is said to suffer from, and what continues meanwhile."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import event, text

from ft_service.errors import UnavailableError
from ft_service.host import disk
from ft_service.host.disk import FileReserve
from ft_service.store import database
from ft_service.store.records import NewKey
from ft_service.store.sql import Store, migrate, open_store
from tests.support.attempts import wait_for
from tests.support.records import PROJECT, new_file


def each_connection(store: Store, pragma: str) -> None:
    """Have a pragma hold on every connection that is made from now on."""
    event.listen(
        store._engine, "connect", lambda connection, _: connection.execute(f"PRAGMA {pragma}")
    )
    store._engine.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Store]:
    migrate(f"sqlite:///{tmp_path / 'ft.db'}")
    store = open_store(f"sqlite:///{tmp_path / 'ft.db'}")
    store.projects.ensure_project(PROJECT, "acme")
    yield store
    store.close()


def fault_of_write(store: Store) -> UnavailableError:
    """A full disk is met sooner or later: a log that was larger before has room in it."""
    with pytest.raises(UnavailableError) as caught:
        add_many(store)
    return caught.value


def add_many(store: Store) -> None:
    for _ in range(2000):
        store.files.add_file(new_file())


@pytest.mark.parametrize(
    ("pragma", "code", "says"),
    [
        ("max_page_count = 1", "disk_full", "is full"),
        ("query_only = ON", "disk_read_only", "is read-only"),
    ],
)
def test_a_disk_that_takes_no_more_is_named_and_can_be_read(sqlite, pragma, code, says):
    kept = sqlite.files.add_file(new_file())
    each_connection(sqlite, pragma)

    fault = fault_of_write(sqlite)

    assert (fault.code, fault.retry_after) == (code, None)
    assert says in fault.message
    assert sqlite.files.get_file(PROJECT, kept.id) == kept


def test_a_database_that_another_process_locks_is_said_to_be_locked(sqlite, tmp_path, monkeypatch):
    each_connection(sqlite, "busy_timeout = 1")
    other = sqlite3.connect(tmp_path / "ft.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    fault = fault_of_write(sqlite)
    assert (fault.code, fault.retry_after) == ("database_locked", 1)
    assert "locked by another process" in fault.message

    def lockless(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockless)
    fault = fault_of_write(sqlite)
    other.close()
    assert fault.code == "no_file_locks"
    assert "no file locks" in fault.message


def test_a_file_that_is_no_database_and_a_damaged_one_are_told_apart(tmp_path):
    (tmp_path / "a.db").write_bytes(b"no database at all" * 100)
    migrate(f"sqlite:///{tmp_path / 'b.db'}")
    size = (tmp_path / "b.db").stat().st_size
    with (tmp_path / "b.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    for name, code in (("a.db", "not_a_database"), ("b.db", "database_damaged")):
        with pytest.raises(UnavailableError) as caught:
            migrate(f"sqlite:///{tmp_path / name}")
        assert caught.value.code == code


def test_a_database_that_cannot_be_reached_says_so(tmp_path):
    store = open_store(f"postgresql://user:secret@/ft?host={tmp_path}")
    with pytest.raises(UnavailableError) as caught:
        store.check()
    assert caught.value.code == "database_unreachable"
    store.close()


def write_where_nothing_may_be_written(store: Store) -> None:
    with store.writing() as connection:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        connection.execute(text("DELETE FROM files"))


def test_a_full_disk_of_postgresql_is_named(store, store_url):
    if not store.is_shared:
        pytest.skip("as SQLite's above")
    with pytest.raises(UnavailableError) as caught, store.writing() as connection:
        connection.execute(
            text("DO $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = '53100'; END $$")
        )
    assert caught.value.code == "disk_full"
    with pytest.raises(UnavailableError) as caught:
        write_where_nothing_may_be_written(store)
    assert caught.value.code == "disk_read_only"


def test_a_key_opens_though_its_use_cannot_be_written_and_that_is_said_once(sqlite, caplog):
    _, secret = sqlite.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    _, another = sqlite.keys.create_key(NewKey(project_id=PROJECT, name="another", scope="user"))
    each_connection(sqlite, "query_only = ON")
    for _ in range(3):
        assert sqlite.keys.authenticate(secret) is not None
        assert sqlite.keys.authenticate(another) is not None
        sqlite.keys._used_keys.finish()
    assert [record.message for record in caplog.records if "use of keys" in record.message] != []
    assert sum("use of keys" in record.message for record in caplog.records) == 1
    # And is not tried again for a minute.
    assert sum("readonly" in record.message for record in caplog.records) <= 2


def test_a_key_opens_at_once_while_another_process_holds_the_lock(sqlite, tmp_path, monkeypatch):
    _, secret = sqlite.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    other = sqlite3.connect(tmp_path / "ft.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    # Without the thread this would raise, after a wait.
    assert sqlite.keys.authenticate(secret) is not None
    other.rollback()
    other.close()
    wait_for(lambda: sqlite.keys.list_keys(PROJECT)[0].last_used_at, 60)


def test_whether_it_can_be_written_is_remembered_for_a_moment_and_then_tried(sqlite, monkeypatch):
    written = []
    event.listen(sqlite._engine, "before_cursor_execute", lambda *given: written.append(given[2]))
    sqlite.files.add_file(new_file())
    del written[:]
    sqlite.check_writable()
    assert written == []  # somebody has just written

    each_connection(sqlite, "query_only = ON")
    fault_of_write(sqlite)
    with pytest.raises(UnavailableError, match="read-only"):
        sqlite.check_writable()

    event.listen(
        sqlite._engine,
        "connect",
        lambda connection, _: connection.execute("PRAGMA query_only = OFF"),
    )
    sqlite._engine.dispose()
    monkeypatch.setattr(database, "CHECK_SECONDS", -1.0)
    sqlite.check_writable()


def test_room_is_kept_and_given_up_for_a_deletion_alone(sqlite, tmp_path, monkeypatch):
    reserve = tmp_path / "ft.db-reserve"
    sqlite.keep_reserve()
    assert reserve.stat().st_blocks * 512 >= disk.DELETION_BYTES
    kept = sqlite.files.add_file(new_file())
    sqlite.files.delete_file(PROJECT, kept.id)
    assert reserve.exists()  # there is other room

    real = os.statvfs
    monkeypatch.setattr(
        disk.os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096, f_flag=0)
    )
    kept = sqlite.files.add_file(new_file())
    assert reserve.exists()
    with pytest.raises(
        UnavailableError, match="is full"
    ):  # though that small write has found its room
        sqlite.check_writable()
    sqlite.files.delete_file(PROJECT, kept.id)
    assert not reserve.exists()

    monkeypatch.setattr(disk.os, "statvfs", real)
    sqlite.keep_reserve()
    assert reserve.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a file system of a test's own cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(64 * 1024))


def test_on_a_full_disk_files_can_be_deleted_and_then_stored(small_disk):
    url = f"sqlite:///{small_disk / 'ft.db'}"
    migrate(url)
    store = open_store(url)
    store.projects.ensure_project(PROJECT, "acme")
    store.keep_reserve()
    _, secret = store.keys.create_key(NewKey(project_id=PROJECT, name="mine", scope="user"))
    files = [store.files.add_file(new_file()) for _ in range(20)]
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        fill(ballast)

    fault = fault_of_write(store)
    assert fault.code == "disk_full"
    with pytest.raises(UnavailableError, match="is full"):
        store.check_writable()
    assert store.keys.authenticate(secret) is not None
    for file in files:
        store.files.delete_file(PROJECT, file.id)
        store.files.mark_freed([file.id])

    ballast.unlink()
    store.files.add_file(new_file())
    store.check_writable()
    assert FileReserve(small_disk / "ft.db-reserve").keep()
    store.close()
