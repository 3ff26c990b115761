"""`ft sweep`: submit, show, stop and remove jobs that differ in a few options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.cli.jobs.action_commands import ask_to_remove
from ft_service.cli.jobs.job_argument import LAST, PREFIX
from ft_service.cli.jobs.submit_command import check_accepted, check_data, uploaded
from ft_service.cli.local.spec_arguments import (
    Changes,
    MaxCost,
    ModelName,
    Suffix,
    load_spec_arguments,
    with_max_cost,
)
from ft_service.cli.output import (
    Json,
    connect,
    is_terminal,
    local_time,
    print_error,
    print_json,
    print_table,
    print_text,
)
from ft_service.client.client import Client
from ft_service.client.responses import RemoteSweep, shown
from ft_service.errors import NotFoundError, SpecError
from ft_service.sweeps.search_space import values_text

app = typer.Typer(help="Run a job for each combination of values, and stop the poor ones early.")


def register(typer_app: typer.Typer) -> None:
    typer_app.add_typer(app, name="sweep")


SWEEP = "ftsweep-"
_SEARCHED = 100
_SHORT = 8
_INTERRUPTED = 130
_POLL_SECONDS = 2.0

SweepId = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The sweep: its id or the beginning of it, its suffix, or `last`."
    ),
]
Newest = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most N, newest first.")]


@app.command()
def submit(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC", help="YAML file with `sweep`; its paths are relative to it."
        ),
    ],
    model: ModelName = None,
    suffix: Suffix = None,
    changes: Changes = None,
    max_cost: MaxCost = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Wait until it is over, and show the results.")
    ] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check the data here; the server will.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check a SPEC with its sweep and its data, upload the files once and create all jobs."""
    loaded = load_spec_arguments(spec, with_max_cost(changes, max_cost), model, suffix, sweep=True)
    with connect() as client:
        loaded = check_accepted(client, loaded)
        if not unchecked:
            check_data(client, loaded)
        with uploaded(client, loaded) as body:
            sweep = client.create_sweep(body)
        if follow:
            return _watch(client, sweep, as_json)
    if as_json:
        print_json(sweep.model_dump())
    else:
        print_text(
            f"Created {sweep.id} with {len(sweep.jobs)} jobs. Show it: ft sweep show {sweep.id}"
        )
    return 0


@app.command("list")
def list_sweeps(limit: Newest = 20, as_json: Json = False) -> None:
    """List the newest sweeps."""
    with connect() as client:
        newest = client.sweeps(limit)
    if as_json:
        print_json([sweep.model_dump() for sweep in newest])
    elif newest:
        rows = [
            (
                _short(sweep.id, SWEEP),
                sweep.suffix or "",
                sweep.model,
                sweep.status,
                sweep.counts_text,
                _loss((sweep.best or {}).get("valid_loss")),
                local_time(sweep.created_at),
            )
            for sweep in newest
        ]
        best = [values_text((sweep.best or {}).get("values") or {}) for sweep in newest]
        print_table(
            ("ID", "SUFFIX", "MODEL", "STATUS", "JOBS", "VALID", "CREATED"),
            rows,
            ("BEST", best),
            whole_notes=True,
        )
    else:
        print_text("No sweeps yet. Create one: ft sweep submit SPEC")


@app.command()
def show(sweep_id: SweepId, as_json: Json = False) -> None:
    """Show a sweep's jobs, best first: what differs, how far they are, their lowest validation
    loss, why they were stopped.
    """
    with connect() as client:
        sweep = client.sweep(find_sweep(client, sweep_id))
    if as_json:
        print_json(sweep.model_dump())
    else:
        _print(sweep)


@app.command()
def cancel(sweep_id: SweepId, as_json: Json = False) -> None:
    """Stop all jobs of a sweep that are not over. Their checkpoints stay."""
    with connect() as client:
        sweep = client.cancel_sweep(find_sweep(client, sweep_id))
    if as_json:
        print_json(sweep.model_dump())
    else:
        print(f"{sweep.id}: {sweep.counts_text}")


