"""`ft download`: a job's adapter, or one of a checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.display import arriving
from ft_service.cli.jobs.naming import JobId, reaching
from ft_service.cli.output import Json, is_terminal, print_json, say, tell


def register(app: typer.Typer) -> None:
    app.command()(download)


def download(
    job_id: JobId,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; default: a folder named after the job.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="Of the checkpoint at this step.")] = None,
    as_json: Json = False,
) -> None:
    """Download a finished job's adapter, or one of a checkpoint's, in the format that PEFT loads."""
    with reaching(job_id) as (client, found):
        target = out or Path(found if checkpoint is None else f"{found}-step-{checkpoint}")
        if checkpoint is not None and is_terminal():
            say(f"The server makes the adapter of step {checkpoint} when it is first asked for: that may take a minute.")
        with arriving() as note:
            if checkpoint is None:
                client.download_adapter(found, target, note)
            else:
                client.download_checkpoint(found, checkpoint, target, note)
    if as_json:
        print_json({"id": found, "adapter": str(target.absolute())})
    else:
        tell(f"The adapter is in {target}")
