"""`ft pause`, `resume`, `cancel` and `rm`: what a user wants of a job, a file or a tuned model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ft_service.cli.jobs.naming import SEARCHED, JobId, find_job, reaching
from ft_service.cli.output import Json, connect, print_json, tell
from ft_service.client.answers import RemoteFile, RemoteJob
from ft_service.client.client import Client
from ft_service.errors import SpecError
from ft_service.jobs.states import State
from ft_service.spec import is_tuned

Ranks = Annotated[int | None, typer.Option(min=1, help="Go on with so many ranks (default: as many as before).")]


def register(app: typer.Typer) -> None:
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)
    app.command("rm")(remove)


def cancel(job_id: JobId, as_json: Json = False) -> None:
    """Stop a job for good. Its checkpoints stay."""
    with reaching(job_id, only_one=True, fit=lambda job: not job.over) as (client, found):
        _show(client.cancel(found), as_json)


def pause(job_id: JobId, as_json: Json = False) -> None:
    """Stop a job at a checkpoint and free its processors, until it is resumed."""
    with reaching(job_id, fit=lambda job: not (job.over or job.paused)) as (client, found):
        job = client.pause(found)
    if as_json or job.status != State.RUNNING:
        _show(job, as_json)
    else:
        tell(f"{job.id} will be paused as soon as it has written a checkpoint.")
        tell(f"Let it go on: ft resume {job.id}")


def resume(job_id: JobId, nproc_per_node: Ranks = None, as_json: Json = False) -> None:
    """Let a paused job go on from its checkpoint."""
    with reaching(job_id, fit=lambda job: not job.over) as (client, found):
        _show(client.resume(found, nproc_per_node), as_json)


def remove(
    target: Annotated[str, typer.Argument(metavar="ID", help="A file (file-…), or a tuned model: its name (ft:…) or its job.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove an uploaded file, or the tuned model of a job. The job's own record stays, and so do its checkpoints, until
    `ft prune` or an age limit takes its run directory."""
    with connect() as client:
        if target.startswith("file-"):
            file = _file(client, target)
            what, name = f"the file {file.filename} ({file.id})", file.id
        else:
            name = target if is_tuned(target) else _tuned_model(client, target)
            what = f"the tuned model {name}"
        if not yes:
            ask_to_remove(what)
        client.delete_file(name) if target.startswith("file-") else client.delete_model(name)
    if as_json:
        print_json({"id": name, "deleted": True})
    else:
        tell(f"Removed {what}.")


def _file(client: Client, word: str) -> RemoteFile:
    """The file whose id is, or begins as, a word."""
    begun = [file for file in client.files(SEARCHED) if file.id.startswith(word)]
    if len(begun) > 1 and word not in [file.id for file in begun]:
        raise SpecError(f"{word!r} means {len(begun)} files. Give more of the id.", param="id")
    return begun[0] if len(begun) == 1 else client.file(word)


def _tuned_model(client: Client, word: str) -> str:
    job = client.job(find_job(client, word, only_one=True, fit=lambda job: job.fine_tuned_model is not None))
    if job.fine_tuned_model is None:
        raise SpecError(f"Job {job.id} has no tuned model to remove ({job.status}).", param="id")
    return job.fine_tuned_model


def ask_to_remove(what: str) -> None:
    """Go on only if the user says so. Raises SpecError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise SpecError(f"This would remove {what}. Say so with --yes: there is no terminal to ask on.", param="yes")
    typer.confirm(f"Remove {what}?", abort=True)


def _show(job: RemoteJob, as_json: bool) -> None:
    if as_json:
        print_json(job.model_dump())
    else:
        tell(f"{job.id} is {job.state_text}")
