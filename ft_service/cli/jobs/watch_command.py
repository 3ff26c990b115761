"""`ft watch` and `ft logs`: follow a running job."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Annotated

import typer
from rich.console import Console

from ft_service.cli.display import Display, display_for
from ft_service.cli.jobs.engines_command import seat_text
from ft_service.cli.jobs.job_argument import JobId, connect_to_job
from ft_service.cli.output import Json, print_error, print_json, print_json_line, print_text
from ft_service.client.client import PAGE, Client
from ft_service.client.responses import RemoteEngine, RemoteJob
from ft_service.errors import SpecError
from ft_service.jobs.states import State

INTERRUPTED = 130
STOPPED = 75
ENGINE_SECONDS = 60.0
"""Time between two questions for who shares the engine of a job that is watched."""


def register(app: typer.Typer) -> None:
    app.command()(watch)
    app.command()(logs)


def watch(job_id: JobId, as_json: Json = False) -> int:
    """Show a job's progress until it finishes or is paused.

    Ctrl-C stops watching; the job keeps running.
    """
    with connect_to_job(job_id) as (client, job_id):
        return watch_job(client, job_id, as_json)


def logs(
    job_id: JobId,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print further lines as they come, until the job ends."
        ),
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10_000, help="Last N lines of each process.")
    ] = 200,
    as_json: Json = False,
) -> int:
    """Print what a job's processes have printed: supervisor, torchrun and every rank."""
    if follow and attempt is not None:
        raise SpecError(
            f"--attempt = {attempt}: cannot be combined with --follow, which shows the newest "
            "attempt. Remove one of them."
        )
    with connect_to_job(job_id) as (client, job_id):
        if follow:
            return _follow_logs(client, job_id, rank, lines, as_json)
        text = client.logs(job_id, attempt=attempt, rank=rank, lines=lines)
    if as_json:
        print_json({"id": job_id, "attempt": attempt, "rank": rank, "text": text})
    else:
        print_text(text.removesuffix("\n"))
    return 0


def watch_job(
    client: Client, job_id: str, as_json: bool, seen_messages: Collection[str] = ()
) -> int:
    """Show a job's progress until it ends or is paused, and return the exit code.

    `seen_messages`: messages that the user has already seen.
    """
    try:
        if as_json:
            job = _follow_as_json(client, job_id)
        else:
            with display_for(Console(highlight=False, emoji=False)) as display:
                job = _follow_on(display, client, job_id, seen_messages)
    except KeyboardInterrupt:
        return print_error(
            f"the job keeps running.\nWatch it again: ft watch {job_id}\nStop it: ft cancel "
            f"{job_id}",
            INTERRUPTED,
        )
    return _outcome(job, quiet=as_json)


def _follow_logs(client: Client, job_id: str, rank: int | None, lines: int, as_json: bool) -> int:
    try:
        for line in client.follow_logs(job_id, rank=rank, lines=lines):
            if as_json:
                print_json_line(line.model_dump())
            else:
                print_text(f"{line.source} | {line.line}")
    except KeyboardInterrupt:
        return print_error(
            f"the job keeps running. Follow it again: ft logs -f {job_id}", INTERRUPTED
        )
    return 0


def _follow_as_json(client: Client, job_id: str) -> RemoteJob:
    for _, events in client.follow(job_id):
        for event in events:
            print_json_line(event.model_dump())
    job = client.job(job_id)
    print_json_line(job.model_dump())
    return job


def _follow_on(
    display: Display, client: Client, job_id: str, seen_messages: Collection[str]
) -> RemoteJob:
    phase = _PhaseText(client)
    for number, (job, events) in enumerate(client.follow(job_id)):
        if not number and len(events) >= PAGE:
            display.message(
                "info",
                f"Earlier events are left out; these are the newest {PAGE}.",
                events[0].created_at,
            )
        for event in events:
            metrics = event.metrics()
            if event.message in seen_messages:
                continue
            if metrics is None:
                display.message(event.level, event.message, event.created_at)
            else:
                display.metrics(metrics, event.created_at)
        display.status(job.waiting_text or phase.of(job) or job.status)
    return client.job(job_id)


class _PhaseText:
    """Phase of a running job as text, with the engine that trains it and its share of that."""

    def __init__(self, client: Client) -> None:
        self._client, self._engines, self._asked_at = client, list[RemoteEngine](), -math.inf

    def of(self, job: RemoteJob) -> str | None:
        if not job.phase or not job.engine_id:
            return job.phase
        if time.monotonic() >= self._asked_at + ENGINE_SECONDS:
            self._engines, self._asked_at = self._client.engines(), time.monotonic()
        return f"{job.phase} in {seat_text(job, self._engines)}"


def _outcome(job: RemoteJob, *, quiet: bool) -> int:
    if job.status == State.SUCCEEDED:
        if not quiet:
            print(
                f"{job.id} has succeeded: {job.fine_tuned_model}\nGet the adapter: ft download "
                f"{job.id}"
            )
        return 0
    if job.paused:
        return print_error(f"{job.id} is paused. Resume it: ft resume {job.id}", STOPPED)
    if job.status == State.CANCELLED:
        return print_error(f"{job.id} was {job.stopped_text or 'cancelled'}.", 1)
    first, *more = (job.error_text or "no reason was given").splitlines()
    reason = (
        f"{first} The whole reason is above." if more and not quiet else job.error_text or first
    )
    return print_error(f"{job.id} has failed: {reason}", 1)
