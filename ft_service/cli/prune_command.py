"""`ft prune`: remove files that nothing needs any more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_service.bases import cache_folder
from ft_service.cli.local_store import local_store
from ft_service.cli.output import (
    Json,
    load_settings,
    print_error,
    print_json,
    print_table,
    print_text,
)
from ft_service.data import token_folder
from ft_service.errors import UnavailableError
from ft_service.plan.plan_text import bytes_text

if TYPE_CHECKING:
    from ft_service.control.cleanup.pruning import Removal


def register(app: typer.Typer) -> None:
    app.command()(prune)


def prune(
    runs_days: Annotated[
        float | None, typer.Option(min=0, help="Run directories of jobs that ended so long ago.")
    ] = None,
    checkpoints_days: Annotated[
        float | None, typer.Option(min=0, help="Checkpoints of jobs that ended so long ago.")
    ] = None,
    files_days: Annotated[
        float | None, typer.Option(min=0, help="Delete files older than N days.")
    ] = None,
    cache_days: Annotated[
        float | None,
        typer.Option(min=0, help="Quantised bases, descriptions and tokens not used for so long."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Remove, from FT_HOME or object storage, adapters of deleted models and what belongs to no job
    or file; with an age (here or in FT_KEEP_…_DAYS) also what is older. Nothing that an unfinished
    job needs is removed. The server may run meanwhile.
    """
    # The database takes time to import.
    from ft_service.control.cleanup.pruning import (
        RetentionLimits,
        plan_pruning,
        remove,
    )

    given = {
        "runs": runs_days,
        "checkpoints": checkpoints_days,
        "files": files_days,
        "cache": cache_days,
    }
    settings = load_settings(**{f"keep_{kind}_days": days for kind, days in given.items()})
    limits = RetentionLimits(**{**vars(RetentionLimits.from_settings(settings)), "leftovers": True})
    cache = cache_folder.folder_of(os.environ, settings.home)
    tokens = token_folder.folder_of(os.environ, settings.home)
    failed: dict[Path, str] = {}
    with local_store(settings) as store:
        planned = list(plan_pruning(settings, store, limits, cache=cache, tokens=tokens))
        planned.sort(key=lambda removal: (removal.kind, str(removal.path)))
        removed = list(planned) if dry_run else []
        for removal in [] if dry_run else planned:
            try:
                if remove(removal, store):
                    removed.append(removal)
            except UnavailableError as error:
                failed[removal.path] = error.message
            except OSError as error:
                failed[removal.path] = error.strerror or str(error)
    _show(removed, dry_run, as_json)
    for path, why in failed.items():
        print_error(f"{path} was not removed: {why}", 1)
    return 1 if failed else 0


def _show(removed: list[Removal], dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json([_as_dict(removal) for removal in removed])
        return
    total = bytes_text(sum(removal.bytes for removal in removed))
    if removed:
        print_table(
            ("WHAT", "BYTES", "PATH", "WHY"),
            [(r.kind, bytes_text(r.bytes), str(r.path), r.why) for r in removed],
        )
    print_text(
        f"{total} would be freed."
        if dry_run
        else f"{total} freed."
        if removed
        else "Nothing to remove."
    )


def _as_dict(removal: Removal) -> dict[str, Any]:
    return {
        "kind": removal.kind,
        "path": str(removal.path),
        "bytes": removal.bytes,
        "why": removal.why,
        "job": removal.job.id if removal.job else None,
        "file": removal.file.id if removal.file else None,
        "deleted_models": list(removal.hides),
    }
