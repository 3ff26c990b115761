"""`ft doctor`: what an installation lacks, before a job meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ft_service.cli.local_store import local_store, with_sample_base
from ft_service.cli.output import (
    Json,
    is_terminal,
    load_settings,
    print_json,
    print_table,
    print_text,
)
from ft_service.errors import FtError, UnavailableError
from ft_service.settings import Settings

if TYPE_CHECKING:
    from ft_service.control.checkup import Finding
    from ft_service.launcher.protocol import ListedAttempt
    from ft_service.store.sql import Store


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    end: Annotated[
        bool,
        typer.Option("--end", help="End the processes that it finds on the cluster, for good."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Check this installation: PyTorch, GPUs, disk, home, port, models, database.

    Each line says what to do. On a cluster it also finds training processes that this database does
    not know: they hold GPUs until they end. The exit code is 1 if something is at fault, or such
    processes are left.
    """
    # It imports what few commands need.
    from ft_service.control.checkup import (
        Finding,
        Verdict,
        checkup,
        database,
    )

    settings = with_sample_base(load_settings())
    findings = list(checkup(settings))
    orphans: list[ListedAttempt] = []
    try:
        with local_store(settings) as store:
            findings.append(database(settings, store.now))
            orphans = _orphans(settings, store, end=end)
    except FtError as error:
        where = "database" if findings[-1].what != "database" else "cluster"
        findings.append(Finding(where, Verdict.FAULT, str(error)))
    if as_json:
        unknown = [{**asdict(attempt), "ended": end} for attempt in orphans]
        print_json({"checks": [asdict(finding) for finding in findings], "orphans": unknown})
    else:
        _show(findings)
    if orphans and not as_json:
        print_table(
            ("JOB OF THE CLUSTER", "OF", "SINCE"),
            [(a.name, a.job_id, a.created_at) for a in orphans],
        )
        print_text(
            "All of them were ended."
            if end
            else "This database does not know their jobs. End them: ft doctor --end"
        )
    faults = any(finding.verdict is Verdict.FAULT for finding in findings)
    return 1 if faults or (orphans and not end) else 0


def _show(findings: Sequence[Finding]) -> None:
    if not is_terminal():
        rows = [
            (finding.verdict, finding.what, finding.found, finding.advice) for finding in findings
        ]
        print_table(("", "CHECK", "FOUND", "WHAT TO DO"), rows)
        return
    for finding in findings:
        print_text(f"{finding.verdict:<6} {finding.what:<14} {finding.found}")
        if finding.advice:
            print_text(f"{'':<21} → {finding.advice}")


def _orphans(settings: Settings, store: Store, *, end: bool) -> list[ListedAttempt]:
    """Find attempts that run in the cluster without a job of this database, and end them if asked.

    Raises UnavailableError.
    """
    from ft_service.control.jobs.orphans import find_orphans
    from ft_service.control.places.launcher_choice import new_launchers
    from ft_service.launcher.protocol import LaunchError, ListsAttempts

    launchers = (
        new_launchers(settings, store.leases.move_host) if settings.launcher != "local" else []
    )
    places = [launcher for launcher in launchers if isinstance(launcher, ListsAttempts)]
    try:
        found = [
            (launcher, attempt) for launcher in places for attempt in find_orphans(store, launcher)
        ]
        for launcher, attempt in found if end else []:
            launcher.end_unfinished(attempt.name)
    except LaunchError as error:
        raise UnavailableError(str(error)) from None
    finally:
        for launcher in places:
            launcher.close()
    return [attempt for _, attempt in found]
