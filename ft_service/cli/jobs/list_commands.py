"""`ft jobs`, `get`, `events`, `checkpoints` and `files`: lists of a server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from ft_service.cli.jobs.engines_command import seat_text
from ft_service.cli.jobs.job_argument import PREFIX, JobId, connect_to_job
from ft_service.cli.output import (
    Json,
    connect,
    is_terminal,
    local_time,
    print_fields,
    print_json,
    print_table,
    print_text,
)
from ft_service.client.client import Client
from ft_service.client.progress import clock
from ft_service.client.responses import RemoteEvaluation, RemoteJob, scores_text, shown
from ft_service.errors import FtError
from ft_service.jobs.states import State
from ft_service.plan.plan_text import bytes_text
from ft_service.rundir.evaluations import Forgetting
from ft_service.sweeps.search_space import values_text

_SHORT = 8
"""Letters of an id on a terminal: enough to identify it."""

Newest = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most N, newest first.")]
NewestLast = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show the newest N.")]


def register(app: typer.Typer) -> None:
    app.command("jobs")(list_jobs)
    app.command()(get)
    app.command()(events)
    app.command()(checkpoints)
    app.command()(files)


def list_jobs(
    limit: Newest = 20,
    state: Annotated[State | None, typer.Option(help="Only jobs in this state.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Only jobs on this base model.", metavar="MODEL")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Only jobs with this in their name or suffix.", metavar="TEXT"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the newest jobs."""
    with connect() as client:
        newest = client.jobs(limit, status=state, base=base, suffix=name)
    if as_json:
        print_json([job.model_dump() for job in newest])
    elif newest:
        priced = any(job.cost is not None for job in newest)
        rows = [_row(job, priced) for job in newest]
        costs = ("COST",) if priced else ()
        print_table(
            ("ID", "SUFFIX", "BASE", "STATUS", "STEP", "VALID", "TOOK", *costs),
            rows,
            notes=("WHY", [_note(job) for job in newest]),
        )
    elif state or base or name:
        print_text("No job is like that. All jobs: ft jobs")
    else:
        print_text("No jobs yet. Create one: ft submit SPEC")


def get(job_id: JobId, as_json: Json = False) -> None:
    """Show one job: its state, its options, its files and its checkpoints."""
    with connect_to_job(job_id) as (client, job_id):
        job = client.job(job_id)
        if as_json:
            print_json(job.model_dump())
            return
        points = client.checkpoints(job_id)
        seats = client.engines() if job.engine_id is not None else []
        evaluated = client.evaluations(job_id, limit=1) if job.evaluation else []
        names = {
            file_id: _file_name(client, file_id)
            for file_id in (job.training_file, job.validation_file)
            if file_id
        }
    steps = ", ".join(str(point.step_number) for point in reversed(points))
    print_fields(
        [
            ("id", job.id),
            ("name", job.name),
            ("note", job.note),
            ("suffix", job.suffix),
            ("status", job.state_text),
            ("error", job.error_text),
            ("stopped", job.stopped_text),
            (
                "sweep",
                f"{job.sweep['id']}: {values_text(job.sweep['values'])}" if job.sweep else None,
            ),
            ("engine", seat_text(job, seats)),
            ("pending reason", job.pending_reason if job.status != "queued" else None),
            ("model", job.model),
            ("tuned model", job.fine_tuned_model),
            ("progress", _progress(job)),
            ("validation loss", _valid(job)),
            ("evaluation", _evaluation(evaluated)),
            *_forgetting(job),
            *((f"accuracy, {name}", task.text) for name, task in job.suites.items()),
            (
                "trained tokens",
                f"{job.trained_tokens:,}" if job.trained_tokens is not None else None,
            ),
            ("took", clock(job.seconds(time.time())) if job.finished_at else None),
            ("cost", job.cost_text),
            ("energy", job.energy and job.energy.text),
            ("created", local_time(job.created_at)),
            ("finished", local_time(job.finished_at)),
            ("checkpoints", f"at step{'s' if len(points) > 1 else ''} {steps}" if steps else None),
            ("training file", names.get(job.training_file or "")),
            ("validation file", names.get(job.validation_file or "")),
            ("seed", str(job.seed) if job.seed is not None else None),
            (
                "validation split",
                f"{job.validation_split:g}" if job.validation_split is not None else None,
            ),
            *((name, shown(value)) for name, value in job.given_options.items()),
            *job.choices,
        ]
    )


