"""`ft eval`: show a model's answers to its job's evaluation prompts, with those before training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ft_service.cli.jobs.job_argument import JobId, connect_to_job
from ft_service.cli.output import (
    Json,
    is_terminal,
    load_settings,
    print_json,
    print_note,
    print_table,
)
from ft_service.client.responses import RemoteEvaluation
from ft_service.errors import NotFoundError
from ft_service.rundir.evaluations import prompt_turns

if TYPE_CHECKING:
    from ft_service.client.suite import TaskAccuracy

COLUMNS = 80
"""Width without a terminal, suited to two answers side by side."""

Step = Annotated[
    int | None,
    typer.Option("--step", metavar="STEP", help="The answers at this step (default: the newest)."),
]
Suite = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="TASK",
        help="Run a task of the package (arithmetic, common_sense, facts, all), or a file; "
        "repeatable.",
    ),
]
LmEval = Annotated[
    str,
    typer.Option(
        "--lm-eval", metavar="PROGRAM", help="lm-eval's program, in an environment of its own."
    ),
]
Samples = Annotated[int, typer.Option("--limit", "-n", min=1, help="How many prompts.")]


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluation)


def evaluation(
    job_id: JobId,
    step: Step = None,
    limit: Samples = 8,
    suite: Suite = None,
    lm_eval: LmEval = "lm_eval",
    as_json: Json = False,
) -> None:
    """Show a job's answers before and after training side by side, with their scores at every step
    that was evaluated. With --suite: run multiple-choice tasks on the tuned model and on its base,
    by lm-eval, and keep the results with the job.
    """
    if suite:
        _run_suite(job_id, suite, lm_eval, as_json=as_json)
        return
    with connect_to_job(job_id) as (client, job_id):
        evaluations = client.evaluations(job_id)
    if as_json and step is None:
        print_json([own.model_dump() for own in evaluations])
        return
    if not evaluations:
        raise NotFoundError(
            f"Job {job_id} has no evaluation. Jobs with `evaluation: {{prompts: 8}}` in their "
            "SPEC have one."
        )
    chosen = (
        evaluations[0]
        if step is None
        else next((own for own in evaluations if own.step == step), None)
    )
    if chosen is None:
        steps = ", ".join(str(own.step) for own in reversed(evaluations))
        raise NotFoundError(
            f"Job {job_id} was not evaluated at step {step}; it was at: {steps}.", param="step"
        )
    if as_json:
        print_json([chosen.model_dump()])
        return
    if any(own.metrics for own in evaluations):
        _print_scores(evaluations)
    console = Console(width=None if is_terminal() else COLUMNS, highlight=False, markup=False)
    for number, sample in enumerate(chosen.samples[:limit], 1):
        console.print(f"\n{number} of {len(chosen.samples)}", style="bold")
        for name, text in (*_named_turns(sample), ("expected", sample.get("reference"))):
            if text is not None:
                console.print(_named(name, text))
        console.print(_side_by_side(sample, chosen.step))


def _run_suite(job_word: str, words: Sequence[str], lm_eval: str, *, as_json: bool) -> None:
    # HTTP and YAML are for this option alone.
    from ft_service.client.connection import (
        find_connection,
    )
    from ft_service.client.suite import SuiteRun, find_tasks, require_lm_eval, suites_of

    tasks = find_tasks(words)
    program = require_lm_eval(lm_eval)
    connection = find_connection(os.environ, load_settings().home)
    with (
        connect_to_job(job_word) as (client, job_id),
        tempfile.TemporaryDirectory(prefix="ft-suite-") as scratch,
    ):
        job = client.job(job_id)
        if job.fine_tuned_model is None:
            raise NotFoundError(
                f"Job {job_id} has no tuned model ({job.status}); only a job that has succeeded "
                "has one."
            )
        # With the base's tokenizer.
        tokenizer = client.download_adapter(job_id, Path(scratch) / "adapter")
        run = SuiteRun(program, connection, tokenizer, tasks, Path(scratch))
        scores = {}
        for model in (job.base, job.fine_tuned_model):
            print_note(f"lm-eval asks {model} …")
            scores[model] = run.scores(model)
        base, tuned = scores.values()
        client.keep_suites(job_id, suites_of(base, tuned))
    if as_json:
        print_json(
            {
                model: {name: asdict(score) for name, score in own.items()}
                for model, own in scores.items()
            }
        )
        return
    rows = [
        (name, str(tuned[name].questions), _accuracy(base[name]), _accuracy(tuned[name]))
        for name in tasks
    ]
    print_table(("TASK", "QUESTIONS", "BASE", "TUNED"), rows)


def _accuracy(score: TaskAccuracy) -> str:
    return f"{score.accuracy:.3f}" + (f" ± {score.error:.3f}" if score.error is not None else "")


def _print_scores(evaluations: Sequence[RemoteEvaluation]) -> None:
    names = list(dict.fromkeys(name for own in evaluations for name in own.metrics))
    rows = [
        [
            str(own.step) if own.step else "before",
            *(f"{own.metrics[name]:.3f}" if name in own.metrics else "" for name in names),
        ]
        for own in reversed(evaluations)
    ]
    print_table(("STEP", *names), rows)


def _named_turns(sample: dict[str, Any]) -> list[tuple[str, str]]:
    turns = prompt_turns(str(sample.get("prompt") or ""), sample.get("messages"))
    return [(role or "asked", text) for role, text in turns]


def _named(name: str, text: str) -> Table:
    """Return a text with its name on the left, wrapped within its own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=9)
    table.add_column(overflow="fold")
    table.add_row(name, Text(text))
    return table


def _side_by_side(sample: dict[str, Any], step: int) -> Table:
    """Return the answers with their scores; at step 0 there is one."""
    answers = [("Before", sample.get("base"), sample.get("base_scores"))]
    if sample.get("tuned") is not None:
        answers.append((f"After step {step}", sample["tuned"], sample.get("scores")))
    table = Table(expand=True, show_lines=True)
    for title, _, _ in answers:
        table.add_column(title, ratio=1, overflow="fold")
    table.add_row(
        *(Text(answer) if answer else Text("(nothing)", "dim") for _, answer, _ in answers)
    )
    scores = [
        ", ".join(f"{name} {value:.2f}" for name, value in (own or {}).items())
        for _, _, own in answers
    ]
    if any(scores):
        table.add_row(*(Text(own, "dim") for own in scores))
    return table
