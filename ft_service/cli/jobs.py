"""Commands that talk to a server: submit, list, watch, stop and fetch jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ft_service.cli.data_files.commands import uploadable
from ft_service.cli.display import Display, display_for
from ft_service.cli.output import (
    JobId,
    Json,
    complain,
    connect,
    local_time,
    print_fields,
    print_json,
    print_json_line,
    print_table,
)
from ft_service.client.answers import RemoteJob
from ft_service.client.client import PAGE, Client
from ft_service.errors import SpecError
from ft_service.jobs.states import State
from ft_service.local.spec_file import SpecFile, load_spec_file

Ranks = Annotated[int | None, typer.Option(min=1, help="Go on with so many ranks (default: as many as before).")]

INTERRUPTED = 130
STOPPED = 75


def register(app: typer.Typer) -> None:
    """Add the commands of this module, in the order in which the help lists them."""
    app.command()(submit)
    app.command("jobs")(list_jobs)
    app.command()(get)
    app.command()(watch)
    app.command()(logs)
    app.command()(download)
    app.command()(cancel)
    app.command()(pause)
    app.command()(resume)
    app.command()(models)


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML file; its paths are relative to it.")],
    follow: Annotated[bool, typer.Option("--watch", help="Stay and show the progress.")] = False,
    as_json: Json = False,
) -> int:
    """Upload a SPEC's files and create its job."""
    loaded = load_spec_file(spec)
    with connect() as client:
        job = submit_spec(client, loaded)
        if as_json:
            print_json_line(job.model_dump()) if follow else print_json(job.model_dump())
        elif follow:
            print(f"Created {job.id}.")
        else:
            print(f"Created {job.id}. Watch it: ft watch {job.id}")
        return _watch(client, job.id, as_json) if follow else 0


def submit_spec(client: Client, spec: SpecFile) -> RemoteJob:
    """Upload the files that a SPEC names and create the job. Raises SpecError if the SPEC names a model by its folder."""
    if spec.model_folder is not None:
        message = f"model = {spec.request.model!r}: a server knows models by name (`ft models`); folders are for `ft run`."
        raise SpecError(message, param="model")
    given = {"training_file": spec.training_file, "validation_file": spec.validation_file}
    uploaded: dict[str, str] = {}
    for field, data in given.items():
        if data is not None:
            with uploadable(data) as path:
                uploaded[field] = client.upload_file(path).id
    return client.create_job({**spec.body, **uploaded})


def list_jobs(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List the newest jobs."""
    with connect() as client:
        newest = client.jobs(limit)
    if as_json:
        print_json([job.model_dump() for job in newest])
    elif newest:
        rows = [(job.id, job.status, _progress(job) or "", job.model, local_time(job.created_at)) for job in newest]
        print_table(("ID", "STATUS", "PROGRESS", "MODEL", "CREATED"), rows)
    else:
        print("No jobs yet. Create one: ft submit SPEC")


def get(job_id: JobId, as_json: Json = False) -> None:
    """Show one job."""
    with connect() as client:
        job = client.job(job_id)
    if as_json:
        print_json(job.model_dump())
        return
    print_fields(
        [
            ("id", job.id),
            ("status", f"{job.status} ({job.phase})" if job.phase else job.status),
            ("pending reason", job.pending_reason),
            ("error", job.error_text),
            ("model", job.model),
            ("tuned model", job.fine_tuned_model),
            ("progress", _progress(job)),
            ("training file", job.training_file),
            ("validation file", job.validation_file),
            ("trained tokens", f"{job.trained_tokens:,}" if job.trained_tokens is not None else None),
            ("created", local_time(job.created_at)),
            ("finished", local_time(job.finished_at)),
            *job.choices,
        ]
    )


def watch(job_id: JobId, as_json: Json = False) -> int:
    """Show a job's progress until it ends or rests paused. Ctrl-C leaves the job running."""
    with connect() as client:
        return _watch(client, job_id, as_json)


def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as more is printed, until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="Of each process, the last ones.")] = 200,
    as_json: Json = False,
) -> int:
    """Print what a job's processes have printed: supervisor, torchrun and every rank."""
    if follow and attempt is not None:
        raise SpecError(f"--attempt = {attempt}: has no effect with --follow, which shows the newest. Leave one out.")
    with connect() as client:
        if follow:
            return _follow_logs(client, job_id, rank, lines, as_json)
        text = client.logs(job_id, attempt=attempt, rank=rank, lines=lines)
    if as_json:
        print_json({"id": job_id, "attempt": attempt, "rank": rank, "text": text})
    else:
        sys.stdout.write(text)
    return 0


