"""Rows of two tenants side by side, in every table and in every state, and what a call changes.

A clock that stands still makes times, and thereby their borders, exact.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Table, event, insert, select

from ft_service.errors import FtError, LimitError
from ft_service.store.records import Claim, Page
from ft_service.store.sql import Store
from ft_service.store.tables import audit, metadata
from ft_service.store.tenants.keys import digest_of
from tests.support.databases import new_sqlite_database

NOW = 10_000 * 86_400.0
"""May 19, 1997, at midnight, which the database's fraction of days gives exactly."""
_TABLES = [table for table in metadata.sorted_tables if table.name != "request_rates"]
_AMOUNTS = {"bytes", "tokens", "cost", "model_bytes", "used", "attempt"}
_RANDOM = re.compile(
    r"(?<=[-_])[0-9A-Za-z]{24}\b|whsec_\S+|\bft-[0-9A-Za-z_-]{5}(?!\S)|(?<![\w-])[\w-]{32,}"
)


def _rows(p: str, organization: str, first_slot: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of one tenant: of a table, with what is not left to `_filled`."""
    other = {"a": "b", "b": "a"}[p]
    tuned = f"ft:some-base:{organization}::{p}-done"
    limits = {"max_bytes": 5300, "max_queued": 7, "max_cost_per_month": 9.5}
    used = {"used": 100.0, "used_at": NOW - 50, "model_bytes": 40}
    of = {"organization": organization}
    for name, values in {
        p: {"limits": limits, "max_slots": 7, "name": f"The {p}", **used},
        f"{p}-old": {"archived_at": NOW - 9},
        f"{p}-going": {"archived_at": NOW - 70, "deleted_at": NOW - 60, "name": "Going"},
        f"{p}-new": {"archived_at": NOW - 59, "deleted_at": NOW - 59},
        f"{p}-gone": {"deleted_at": NOW - 99, "erased_at": NOW - 9},
    }.items():
        yield "projects", {"id": name, **of, **values}
    for name, values in {
        "key": {"expires_at": NOW + 1000, "created_at": NOW - 864000, "scope": "admin"},
        "key0": {"revoked_at": NOW - 5},
        "key1": {"expires_at": NOW},
        "key2": {"created_at": NOW - 30, "last_used_at": NOW - 60},
        "me": {"identity": "me", "signed_in_at": NOW - 20, "expires_at": NOW + 20, "scope": "user"},
        "she": {"identity": f"{p}-she", "signed_in_at": NOW - 30, "expires_at": NOW + 30},
        "mine": {"ends_with": f"{p}-me", "expires_at": NOW + 20, "latest_end": NOW + 400},
    }.items():
        digest = digest_of(f"secret-of-{p}-{name}-----")
        yield "keys", {"id": f"{p}-{name}", "digest": digest, "scope": "read", **values}
    for name, kind, key, ends in (
        ("session", "session", "key", 60),
        ("over", "session", "key", 0),
        ("link", "link", "key", 60),
        ("browser", "session", "me", 60),
        ("login", "login", "she", 60),
        ("state", "state", "me", 60),
    ):
        digest = digest_of(f"{p}-{name}")
        row = {"digest": digest, "kind": kind, "key_id": f"{p}-{key}", "expires_at": NOW + ends}
        yield "sessions", row
    for name, values in {
        "file": {"bytes": 1000, "sha256": "s1", "created_at": NOW - 100},
        "same": {"bytes": 200, "sha256": "s1", "created_at": NOW - 99, "purpose": "batch"},
        "keyed": {"bytes": 7, "sha256": "s2", "idempotency_key": f"{p}-k"},
        "needed": {"bytes": 300, "deleted_at": NOW - 10},
        "deleted": {"bytes": 30, "deleted_at": NOW - 10},
        "freed": {"bytes": 31, "deleted_at": NOW - 10, "freed_at": NOW - 5},
        "over": {"bytes": 32, "expires_at": NOW},
        "result": {"bytes": 33, "expires_at": NOW + 1},
    }.items():
        yield "files", {"id": f"{p}-{name}", **values}
    yield from _jobs(p, tuned)
    for name, values in {
        "engine": {"ranks": 2, "use": {f"{p}-seat": 20.0, f"{p}-seat2": 40.0}, "joules": 50.0},
        "idle": {"host": "h2", "ranks": 1, "closing_at": NOW - 3, "room": 77},
        "ended": {"ended_at": NOW - 100, "closing_at": NOW - 120},
    }.items():
        times = {"created_at": NOW - 200, "divided_at": NOW - 10}
        money = {"price": 3_600_000_000, "currency": "EUR", "grams_per_kwh": 360.0}
        row = {"id": f"{p}-{name}", "host": "h1", "share_key": "s", "most_seats": 3}
        yield "engines", {**row, **times, **money, **values}
    for slot, (host, job, engine) in enumerate(
        (
            *(("h1", "run", None), ("h1", "run", None), ("h2", "lead", None)),
            *(("h1", "seat", "engine"), ("h1", "seat", "engine"), ("h2", "done", "idle")),
        )
    ):
        row = {"host": host, "slot": first_slot + slot, "job_id": f"{p}-{job}", "attempt": 1}
        row |= {"engine_id": engine and f"{p}-{engine}", "taken_at": NOW - 100 - slot}
        yield "slots", row
    for name, size, status, ends in (
        *(("up", 500, "pending", 100), ("late", 501, "pending", 0)),
        *(("whole", 502, "completed", 100), ("off", 503, "cancelled", 100)),
    ):
        row = {"id": f"{p}-{name}", "bytes": size, "status": status, "expires_at": NOW + ends}
        yield "uploads", row
    for name, size, key in (("part", 300, None), ("part2", 200, f"{p}-pk")):
        row = {"id": f"{p}-{name}", "upload_id": f"{p}-up", "bytes": size, "idempotency_key": key}
        yield "upload_parts", row
    for name, model, grantee in (
        *(("given", tuned, other), ("own", tuned, p)),
        *(("step", f"{tuned}:ckpt-step-5", other), ("gone", f"{tuned}-x", other)),
    ):
        yield "permissions", {"id": f"{p}-{name}", "model": model, "grantee": grantee}
    for model, erased in (
        *((f"{tuned}-x", None), (f"{tuned}-y", NOW - 100), (f"{tuned}:ckpt-step-10", None)),
        (f"ft:some-base:{organization}::{p}-del", None),
    ):
        yield "deleted_models", {"model": model, "deleted_at": NOW - 200, "erased_at": erased}
    for name, kinds in (("hook", ["fine_tuning.job.cancelled"]), ("mute", [])):
        old = {"old_secret": "old", "old_secret_expires_at": NOW + (5 if name == "hook" else 0)}
        yield "webhook_endpoints", {"id": f"{p}-{name}", "event_types": kinds, **old}
    for name, hook, tries, values in (
        ("due", "hook", 1, {"next_try_at": NOW, "created_at": NOW - 100}),
        ("wait", "hook", 1, {"next_try_at": NOW + 120, "created_at": NOW - 90}),
        ("ahead", "mute", 1, {"next_try_at": NOW + 121, "created_at": NOW - 80}),
        ("sent", "hook", 2, {"finished_at": NOW - 100, "created_at": NOW - 120}),
    ):
        row = {"id": f"{p}-{name}", "endpoint_id": f"{p}-{hook}", "tries": tries, **values}
        yield "webhook_deliveries", row
    for name, age in (("first", 100), ("second", 50), ("third", 50)):
        yield "audit", {"id": f"{p}-{name}", "created_at": NOW - age, "type": "file.deleted"}
    for key, day, tokens in (
        ("", 10_000, 1),
        (f"{p}-key", 10_000, 2),
        ("", 9982, 4),
        ("", 9981, 8),
    ):
        row = {"key_id": key, "day": day, "tokens": tokens, "cost": tokens * 1_000_000}
        yield "usage", {**row, "currency": "EUR" if tokens > 2 else None, "slot_seconds": 0.5}
    for name, values in {
        "sweep": {},
        "swept": {"finished_at": NOW - 100, "best_job": f"{p}-best"},
        "hidden": {"finished_at": NOW - 100, "deleted_at": NOW - 9},
    }.items():
        yield "sweeps", {"id": f"{p}-{name}", **values}
    for name, values in {
        "chat": {"label": True, "pairs": {"k": "v"}, "created_at": NOW - 20},
        "chat2": {"label": False, "created_at": NOW - 10, "model": "n"},
        "said": {"kind": "response", "created_at": NOW - 10},
        "past": {"expires_at": NOW, "created_at": NOW - 30},
    }.items():
        row = {"id": f"{p}-{name}", "model": "m", "bytes": 100, "expires_at": NOW + 60}
        yield "stored_chats", {**row, **values}
    yield "chat_metadata", {"chat_position": {"a": 1, "b": 5}[p], "key": "k", "value": "v"}
    week = 7 * 86_400.0
    for name, values in {
        "open": {"used_at": NOW - 5},
        "closed": {"used_at": NOW - 5, "finished_at": NOW - 86_400, "finish_reason": "done"},
        "unused": {"used_at": NOW - 30 * week},
    }.items():
        yield "tinker_sessions", {"id": f"{p}-{name}", "bytes": 50, **values}
    for name, owns, used_at in (
        *(("sampler", True, NOW - 60), ("shared", False, NOW - 61)),
        *(("ownless", False, NOW - 30 * week), ("owner", True, NOW - 59)),
    ):
        row = {"id": f"{p}-{name}", "session_id": f"{p}-open", "owns_weights": owns}
        yield "tinker_samplers", {**row, "clients": 1, "used_at": used_at}
    for name, values in {
        "ask": {},
        "ask2": {"sampler_id": f"{p}-shared"},
        "told": {"answer": b"yes", "answered_at": NOW - 60},
        "told2": {"error": {"error": "no"}, "answered_at": NOW - 59},
    }.items():
        yield "tinker_samples", {"id": f"{p}-{name}", "sampler_id": f"{p}-sampler", **values}
    for name in ("eval", "eval2"):
        yield "evals", {"id": f"{p}-{name}", "bytes": 60}
    for name, eval_name, status, owner, until in (
        *(("r1", "eval", "queued", None, 0), ("r2", "eval", "in_progress", "me", 30)),
        *(("r3", "eval", "completed", "me", 0), ("r4", "eval2", "in_progress", "he", 0)),
    ):
        row = {"id": f"{p}-{name}", "eval_id": f"{p}-{eval_name}", "status": status}
        until = NOW + until if owner else 0.0
        yield "eval_runs", {**row, "owner": owner, "owned_until": until, "bytes": 70}
    for name, run, number, status in (("i1", "r2", 0, "pass"), ("i2", "r2", 1, "fail")):
        row = {"id": f"{p}-{name}", "run_id": f"{p}-{run}", "number": number, "status": status}
        yield "eval_items", row


def _jobs(p: str, tuned: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Jobs in every state, with what hangs on them."""
    running = {"state": "running", "phase": "training", "attempt": 1, "looked_at": NOW - 30}
    money = {"price": 3_600_000_000, "currency": "EUR"}
    held = {"taken_at": NOW - 100, "ends_at": NOW + 50, "slots": 2, "left_seconds": 50.0, **money}
    seated = {**running, **held, "engine_id": f"{p}-engine", "share_key": "s", "host": "h1"}
    over = {"state": "succeeded", "finished_at": NOW - 100, "attempt": 1, "work": 5.0}
    sampled = {"method": {"type": "reinforcement"}, "metadata": {"k": "v"}}
    paused = {"state": "paused", "desired": "pause"}
    size = {"held": 3, "batch": 4, "batch_tokens": 5, "room": 6, "gain": 0.5}
    for name, values in {
        "wait": {"queued_at": NOW - 300, "request": {"training_file": f"{p}-needed"}},
        "first": {"queued_at": NOW - 200, "priority": 1, "slots": 2, "host": "h2"},
        "share": {"queued_at": NOW - 100, "share_key": "s", "sweep_id": f"{p}-sweep"},
        "later": {"queued_at": NOW - 90, "not_before": NOW + 30},
        "large": {
            "queued_at": NOW - 80,
            "slots": 9,
            "spec": {"parent": {"job_id": f"{p}-x", "path": "/x"}},
        },
        "valid": {"state": "validating_files", "sweep_id": f"{p}-sweep", "looked_at": NOW - 30},
        "run": {**running, **held, "host": "h1", "request": sampled, "grams_per_kwh": 360.0},
        "lead": {**running, "host": "h2", "lease_token": f"{p}-t", "lease_expires_at": NOW + 60},
        "seat": {**seated, "seat": size, "priority": 2},
        "seat2": {**seated, "ends_at": NOW + 70, "looked_at": NOW - 31},
        "stop": {"state": "cancelled", "phase": "stopping", "host": "h1", "attempt": 1}
        | {"finished_at": NOW - 5, "looked_at": NOW + 16},
        "pause": {**paused, "reason": "paused_by_user", "name": "Called", "base": "b2"},
        "maint": {**paused, "reason": "maintenance"},
        "done": {**over, "result_file": f"{p}-result"}
        | {"held_seconds": 10.0, "slot_seconds": 20.0, "planned_seconds": 9.0},
        "best": {**over, "sweep_id": f"{p}-swept", "trimmed_at": NOW - 1},
        "compared": {**over, "sweep_id": f"{p}-sweep", "finished_at": NOW - 101},
        "fail": {"state": "failed", "finished_at": NOW - 99, "reason": "worker_error"},
        "del": {**over, "deleted_at": NOW - 60},
    }.items():
        row = {"id": f"{p}-{name}", "state": "queued", "desired": "run", "base": "some-base"}
        row |= {"spec": {"tuned_name": f"{tuned[:-4]}{name}"}}
        row |= {"slots": 1, "nodes": 1, "generation": 1, "signalled": 1, "failed_at_step": -1}
        yield "jobs", {**row, "version": 1, "ingested": -1, **values}
    start = {"a": 0, "b": 18}[p]
    for place in range(1, 19):
        pair = ("k", "v") if place == 7 else ("", "")
        yield (
            "job_metadata",
            dict(zip(("job_position", "key", "value"), (start + place, *pair), strict=True)),
        )
    loss = {"step": 5, "total_steps": 9, "train_loss": 1.5}
    for number, (job, attempt, metrics) in enumerate(
        (
            *(("run", None, None), ("run", 1, loss), ("run", 1, loss | {"valid_loss": 2.5})),
            *(("run", 1, loss | {"step": 7}), ("run", None, None), ("done", 1, loss)),
            *(("done", None, None), ("del", 1, loss), ("best", None, None)),
        )
    ):
        row = {"id": f"{p}-e{number}", "job_id": f"{p}-{job}", "attempt": attempt}
        row |= {"segment": attempt and 0, "line": attempt and number, "metrics": metrics}
        text = "Pause requested." if number == 4 else f"event {number}"
        yield "events", {**row, "message": text, "created_at": NOW - 20 + number}
    for name, job, step, attempt in (
        *(("c5", "done", 5, 1), ("c5b", "done", 5, 2), ("c10", "done", 10, 2)),
        *(("r5", "run", 5, 1), ("d5", "del", 5, 1)),
    ):
        row = {"id": f"{p}-{name}", "job_id": f"{p}-{job}", "name": name}
        yield "checkpoints", {**row, "step": step, "attempt": attempt, "metrics": loss}
    for job, number, values in (
        ("run", 0, {"next_try_at": NOW}),
        ("run", 1, {"owner": "me", "lease_expires_at": NOW + 30, "tries": 2}),
        ("lead", 0, {"next_try_at": NOW + 9}),
        ("done", 0, {"finished_at": NOW - 1, "owner": "me"}),
        ("fail", 0, {"owner": "he", "lease_expires_at": NOW + 30}),
    ):
        yield "integrations", {"job_id": f"{p}-{job}", "number": number, **values}


def _filled(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with something in each column that must have something."""
    empty: dict[str, Any] = {}
    for column in table.columns:
        if not (column.nullable or column.server_default is not None or column.name == "position"):
            own = {"StorableJson": {}, "StorableText": "x", "ForeignKey": "x"}
            kind = type(column.type).__name__
            empty[column.name] = own[kind] if kind in own else column.type.python_type()
    return empty | dict(row)


def _fill(store: Store) -> None:
    rows = [
        (name, {"project_id": p, **row})
        for p, organization, first_slot in (("a", "acme", 0), ("b", "other", 6))
        for name, row in _rows(p, organization, first_slot)
    ]
    for _, row in rows:
        if row["project_id"] == "b":  # so that the sum of one is not that of the other
            row |= {name: row[name] + 1 for name in _AMOUNTS & row.keys() if row[name]}
    for host, slots, age in (("h1", 8, 0), ("h2", 4, 60), ("h3", 16, 61), ("h4", 9, -61)):
        rows.append(("hosts", {"host": host, "slots": slots, "seen_at": NOW - age}))
    with store.writing() as connection:
        for table in _TABLES:
            of_table = [row for name, row in rows if name == table.name]
            for position, row in enumerate(of_table, 1):
                own = {"position": position, **row}
                own = {column: own[column] for column in own if column in table.c}
                connection.execute(insert(table).values(_filled(table, own)))


@cache
def _database() -> bytes:
    """A database file with both tenants' rows."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ft.db"
        store = Store(new_sqlite_database(path))
        _fill(store)
        store.close()
        return path.read_bytes()


def two_tenants(path: Path) -> Store:
    """A store with the rows of the projects a and b, whose clock stands at `NOW`."""
    path.write_bytes(_database())
    store = Store(f"sqlite:///{path}")

    def stop(connection: sqlite3.Connection, _: object) -> None:
        connection.create_function("julianday", 1, lambda _: NOW / 86_400 + 2_440_587.5)

    event.listen(store._engine, "connect", stop)
    return store


def two_tenants_on_postgresql(url: str) -> Store:
    """The same in an empty database of PostgreSQL."""
    store = Store(url)

    def stop(connection: Any, _: object) -> None:
        connection.execute("CREATE SCHEMA IF NOT EXISTS still")
        connection.execute(
            "CREATE OR REPLACE FUNCTION still.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
            f"AS $$ SELECT to_timestamp({NOW:.0f}) $$"
        )
        connection.execute("SET search_path = still, pg_catalog, public")
        connection.commit()

    event.listen(store._engine, "connect", stop)
    _fill(store)
    return store


Rows = dict[str, dict[str, dict[str, Any]]]


def rows_of(store: Store) -> Rows:
    """Every row of every table, by its key."""
    found: Rows = {}
    with store.reading() as connection:
        for table in _TABLES:
            names = ["id"] if "id" in table.c else [column.name for column in table.primary_key]
            found[table.name] = {
                "/".join(str(row[name]) for name in names): dict(row)
                for row in connection.execute(select(table)).mappings()
            }
    return found


def changes(before: Rows, after: Rows) -> list[str]:
    """What is different, a line for rows of a table that changed alike: the columns that changed,
    rows that are gone, or new ones with the columns that say something.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, rows in after.items():
        for key in before[name]:
            if key not in rows:
                alike.setdefault((f"- {name}", ""), []).append(key)
        for key, row in rows.items():
            old = before[name].get(key)
            if old == row:
                continue
            new = {
                column: row[column] for column in row if old is None or row[column] != old[column]
            }
            if old is None:
                told = ("type", "target", "detail") if name == audit.name else row
                new = {c: row[c] for c in told if row[c] and c not in ("id", "position")}
                new = {column: value for column, value in new.items() if value != key}
            mark = "+" if old is None else "~"
            columns = without_random(shown(new, ""))
            alike.setdefault((f"{mark} {name}", columns), []).append(key)
    return [
        without_random(f"{what} {' '.join(_short(what, keys))}{columns and ': '}{columns}")
        for (what, columns), keys in alike.items()
    ]


def _short(what: str, keys: list[str]) -> list[str]:
    """Keys of rows, those of sessions in short: a new one's is random."""
    if what.endswith(" sessions"):
        return ["*"] if what.startswith("+") else [key[:4] for key in keys]
    return keys


def shown(value: Any, opening: str = "{") -> str:
    """A value as text: a record by its id, or by what it has besides its defaults; times as seconds
    from now.
    """
    match value:
        case bool() | None:
            return str(value)
        case float() | int() if abs(value - NOW) < 100 * 86_400:
            return "now" if value == NOW else f"now{value - NOW:+.9g}"
        case Enum():
            return str(value.value)
        case str():
            return value if len(value) <= 100 else f"...{value[-53:]}"
        case BaseModel():
            return shown(value.model_dump(exclude_none=True))
        case Mapping():
            pairs = [f"{shown(k)}={shown(v)}" for k, v in value.items()]
            return f"{{{' '.join(sorted(pairs))}}}" if opening else " ".join(pairs)
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(shown, value)))}}}"
        case Page():
            return shown(value.data) + (" and more" if value.has_more else "")
        case float():
            return f"{value:.9g}"
        case bytes() | int():
            return repr(value)
        case Sequence():
            return f"[{', '.join(map(shown, value))}]"
        case LimitError():  # with its numbers
            return f"!{value.code}: {str(value)[:60]}"
        case FtError():
            return f"!{value.code}"
        case Claim():
            return f"claimed {value.job.id} at {shown(value.now)}"
        case _ if is_dataclass(value):
            return _shown_record(value)
        case _:
            return str(value)


def _shown_record(record: Any) -> str:
    known = {field.name: getattr(record, field.name) for field in fields(record)}
    if "id" in known and {"project_id", "job_id", "run_id", "organization", "spec"} & known.keys():
        return str(known["id"])
    said = [
        f"{field.name}={shown(known[field.name])}"
        for field in fields(record)
        if known[field.name] and known[field.name] != field.default
    ]
    return f"{type(record).__name__}({', '.join(said)})"


def without_random(text: str) -> str:
    """A text whose random ids and secrets are replaced by a star."""
    return _RANDOM.sub("*", text)
