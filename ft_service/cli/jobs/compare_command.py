"""`ft compare`: compare two jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import typer

from ft_service.cli.jobs.job_argument import JobId, find_job, short_name
from ft_service.cli.output import Json, connect, print_json, print_table, screen_width
from ft_service.client.client import Client
from ft_service.client.progress import Curve, clock
from ft_service.client.responses import RemoteJob, shown
from ft_service.errors import FtError, SpecError
from ft_service.jobs.method_options import loss_measure
from ft_service.rundir.events import Metrics

_WIDEST = 60
_THOUSANDS = 10_000
"""Smallest integer that is written with commas."""
_OF_REWARDS = {"train_mean_reward": "training reward", "valid_mean_reward": "validation reward"}


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(one: JobId, other: JobId, as_json: Json = False) -> None:
    """Show the options in which two jobs differ, their results, and the curves of their losses and
    rewards.
    """
    with connect() as client:
        jobs = [client.job(find_job(client, word)) for word in (one, other)]
        if jobs[0].id == jobs[1].id:
            raise SpecError(
                f"{one} and {other} are the same job, {jobs[0].id}. Name two: `ft jobs` lists "
                "them.",
                param="other",
            )
        curves = [client.metrics(job.id) for job in jobs]
        names = {
            file_id: _file_name(client, file_id)
            for job in jobs
            for file_id in (job.training_file, job.validation_file)
        }
    rows = differences(*jobs)
    results = [result(job, known) for job, known in zip(jobs, curves, strict=True)]
    if as_json:
        print_json(
            {
                "jobs": [job.id for job in jobs],
                "options": {name: [left, right] for name, left, right in rows},
                "results": results,
                "metrics": [
                    [known.model_dump(exclude_none=True) for known in each] for each in curves
                ],
            }
        )
        return
    table = [
        (name, names.get(left) or _text(left), names.get(right) or _text(right))
        for name, left, right in rows
    ]
    table += [
        (name, _text(results[0].get(name)), _text(results[1].get(name)))
        for name in results[0] | results[1]
    ]
    titles = [short_name(job) for job in jobs]
    print_table(("", *titles), table)
    measures = [loss_measure(job.method) for job in jobs]
    comparable = measures[0] == measures[1]
    if not comparable:
        of_each = [
            f"{title} {measure or 'rewards alone'}"
            for title, measure in zip(titles, measures, strict=True)
        ]
        print(
            f"\nTheir losses measure different things and cannot be compared: {', '.join(of_each)}."
        )
    for title, field in (("training loss", "train_loss"), ("validation loss", "valid_loss")):
        _print_curves(title, field, titles, curves, one_scale=comparable)
    for field, title in _OF_REWARDS.items():
        if any(field in (row.more or {}) for known in curves for row in known):
            _print_curves(title, field, titles, curves, one_scale=True)


def differences(one: RemoteJob, other: RemoteJob) -> list[tuple[str, Any, Any]]:
    """Return (option, value of one job, value of the other) of every option in which two jobs
    differ.
    """

    def all_of(job: RemoteJob) -> dict[str, Any]:
        whole = {
            "model": job.model,
            "training_file": job.training_file,
            "validation_file": job.validation_file,
        }
        return {**whole, "seed": job.seed, **job.options}

    left = all_of(one)
    right = all_of(other)
    names = [*left, *(name for name in right if name not in left)]
    return [
        (name, left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    ]


def result(job: RemoteJob, known: Sequence[Metrics]) -> dict[str, Any]:
    """Return the results of a job so far.

    Losses in nats per token, or as its method has them; rewards where it has any.
    """
    losses = [row.train_loss for row in known if row.train_loss is not None]
    valid = [(row.valid_loss, row.step) for row in known if row.valid_loss is not None]
    best = min(valid, default=None)
    return {
        "status": job.status,
        "step": known[-1].step if known else None,
        "training loss": round(losses[-1], 4) if losses else None,
        "validation loss": round(valid[-1][0], 4) if valid else None,
        "lowest validation loss": f"{best[0]:.4f} at step {best[1]}" if best else None,
        **{
            title: rewards[-1]
            for field, title in _OF_REWARDS.items()
            if (rewards := _values(known, field))
        },
        "trained tokens": known[-1].trained_tokens if known else None,
        "took": clock(job.seconds(time.time())),
    }


def _values(known: Sequence[Metrics], field: str) -> list[float]:
    return [round(row.more[field], 4) for row in known if row.more and field in row.more]


def _print_curves(
    title: str,
    field: str,
    names: Sequence[str],
    curves: Sequence[Sequence[Metrics]],
    *,
    one_scale: bool,
) -> None:
    """Print both curves, on one scale if they can be compared by eye."""
    drawn = [Curve(), Curve()]
    for curve, known in zip(drawn, curves, strict=True):
        for row in known:
            curve.add(row.step, row.flat().get(field))
    scale = Curve.scale_of(drawn) if one_scale else None
    longest = max(map(len, names))
    width = max(8, min(_WIDEST, screen_width() - longest - 22))
    lines = [curve.sparkline(width, scale) for curve in drawn]
    if any(lines):
        print(f"\n{title}{'' if one_scale else ', each on its own scale'}")
        for name, line, curve in zip(names, lines, drawn, strict=True):
            print(f"  {name:<{longest}}  {line or ('(too few values)' if curve.any else '(none)')}")


def _file_name(client: Client, file_id: str | None) -> str | None:
    """Return `train.jsonl (YfZS25kz)`; None: there is no file, or it was removed."""
    if file_id is not None:
        with contextlib.suppress(FtError):
            return f"{client.file(file_id).filename} ({file_id.removeprefix('file-')[:8]})"
    return None


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= _THOUSANDS:
        return f"{value:,}"
    return "-" if value is None else shown(value)