def download(
    job_id: JobId,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; default: a folder named after the job.")] = None,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="Of the checkpoint at this step.")] = None,
    as_json: Json = False,
) -> None:
    """Download a finished job's adapter, or one of a checkpoint's, in the format that PEFT loads."""
    target = out or Path(job_id if checkpoint is None else f"{job_id}-step-{checkpoint}")
    with connect() as client:
        if checkpoint is None:
            client.download_adapter(job_id, target)
        else:
            client.download_checkpoint(job_id, checkpoint, target)
    if as_json:
        print_json({"id": job_id, "adapter": str(target.absolute())})
    else:
        print(f"The adapter is in {target}")


def cancel(job_id: JobId, as_json: Json = False) -> None:
    """Stop a job for good. Its checkpoints stay."""
    with connect() as client:
        _show_status(client.cancel(job_id), as_json)


def pause(job_id: JobId, as_json: Json = False) -> None:
    """Stop a job at a checkpoint and free its processors, until it is resumed."""
    with connect() as client:
        _show_status(client.pause(job_id), as_json)


def resume(job_id: JobId, nproc_per_node: Ranks = None, as_json: Json = False) -> None:
    """Let a paused job go on from its checkpoint."""
    with connect() as client:
        _show_status(client.resume(job_id, nproc_per_node), as_json)


def models(as_json: Json = False) -> None:
    """List the models that the server knows: bases and tuned ones."""
    with connect() as client:
        known = client.models()
    if as_json:
        print_json([model.model_dump() for model in known])
    elif known:
        print_table(("MODEL", "OWNER", "CREATED"), [(m.id, m.owned_by, local_time(m.created)) for m in known])
    else:
        print("The server knows no models: put Hugging Face folders below one that FT_MODELS names.")


def _progress(job: RemoteJob) -> str | None:
    known = job.progress or {}
    if not known.get("total_steps"):
        return None
    text = f"step {known.get('step')}/{known['total_steps']}"
    loss = known.get("train_loss")
    return text if loss is None else f"{text} · loss {loss:.3f}"


def _show_status(job: RemoteJob, as_json: bool) -> None:
    if as_json:
        print_json(job.model_dump())
    else:
        print(f"{job.id}: {job.status} ({job.phase})" if job.phase else f"{job.id}: {job.status}")


def _watch(client: Client, job_id: str, as_json: bool) -> int:
    try:
        if as_json:
            job = _follow_as_json(client, job_id)
        else:
            with display_for(Console(highlight=False)) as display:
                job = _follow_on(display, client, job_id)
    except KeyboardInterrupt:
        return complain(f"the job goes on. Watch it again: ft watch {job_id} · stop it: ft cancel {job_id}", INTERRUPTED)
    return _outcome(job, quiet=as_json)


def _follow_logs(client: Client, job_id: str, rank: int | None, lines: int, as_json: bool) -> int:
    try:
        for line in client.follow_logs(job_id, rank=rank, lines=lines):
            if as_json:
                print_json_line(line.model_dump())
            else:
                print(f"{line.source} | {line.line}", flush=True)
    except KeyboardInterrupt:
        return complain(f"the job goes on. Follow it again: ft logs -f {job_id}", INTERRUPTED)
    return 0


def _follow_as_json(client: Client, job_id: str) -> RemoteJob:
    for _, events in client.follow(job_id):
        for event in events:
            print_json_line(event.model_dump())
    job = client.job(job_id)
    print_json_line(job.model_dump())
    return job


def _follow_on(display: Display, client: Client, job_id: str) -> RemoteJob:
    for number, (job, events) in enumerate(client.follow(job_id)):
        if not number and len(events) >= PAGE:
            display.message("info", f"Earlier events are left out; these are the newest {PAGE}.", events[0].created_at)
        for event in events:
            metrics = event.metrics()
            if metrics is None:
                display.message(event.level, event.message, event.created_at)
            else:
                display.metrics(metrics, event.created_at)
        display.status(job.phase or job.status)
    return client.job(job_id)


def _outcome(job: RemoteJob, *, quiet: bool) -> int:
    if job.status == State.SUCCEEDED:
        if not quiet:
            print(f"{job.id} has succeeded: {job.fine_tuned_model}\nGet the adapter: ft download {job.id}")
        return 0
    if job.paused:
        return complain(f"{job.id} is paused. Let it go on: ft resume {job.id}", STOPPED)
    if job.status == State.CANCELLED:
        return complain(f"{job.id} was cancelled.", 1)
    return complain(f"{job.id} has failed: {job.error_text or 'no reason was given'}", 1)
