"""`ft doctor`: faults of an installation that its jobs do not show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ft_service.cli.local_store import local_store, with_sample_base
from ft_service.cli.output import Json, load_settings, print_json, print_note, print_table, print_text
from ft_service.errors import UnavailableError


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    end: Annotated[bool, typer.Option("--end", help="End the attempts that it lists, for good.")] = False,
    as_json: Json = False,
) -> int:
    """Find training processes on the cluster that this database does not know. They hold GPUs
    until they end. The exit code is 1 if some are left. Also say how many bases each
    folder of FT_MODELS holds, and how many of them are described."""
    from ft_service.control import describe_bases
    from ft_service.control.launcher_choice import new_launchers  # the database takes time to import
    from ft_service.control.orphans import find_orphans
    from ft_service.launcher.protocol import LaunchError, ListsAttempts

    settings = with_sample_base(load_settings())
    for line in describe_bases.models_report(settings):
        print_note(line)
    with local_store(settings) as store:
        launchers = new_launchers(settings, store.leases.move_host) if settings.launcher != "local" else []
        places = [launcher for launcher in launchers if isinstance(launcher, ListsAttempts)]
        if not places:
            print_note(
                f"FT_LAUNCHER = {settings.launcher}: attempts are found by their run directories; there is nothing to list."
            )
            if as_json:
                print_json([])
            return 0
        try:
            found = [(launcher, attempt) for launcher in places for attempt in find_orphans(store, launcher)]
            for launcher, attempt in found if end else []:
                launcher.end_unfinished(attempt.name)
        except LaunchError as error:
            raise UnavailableError(str(error)) from None
        finally:
            for launcher in places:
                launcher.close()
    orphans = [attempt for _, attempt in found]
    if as_json:
        print_json([{**asdict(attempt), "ended": end} for attempt in orphans])
    elif orphans:
        print_table(("JOB OF THE CLUSTER", "OF", "SINCE"), [(a.name, a.job_id, a.created_at) for a in orphans])
        print_text("All of them were ended." if end else "This database does not know their jobs. End them: ft doctor --end")
    else:
        print_text("Every attempt in the cluster belongs to a job of this database.")
    return 1 if orphans and not end else 0
