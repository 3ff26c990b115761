"""`ft download`: download the adapter of a job or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.display import download_progress
from ft_service.cli.jobs.job_argument import JobId, connect_to_job
from ft_service.cli.output import Json, is_terminal, print_json, print_note, print_text


def register(app: typer.Typer) -> None:
    app.command()(download)


def download(
    job_id: JobId,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder; default: one named after the job."),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Download that of the checkpoint at this step."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a finished job's adapter, or one of a checkpoint's, in the format that PEFT
    loads.
    """
    with connect_to_job(job_id) as (client, job_id):
        target = out or Path(job_id if checkpoint is None else f"{job_id}-step-{checkpoint}")
        if checkpoint is not None and is_terminal():
            print_note(
                f"The server makes the adapter of step {checkpoint} when it is first asked for: "
                "that may take a minute."
            )
        with download_progress() as note:
            if checkpoint is None:
                client.download_adapter(job_id, target, note)
            else:
                client.download_checkpoint(job_id, checkpoint, target, note)
    if as_json:
        print_json({"id": job_id, "adapter": str(target.absolute())})
    else:
        print_text(f"The adapter is in {target}")
