"""`ft rollouts`: what a job of reinforcement learning has sampled, with rewards: an agent's
rollouts as conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from ft_service.cli.jobs.job_argument import JobId, connect_to_job
from ft_service.cli.output import Json, is_terminal, print_json
from ft_service.errors import NotFoundError

COLUMNS = 100
"""Width without a terminal."""
MOST_SHOWN = 2000
"""Characters of a message."""


def register(app: typer.Typer) -> None:
    app.command()(rollouts)


def rollouts(
    job_id: JobId,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="STEP", help="Those of this step (default: the newest)."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=100, help="How many prompts, and answers.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Show what a job of reinforcement learning has sampled, with rewards: an agent's rollouts as
    conversations.
    """
    with connect_to_job(job_id) as (client, job_id):
        found = client.rollouts(job_id, step, limit)
    if found is None:
        which = (
            "no rollouts yet" if step is None else f"no rollouts of step {step} any more, or yet"
        )
        raise NotFoundError(f"Job {job_id} has {which}.", param="step", code="no_rollout")
    if as_json:
        print_json(found)
        return
    console = Console(width=None if is_terminal() else COLUMNS, highlight=False, markup=False)
    console.print(f"Step {found['step']}: mean reward {_number(found['mean_reward'])}")
    for prompt in found["prompts"] or found["validation"]:
        console.print(
            f"\nPrompt {prompt['prompt'] + 1}: {prompt['text'][:MOST_SHOWN]}", style="bold"
        )
        for number, answer in enumerate(prompt["answers"], 1):
            for line in _lines(number, answer):
                console.print(line)


def _lines(number: int, answer: Mapping[str, Any]) -> Iterator[str]:
    way = answer["trajectory"]
    turns = "" if way is None else f", {way['turns']} turns in {way['rows']} rows"
    if way is not None and way.get("rewards"):  # servers of before have none
        turns += f" (rewarded {', '.join(map(_number, way['rewards']))})"
    why = "".join(f", {kind}: {text[:200]}" for kind, text in answer["errors"].items())
    reward = _number(answer["reward"])
    yield f"  answer {number}: reward {reward}, {answer['tokens']} tokens{turns}{why}"
    if way is None:
        yield f"    {answer['text'][:MOST_SHOWN] or '(nothing)'}"
        return
    for message in way["messages"]:
        yield f"    {message['role']}: {_content(message)[:MOST_SHOWN]}"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    calls = [call["function"] for call in message.get("tool_calls") or () if "function" in call]
    called = [f"→ {own.get('name')}({own.get('arguments')})" for own in calls]
    return " ".join([*([str(content)] if content else []), *called])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
