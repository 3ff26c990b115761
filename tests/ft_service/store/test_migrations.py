from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, MetaData, create_engine, inspect, text

from ft_service.errors import UnavailableError
from ft_service.store import sql
from ft_service.store.database import StorableText
from ft_service.store.migrations import revise
from ft_service.store.records import NewKey
from ft_service.store.sql import alembic_config, migrate, open_store
from ft_service.store.tables import metadata
from tests.support.attempts import wait_for
from tests.support.databases import new_postgres_database
from tests.support.records import PROJECT


def _newest() -> str:
    return ScriptDirectory.from_config(alembic_config()).get_current_head() or ""


def test_migrations_make_the_schema_of_the_tables(database_url):
    migrate(database_url)
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        migrated = _indexes(connection)
    with engine.begin() as connection:
        metadata.drop_all(connection)
        metadata.create_all(connection)
        assert _indexes(connection) == migrated, (
            "conditions and order of indexes, which Alembic does not compare"
        )
    engine.dispose()


def _indexes(connection) -> set[str]:
    if connection.dialect.name == "sqlite":
        query = (
            "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND "
            "tbl_name <> 'alembic_version'"
        )
    else:
        query = (
            "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> "
            "'alembic_version'"
        )
    return set(connection.scalars(text(query)))


def test_every_row_but_a_hosts_names_its_project():
    for table in metadata.tables.values():
        if table.name == "hosts":
            continue
        column = table.c.id if table.name == "projects" else table.c.project_id
        assert not column.nullable


def test_check_tells_a_database_without_the_schema(database_url):
    store = open_store(database_url)
    with pytest.raises(UnavailableError, match=rf"schema none.*needs {_newest()}.*ft migrate"):
        store.check()
    with pytest.raises(UnavailableError):
        store.jobs.list_jobs("proj_default")
    migrate(database_url)
    store.check()
    store.close()


def test_migrating_again_keeps_what_is_there(store, store_url):
    store.keys.create_key(NewKey(project_id="proj_default", name="mine", scope="user"))
    migrate(store_url)
    assert len(store.keys.list_keys("proj_default")) == 1


def test_several_may_migrate_at_once(database_url):
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(migrate, database_url) for _ in range(4)]:
            future.result(timeout=60)
    engine = create_engine(database_url)
    assert set(inspect(engine).get_table_names()) == {*metadata.tables, "alembic_version"}
    engine.dispose()


def test_many_open_a_new_sqlite_file_at_once(tmp_path):
    """Each connection asks for the write-ahead log, which SQLite refuses at once where two would
    wait for each other.
    """
    for attempt in range(20):
        url = f"sqlite:///{tmp_path}/{attempt}/ft.db"
        begin = threading.Barrier(6)

        def open_one(url: str = url, begin: threading.Barrier = begin) -> None:
            store = open_store(url)
            begin.wait()
            with store.writing() as connection:
                connection.execute(text("CREATE TABLE IF NOT EXISTS one (word TEXT)"))
            store.close()

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(open_one) for _ in range(6)]:
                future.result(timeout=60)


def processes_that_migrate(number: int, *urls: str) -> list[subprocess.Popen[str]]:
    """Act as the init containers of as many pods: each migrates one database after the other, on
    `go`.
    """
    program = (
        "import sys; from ft_service.store.sql import migrate; print(flush=True); "
        "sys.stdin.readline()"
    )
    words = [sys.executable, "-c", f"{program}; [migrate(url) for url in sys.argv[1:]]", *urls]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return [subprocess.Popen(words, **pipes) for _ in range(number)]


def go(begun: list[subprocess.Popen[str]]) -> None:
    """All at once, when the last is ready."""
    for process in begun:
        assert process.stdout is not None
        process.stdout.readline()
    for process in begun:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def test_processes_migrate_an_empty_database_at_once(postgres_url):
    url = new_postgres_database(postgres_url)
    begun = processes_that_migrate(3, url)
    go(begun)
    for process in begun:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    store = open_store(url)
    store.check()
    store.projects.ensure_project(PROJECT, "local")
    store.close()


def test_who_is_killed_while_it_migrates_leaves_the_next_one_its_turn(postgres_url):
    """Killed while it waits for another transaction, holding the lock that others wait for."""
    url = new_postgres_database(postgres_url)
    engine = create_engine(url)
    with engine.connect() as other:
        other.execute(text("CREATE TABLE jobs (id TEXT)"))
        (killed,) = begun = processes_that_migrate(1, url)
        go(begun)
        wait_for(lambda: _somebody_waits(engine), 60)
        killed.kill()
        killed.communicate()
        other.rollback()
    assert inspect(engine).get_table_names() == [], "nothing of it is there"
    engine.dispose()
    migrate(url)
    store = open_store(url)
    store.check()
    store.close()


def _somebody_waits(engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.scalar(
                text(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
                )
            )
        )


def test_a_migration_lets_others_at_a_table_that_it_waits_for(postgres_url, monkeypatch, caplog):
    """A lock that is waited for stands before those of all who come later: one long report would
    stop the whole service.
    """
    monkeypatch.setattr(sql, "TABLE_LOCK_SECONDS", 0.1)
    monkeypatch.setattr(sql, "_TRY_AGAIN_SECONDS", 0.1)
    url = new_postgres_database(postgres_url)
    engine = create_engine(url)
    with engine.begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    with ThreadPoolExecutor(1) as pool, engine.connect() as reader:
        reader.execute(text("SELECT count(*) FROM jobs"))
        migrating = pool.submit(migrate, url)
        wait_for(lambda: "waits for a table" in caplog.text, 60)
        assert not migrating.done()
        reader.rollback()
        migrating.result(timeout=60)
    engine.dispose()
    store = open_store(url)
    store.check()
    store.close()


def test_a_revision_is_written_for_what_the_tables_have_and_the_newest_revision_has_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(revise, "VERSIONS", tmp_path)
    monkeypatch.setattr("sys.argv", ["revise", "nothing", "Nothing."])
    with pytest.raises(SystemExit, match="nothing to do"):
        revise.main()
    tables = MetaData(naming_convention=metadata.naming_convention)
    for table in metadata.tables.values():
        table.to_metadata(tables)
    tables.tables["keys"].append_column(Column("note", StorableText))
    monkeypatch.setattr(revise, "metadata", tables)
    monkeypatch.setattr("sys.argv", ["revise", "notes", "Notes on keys."])
    revise.main()
    written = (tmp_path / f"{int(_newest()) + 1:04}_notes.py").read_text()
    assert f'down_revision = "{_newest()}"' in written
    (change,) = written.split("def upgrade() -> None:\n")[1].strip().splitlines()
    assert change == 'op.add_column("keys", sa.Column("note", sa.Text(), nullable=True))'


def test_a_newer_releases_schema_is_lived_with(database_url, caplog):
    """While it is rolled out processes of this release start again; taking it back starts them
    all.
    """
    migrate(database_url)
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    migrate(database_url)
    assert "newer version" in caplog.text
    store = open_store(database_url)
    store.check()
    store.close()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    engine.dispose()