def events(job_id: JobId, limit: NewestLast = 50, as_json: Json = False) -> None:
    """Print what has happened to a job, the newest last. `ft watch` continues as more happens."""
    with connect_to_job(job_id) as (client, job_id):
        known = client.events(job_id, limit=limit)
    if as_json:
        print_json([event.model_dump() for event in known])
        return
    for event in known:
        level = "" if event.level == "info" else f"{event.level}: "
        first, *more = event.message.splitlines() or [""]
        print_text(
            "\n    ".join(
                [f"{local_time(event.created_at, seconds_too=True)}  {level}{first}", *more]
            )
        )


def checkpoints(job_id: JobId, as_json: Json = False) -> None:
    """List a job's checkpoints, the newest first.

    `ft download ID --checkpoint STEP` fetches the adapter of one.
    """
    with connect_to_job(job_id) as (client, job_id):
        points = client.checkpoints(job_id)
    if as_json:
        print_json([point.model_dump() for point in points])
    elif points:
        rows = [
            (
                str(point.step_number),
                _number(point.metrics.get("train_loss")),
                _number(point.metrics.get("valid_loss")),
                local_time(point.created_at),
                point.fine_tuned_model_checkpoint,
            )
            for point in points
        ]
        titles = ("STEP", "LOSS", "VALID", "CREATED", "MODEL")
        # Names of models that differ at their end only, which would be cut.
        shown_columns = len(titles) - is_terminal()
        print_table(titles[:shown_columns], [row[:shown_columns] for row in rows])
    else:
        print_text("No checkpoints yet.")


def files(limit: Newest = 20, as_json: Json = False) -> None:
    """List the newest files that were uploaded, and the results of jobs. `ft rm ID` removes one."""
    with connect() as client:
        known = client.files(limit)
    if as_json:
        print_json([file.model_dump() for file in known])
    elif known:
        rows = [
            (
                _short_file(f.id),
                f.filename,
                bytes_text(f.bytes),
                f.purpose,
                local_time(f.created_at),
            )
            for f in known
        ]
        print_table(("ID", "NAME", "SIZE", "PURPOSE", "CREATED"), rows)
    else:
        print_text("No files yet. `ft submit SPEC` uploads those that a SPEC names.")


def _row(job: RemoteJob, priced: bool) -> tuple[str, ...]:
    """`priced`: whether there is a column of costs."""
    known = job.progress or {}
    step = f"{known['step']}/{known['total_steps']}" if known.get("total_steps") else ""
    name = job.id.removeprefix(PREFIX)[:_SHORT] if is_terminal() else job.id
    status = "stopping" if job.status == "running" and job.phase == "stopping" else job.status
    return (
        name,
        job.suffix or "",
        job.base,
        status,
        step,
        _valid(job) or "",
        clock(job.seconds(time.time())),
        *((job.cost.text if job.cost else "",) if priced else ()),
    )


def _short_file(file_id: str) -> str:
    """Return an id as `ft rm` accepts it."""
    return file_id[: len("file-") + _SHORT] if is_terminal() else file_id


def _note(job: RemoteJob) -> str | None:
    """Return why a job failed, waits or was stopped, or the engine that trains it."""
    if why := job.error_text or job.pending_reason or job.stopped_text:
        return " ".join(why.split())
    if job.engine_id is not None:
        return f"in {job.engine_id}"
    text = job.waiting_text
    return text.removeprefix("queued: ") if text and text != "queued" else None


def _progress(job: RemoteJob) -> str | None:
    known = job.progress or {}
    if not known.get("total_steps"):
        return None
    text = f"step {known.get('step')}/{known['total_steps']}"
    loss = known.get("train_loss")
    reward = known.get("train_mean_reward")
    if reward is not None:
        return f"{text} · mean reward {reward:.3f}"
    return text if loss is None else f"{text} · loss {loss:.3f}"


def _valid(job: RemoteJob) -> str | None:
    return _number((job.progress or {}).get("valid_loss")) or None


def _evaluation(newest: Sequence[RemoteEvaluation]) -> str | None:
    """Return the newest metrics, with those before training."""
    for own in newest:
        scores = scores_text(own.metrics, own.base_metrics)
        return (
            f"{f'{scores}, ' if scores else ''}at step {own.step}; the answers: ft eval"
            if own.step
            else "begun"
        )
    return None


def _forgetting(job: RemoteJob) -> list[tuple[str, str | None]]:
    """Return the comparison with the base alone."""
    if job.forgetting is None:
        return []
    found = Forgetting.model_validate({"step": 0, **job.forgetting})
    return [
        *found.figures,
        *(("warning", text) for text in found.warnings),
        ("forgetting", found.left_out),
    ]


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def _file_name(client: Client, file_id: str) -> str:
    with contextlib.suppress(FtError):
        return f"{client.file(file_id).filename} ({file_id})"
    return f"{file_id} (removed)"
