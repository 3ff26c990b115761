from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from ft_service.errors import UnavailableError
from ft_service.store.database import Database
from ft_service.store.sql import _config, migrate, open_store
from ft_service.store.tables import metadata
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.databases import new_postgres_database
from tests.support.records import PROJECT, new_job


def test_migrations_make_the_schema_of_the_tables(database_url):
    migrate(database_url)
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        migrated = _indexes(connection)
    with engine.begin() as connection:
        metadata.drop_all(connection)
        metadata.create_all(connection)
        assert _indexes(connection) == migrated, "conditions and order of indexes, which Alembic does not compare"
    engine.dispose()


def _indexes(connection) -> set[str]:
    if connection.dialect.name == "sqlite":
        query = "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name <> 'alembic_version'"
    else:
        query = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'"
    return set(connection.scalars(text(query)))


def test_every_row_but_a_hosts_names_its_project():
    for table in metadata.tables.values():
        if table.name == "hosts":
            continue
        column = table.c.id if table.name == "projects" else table.c.project_id
        assert not column.nullable


def test_check_tells_a_database_without_the_schema(database_url):
    store = open_store(database_url)
    with pytest.raises(UnavailableError, match=r"schema none.*needs 0010.*ft migrate"):
        store.check()
    with pytest.raises(UnavailableError):
        store.list_jobs("proj_default")
    migrate(database_url)
    store.check()
    store.close()


def test_migrating_again_keeps_what_is_there(store, store_url):
    store.create_key(project_id="proj_default", name="mine", scope="user")
    migrate(store_url)
    assert len(store.list_keys("proj_default")) == 1


def test_metadata_of_older_jobs_can_be_searched(store, store_url):
    create_job(store, new_job(id="ftjob-a", request={"metadata": {"team": "a"}}))
    create_job(store, new_job(id="ftjob-b", request={}))
    with store.writing() as connection:
        config = _config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0002")
    migrate(store_url)
    assert [job.id for job in store.list_jobs(PROJECT, metadata={"team": "a"}).data] == ["ftjob-a"]
    assert [job.id for job in store.list_jobs(PROJECT, metadata="none").data] == ["ftjob-b"]


def test_several_may_migrate_at_once(database_url):
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(migrate, database_url) for _ in range(4)]:
            future.result(timeout=60)
    engine = create_engine(database_url)
    assert set(inspect(engine).get_table_names()) == {*metadata.tables, "alembic_version"}
    engine.dispose()


def test_many_open_a_new_sqlite_file_at_once(tmp_path):
    """Each connection asks for the write-ahead log, which SQLite refuses at once where two would wait for each other."""
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
    """As the init containers of as many pods: each does one database after the other, when it is told to (`go`)."""
    program = "import sys; from ft_service.store.sql import migrate; print(flush=True); sys.stdin.readline()"
    words = [sys.executable, "-c", f"{program}; [migrate(url) for url in sys.argv[1:]]", *urls]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
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


def test_processes_migrate_at_once_an_empty_database_and_an_old_one(postgres_url):
    empty, old = new_postgres_database(postgres_url), new_postgres_database(postgres_url)
    _bring(old, command.upgrade, "0001")
    begun = processes_that_migrate(3, empty, old)
    go(begun)
    for process in begun:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    for url in (empty, old):
        store = open_store(url)
        store.check()
        store.ensure_project(PROJECT, "local")
        store.close()


def test_who_is_killed_while_it_migrates_leaves_the_next_one_its_turn(postgres_url):
    """Killed while it waits for a table that somebody uses, holding the lock that others wait for."""
    url = new_postgres_database(postgres_url)
    _bring(url, command.upgrade, "0001")
    engine = create_engine(url)
    with engine.begin() as user:
        user.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
        (killed,) = begun = processes_that_migrate(1, url)
        go(begun)
        wait_for(lambda: _waiting_for_a_table(engine), 60)
        killed.kill()
        killed.communicate()
        assert user.scalar(text("SELECT version_num FROM alembic_version")) == "0001"
    engine.dispose()
    migrate(url)
    store = open_store(url)
    store.check()
    store.close()


def _waiting_for_a_table(engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'")))


def test_a_newer_releases_schema_is_lived_with(database_url, caplog):
    """While it is rolled out processes of this release start again; taking it back starts them all."""
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


def _bring(url, move, revision) -> None:
    database = Database(url)
    with database.writing() as connection:
        config = _config()
        config.attributes["connection"] = connection
        move(config, revision)
    database.close()
