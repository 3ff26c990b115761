"""PostgreSQL that falls silent, has no connection free, or takes too long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, event, make_url, text

from ft_service.errors import UnavailableError
from ft_service.jobs.states import State
from ft_service.launcher.protocol import Launcher
from ft_service.store import database
from ft_service.store.database import DatabaseLimits
from ft_service.store.sql import Store, open_store
from tests.support.attempts import HANG_SECONDS
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import PROJECT, add_job, new_reconciler, step_until
from tests.support.silent_proxy import SilentProxy, silent_proxy


@pytest.fixture
def proxy(emptied_postgres_url: str) -> Iterator[SilentProxy]:
    with silent_proxy(emptied_postgres_url) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store through the proxy, with the shortest limits."""
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.0)
    store = open_store(proxy.url, DatabaseLimits(statement_seconds=1.0))
    store.projects.ensure_project(PROJECT, "local")
    yield store
    store.close()


def test_a_reconcilers_step_ends_though_its_connection_falls_silent_and_the_next_one_goes_on(
    proxy: SilentProxy, behind: Store, tmp_path: Path
) -> None:
    job = add_job(behind)
    launcher: Launcher = FakeLauncher()
    reconciler = new_reconciler(tmp_path, behind, launcher)
    silenced = []

    def fall_silent(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE jobs") and not silenced:
            silenced.append(statement)
            proxy.silence()

    event.listen(behind._engine, "before_cursor_execute", fall_silent)
    before = proxy.accepted
    with ThreadPoolExecutor(1) as pool:
        try:
            fault = pool.submit(reconciler.step).exception(timeout=HANG_SECONDS)
        except TimeoutError:
            proxy.close()  # which ends the step
            raise
    assert isinstance(fault, UnavailableError)
    assert (fault.code, len(silenced)) == ("database_unreachable", 1)
    # What was sent may have been done: then its lease lasts for half a minute.
    behind.leases.look_again(job.id)
    with behind.writing() as connection:
        connection.execute(text("UPDATE jobs SET lease_expires_at = 0"))
    assert step_until(reconciler, behind, State.RUNNING).id == job.id
    assert proxy.accepted > before
    reconciler.close()


def test_connections_that_fell_silent_while_nobody_used_them_cost_no_request(
    proxy: SilentProxy, behind: Store
) -> None:
    behind._patience.begin_seconds = 1.0
    with ThreadPoolExecutor(4) as pool:
        together = threading.Barrier(4)

        def use(_: int) -> None:
            with behind.reading() as connection:
                together.wait(60)
                connection.execute(text("SELECT 1"))

        list(pool.map(use, range(4)))
        proxy.silence()
        assert all(list(pool.map(lambda _: behind.now() > 0, range(8))))


def test_what_waits_for_an_answer_is_given_up_soon_once_the_process_ends(
    proxy: SilentProxy,
) -> None:
    store = open_store(proxy.url)
    assert store._patience.statement_seconds == 35.0
    begun = threading.Event()

    def wait() -> None:
        with store.reading() as connection:
            proxy.silence(later_too=True)
            begun.set()
            connection.execute(text("SELECT 1"))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(HANG_SECONDS)
        store.hurry()
        assert isinstance(waiting.exception(timeout=HANG_SECONDS), UnavailableError)
    assert store._patience.statement_seconds == database.LEAVING_SECONDS
    store.close()


def test_a_statement_that_takes_too_long_is_ended_and_says_by_which_setting(behind: Store) -> None:
    behind._patience.statement_seconds = HANG_SECONDS
    with (
        pytest.raises(UnavailableError, match="FT_DATABASE_STATEMENT_SECONDS") as caught,
        behind.reading() as connection,
    ):
        connection.execute(text(f"SELECT pg_sleep({HANG_SECONDS})"))
    assert (caught.value.code, caught.value.retry_after) == ("database_slow", 1)


def test_a_row_that_another_transaction_holds_is_waited_for_so_long(
    behind: Store, emptied_postgres_url: str
) -> None:
    store = open_store(emptied_postgres_url, DatabaseLimits(lock_seconds=0.1))
    with behind.writing() as holder:
        holder.execute(text("UPDATE projects SET used = 1"))
        with pytest.raises(UnavailableError) as caught:
            store.projects.update_project(PROJECT, limits={"max_slots": 2})
    assert caught.value.code == "database_locked"
    store.close()


def test_limits_end_with_their_transaction_since_a_pooler_hands_sessions_on(
    emptied_postgres_url: str,
) -> None:
    store = open_store(emptied_postgres_url, DatabaseLimits(connections=1, statement_seconds=7.0))
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    with store.reading() as connection:
        assert [connection.scalar(text(f"SHOW {name}")) for name in names] == ["7s", "10s", "7s"]
    with store._engine.connect() as connection:
        assert [connection.scalar(text(f"SHOW {name}")) for name in names] == ["0", "0", "0"]
    store.close()


def test_libpqs_parameters_in_the_url_go_before_ours(proxy: SilentProxy) -> None:
    store = open_store(f"{proxy.url}?keepalives_idle=77&connect_timeout=9")
    with store.reading() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        used = driver.info.get_parameters()
        assert used["keepalives_idle"] == "77"
        assert (used["connect_timeout"], used["tcp_user_timeout"]) == ("9", "30000")
    store.close()


@pytest.fixture
def few(emptied_postgres_url: str) -> Iterator[str]:
    """The database, for a role that may have two connections."""
    role = f"few_{uuid4().hex}"
    owner = create_engine(emptied_postgres_url, isolation_level="AUTOCOMMIT")
    with owner.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 2"))
    yield make_url(emptied_postgres_url).set(username=role).render_as_string(hide_password=False)
    with owner.connect() as connection:
        connection.execute(text(f"DROP ROLE {role}"))
    owner.dispose()


def test_a_server_without_a_free_connection_is_waited_for(few: str) -> None:
    store = open_store(few)
    with ThreadPoolExecutor(12) as pool:
        assert all(now > 0 for now in pool.map(lambda _: store.now(), range(60)))
    store.close()


def test_a_server_that_has_no_connection_free_for_long_is_said_to_be_full(
    few: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(few)
    store = open_store(few)
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    with (
        engine.connect(),
        engine.connect(),
        pytest.raises(UnavailableError, match="FT_DATABASE_CONNECTIONS") as caught,
    ):
        store.now()
    assert (caught.value.code, caught.value.retry_after) == ("too_many_connections", 1)
    engine.dispose()
    assert store.now() > 0
    store.close()


def test_a_process_has_no_more_connections_than_it_is_told(emptied_postgres_url: str) -> None:
    store = open_store(emptied_postgres_url, DatabaseLimits(connections=4))
    with ThreadPoolExecutor(12) as pool:
        assert all(now > 0 for now in pool.map(lambda _: store.now(), range(60)))
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
        "pg_backend_pid()"
    )
    with store.reading() as connection:
        assert connection.scalars(text(count)).one() < 4
    store.close()
