"""`ft engines`: sets of ranks that train several jobs at once."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ft_service.cli.output import Json, connect, local_time, print_json, print_table, print_text
from ft_service.client.responses import RemoteEngine, RemoteJob


def register(app: typer.Typer) -> None:
    app.command()(engines)


def engines(as_json: Json = False) -> None:
    """List the engines that train several jobs on one base, and their jobs."""
    with connect() as client:
        live = client.engines()
    if as_json:
        print_json([engine.model_dump() for engine in live])
    elif live:
        rows = [
            (
                engine.id,
                engine.base or "",
                str(engine.ranks),
                engine.jobs_text,
                local_time(engine.created_at),
            )
            for engine in live
        ]
        print_table(
            ("ID", "BASE", "RANKS", "JOBS", "SINCE"),
            rows,
            notes=("TRAINS", [_trains(engine) for engine in live]),
        )
    else:
        print_text("No engines. Small jobs on one base share one where slots are short.")


def seat_text(job: RemoteJob, engines: Sequence[RemoteEngine]) -> str | None:
    """Return the engine that trains a job, since when, with which share of its time, and beside
    which jobs.
    """
    for engine in engines:
        for own in engine.jobs if engine.id == job.engine_id else ():
            if own.id == job.id:
                share = f", {engine.shares[own.id]} of its time" if engine.shares else ""
                others = ", ".join(other.id for other in engine.jobs if other.id != job.id)
                return (
                    f"{engine.id} since "
                    f"{local_time(own.since)}{share}{f', beside {others}' if others else ''}"
                )
    return job.engine_id


def _trains(engine: RemoteEngine) -> str | None:
    """Jobs of an engine, each with its share of the engine's time; None: it has none."""
    shares = [
        f"{job.id} ({engine.shares[job.id]})" if engine.shares else job.id for job in engine.jobs
    ]
    return ", ".join(shares) or None