@app.command("rm")
def remove(
    sweep_id: SweepId,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep the tuned model of the best job.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a sweep that is over, with the tuned models of its jobs.

    The jobs' own records stay.
    """
    with connect() as client:
        sweep_id = find_sweep(client, sweep_id)
        rest = "all tuned models but the best one" if keep_best else "all tuned models"
        if not yes:
            ask_to_remove(f"{sweep_id} and {rest} of its jobs")
        client.delete_sweep(sweep_id, keep_best=keep_best)
    if as_json:
        print_json({"id": sweep_id, "deleted": True})
    else:
        print(f"Removed {sweep_id}.")


def find_sweep(client: Client, word: str) -> str:
    """Return the id of the sweep that a word means.

    Raises NotFoundError if none matches, SpecError if several do.
    """
    newest = client.sweeps(1 if word == LAST else _SEARCHED)
    matching = [
        sweep.id for sweep in newest if word == LAST or sweep.id.startswith((word, SWEEP + word))
    ]
    matching = matching or [sweep.id for sweep in newest if sweep.suffix == word][:1]
    if not matching:
        if word.startswith(SWEEP):
            return word  # an old one, which the server may know
        raise NotFoundError(
            f"There is no sweep {word!r}. `ft sweep list` shows the existing ones.", param="id"
        )
    if len(matching) > 1 and word not in matching:
        raise SpecError(
            f"{word!r} means {len(matching)} sweeps: {', '.join(matching[:5])}. Give more of the "
            "id.",
            param="id",
        )
    return word if word in matching else matching[0]


def _watch(client: Client, sweep: RemoteSweep, as_json: bool) -> int:
    """Print changes until the sweep is over. Exit code 1 if no job has succeeded."""
    try:
        counts = ""
        while not sweep.over:
            if sweep.counts_text != counts and not as_json:
                counts = sweep.counts_text
                print_text(f"{sweep.id}: {counts}")
            time.sleep(_POLL_SECONDS)
            sweep = client.sweep(sweep.id)
    except KeyboardInterrupt:
        return print_error(
            f"the sweep keeps running. Show it: ft sweep show {sweep.id} · stop it: ft sweep "
            f"cancel {sweep.id}",
            _INTERRUPTED,
        )
    if as_json:
        print_json(sweep.model_dump())
    else:
        _print(sweep)
    return 0 if sweep.status == "succeeded" else 1


def _print(sweep: RemoteSweep) -> None:
    print_text(f"{sweep.id} on {sweep.model}: {sweep.status} ({sweep.counts_text})")
    titles = ("JOB", *sweep.options, "STEP", "VALID", "AT", "STATUS")
    print_table(
        titles,
        [_row(sweep, job) for job in sweep.jobs],
        notes=("WHY", [_why(job) for job in sweep.jobs]),
    )
    if sweep.cost is not None:
        print_text(f"They have cost {sweep.cost.text}.")
    if sweep.energy is not None:
        print_text(f"They have taken {sweep.energy.text}.")
    best = sweep.best
    if best is None:
        print_text(
            "No job has a validation loss yet."
            if not sweep.over
            else "No job is the best: none has succeeded."
        )
        return
    word = "Best" if sweep.over else "Best so far"
    loss = f"validation loss {best['valid_loss']:.4f}"
    print_text(f"{word}: {best['job_id']} with {values_text(best['values'])}; {loss}")
    if best["fine_tuned_model"]:
        print_text(f"Get its adapter: ft download {best['job_id']}")


def _row(sweep: RemoteSweep, job: dict[str, Any]) -> tuple[str, ...]:
    values = [shown(job["values"].get(option)) for option in sweep.options]
    step = f"{job['step']}/{job['total_steps']}" if job["total_steps"] else ""
    at = "" if job["best_step"] is None else str(job["best_step"])
    status = "stopping" if job["phase"] == "stopping" else job["status"]
    return _short(job["id"], PREFIX), *values, step, _loss(job["valid_loss"]), at, status


def _why(job: dict[str, Any]) -> str | None:
    return job["stopped"] or job["error"]


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _short(row_id: str, prefix: str) -> str:
    return row_id.removeprefix(prefix)[:_SHORT] if is_terminal() else row_id
