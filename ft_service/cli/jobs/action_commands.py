"""`ft pause`, `resume`, `cancel`, `rename` and `rm`: change or remove a job, a file or a tuned
model.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from ft_service.cli.jobs.job_argument import SEARCHED, JobId, OneJobId, connect_to_job, find_job
from ft_service.cli.local_store import local_store, settings_of_server
from ft_service.cli.output import Json, connect, print_json, print_text
from ft_service.client.client import Client
from ft_service.client.responses import RemoteFile, RemoteJob
from ft_service.errors import SpecError
from ft_service.jobs.states import State
from ft_service.spec import is_tuned
from ft_service.wording import counted

Ranks = Annotated[
    int | None, typer.Option(min=1, help="Resume with this number of ranks (default: as before).")
]


def register(app: typer.Typer) -> None:
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)
    app.command()(rename)
    app.command("rm")(remove)


AllJobs = Annotated[
    bool,
    typer.Option(
        "--all",
        help="For maintenance, in this machine's database: those of all projects that are to run; "
        "`ft resume --all` resumes just these.",
    ),
]


def cancel(job_id: JobId, as_json: Json = False) -> None:
    """Stop a job for good. Its checkpoints stay."""
    with connect_to_job(job_id, only_one=True, fit=lambda job: not job.over) as (client, job_id):
        _show(client.cancel(job_id), as_json)


def pause(job_id: OneJobId = None, all_jobs: AllJobs = False, as_json: Json = False) -> None:
    """Stop a job at a checkpoint and free its processors, until it is resumed."""
    if (job_id := _one_or_all(job_id, all_jobs)) is None:
        _for_all("pause", as_json)
        return
    with connect_to_job(job_id, fit=lambda job: not (job.over or job.paused)) as (client, job_id):
        job = client.pause(job_id)
    if as_json or job.status != State.RUNNING:
        _show(job, as_json)
    else:
        print_text(f"{job.id} will be paused as soon as it has written a checkpoint.")
        print_text(f"Resume it: ft resume {job.id}")


def resume(
    job_id: OneJobId = None,
    nproc_per_node: Ranks = None,
    max_cost: Annotated[
        float | None, typer.Option(metavar="AMOUNT", help="A new limit of what the job may cost.")
    ] = None,
    all_jobs: AllJobs = False,
    as_json: Json = False,
) -> None:
    """Resume a paused job from its checkpoint."""
    if (job_id := _one_or_all(job_id, all_jobs)) is None:
        for option, value in (("nproc_per_node", nproc_per_node), ("max_cost", max_cost)):
            if value is not None:
                raise SpecError(
                    f"--{option.replace('_', '-')} is for one job: leave out --all.", param=option
                )
        _for_all("resume", as_json)
        return
    with connect_to_job(job_id, fit=lambda job: not job.over) as (client, job_id):
        _show(client.resume(job_id, nproc_per_node, max_cost), as_json)


def _one_or_all(job_id: str | None, all_jobs: bool) -> str | None:
    """Return the given job; None: all. Raises SpecError unless one of the two was given."""
    if (job_id is None) is not all_jobs:
        raise SpecError("Name one job, or give --all.", param="id")
    return job_id


def _for_all(verb: Literal["pause", "resume"], as_json: bool) -> None:
    with local_store(settings_of_server()) as store:
        number = store.jobs.pause_all() if verb == "pause" else store.jobs.resume_all()
    if as_json:
        print_json({verb: number})
        return
    jobs = counted(number, "job")
    if verb == "resume":
        print_text(f"{jobs} of those that were paused so: resumed.")
        return
    print_text(f"{jobs} of all projects: each stops as soon as it has written a checkpoint.")
    print_text("Jobs that are created from now on start. Afterwards: ft resume --all")


def rename(
    job_id: JobId,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help='What to call it; "": as before, by its suffix.'),
    ] = None,
    note: Annotated[
        str | None, typer.Option(metavar="TEXT", help='A note about it; "": none.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Give a job another name, or a note. Its tuned model keeps its own name."""
    given = {"name": name, "note": note}
    texts = {part: text or None for part, text in given.items() if text is not None}
    if not texts:
        raise SpecError("Give the job a NAME, or --note TEXT.", param="name")
    with connect_to_job(job_id, only_one=True) as (client, job_id):
        job = client.call_job(job_id, texts)
    if as_json:
        print_json(job.model_dump())
        return
    print_text(f"{job.id} is called {job.name or job.suffix or job.id}.")
    if job.note:
        print_text(f"Note: {job.note}")


def remove(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A file (file-…), or a tuned model: its name (ft:…) or its job."
        ),
    ],
    job: Annotated[
        bool, typer.Option("--job", help="The whole job: its record and all that it has made.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove an uploaded file, or the tuned model of a job.

    The job's own record stays, and so do its checkpoints, until `ft prune` or an age limit takes
    its run directory; with --job, a job that is over goes with its record, events, logs,
    checkpoints and models, and the files that were uploaded for it stay.
    """
    if job:
        _remove_job(target, yes, as_json)
        return
    with connect() as client:
        if target.startswith("file-"):
            file = _file(client, target)
            what = f"the file {file.filename} ({file.id})"
            name = file.id
        else:
            name = target if is_tuned(target) else _tuned_model(client, target)
            what = f"the tuned model {name}"
        if not yes:
            ask_to_remove(what)
        if target.startswith("file-"):
            client.delete_file(name)
        else:
            client.delete_model(name)
    if as_json:
        print_json({"id": name, "deleted": True})
    else:
        print_text(f"Removed {what}.")


def _remove_job(word: str, yes: bool, as_json: bool) -> None:
    with connect() as client:
        found = client.job(find_job(client, word, only_one=True, fit=lambda job: job.over))
        if not yes:
            ask_to_remove(f"the job {found.id} with all that it has made")
        models = client.delete_job(found.id)
    if as_json:
        print_json({"id": found.id, "deleted": True, "deleted_models": models})
    else:
        print_text(f"Removed the job {found.id}{''.join(f', {model}' for model in models)}.")


def _file(client: Client, word: str) -> RemoteFile:
    """Return the file of an id, or of the beginning of one."""
    matching = [file for file in client.files(SEARCHED) if file.id.startswith(word)]
    if len(matching) > 1 and word not in [file.id for file in matching]:
        raise SpecError(f"{word!r} means {len(matching)} files. Give more of the id.", param="id")
    return matching[0] if len(matching) == 1 else client.file(word)


def _tuned_model(client: Client, word: str) -> str:
    job = client.job(
        find_job(client, word, only_one=True, fit=lambda job: job.fine_tuned_model is not None)
    )
    if job.fine_tuned_model is None:
        raise SpecError(f"Job {job.id} has no tuned model to remove ({job.status}).", param="id")
    return job.fine_tuned_model


def ask_to_remove(what: str) -> None:
    """Ask the user for confirmation, and abort without it. Raises SpecError without a terminal."""
    if not sys.stdin.isatty():
        raise SpecError(
            f"This would remove {what}. Say so with --yes: there is no terminal to ask on.",
            param="yes",
        )
    typer.confirm(f"Remove {what}?", abort=True)


def _show(job: RemoteJob, as_json: bool) -> None:
    if as_json:
        print_json(job.model_dump())
    else:
        print_text(f"{job.id} is {job.state_text}")
