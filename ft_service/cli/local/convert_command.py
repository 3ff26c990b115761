"""`ft convert`: from other tools' configurations to a SPEC."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.output import Json, complain, print_json
from ft_service.convert import convert_file
from ft_service.convert.rules import NotSupported, Taken


def register(app: typer.Typer) -> None:
    app.command("convert")(convert)


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Configuration of another tool (YAML, JSON).",
        ),
    ],
    as_json: Json = False,
) -> int:
    """Print a configuration of Accelerate, DeepSpeed, Transformers, TRL, Axolotl or LLaMA-Factory as a SPEC, and what becomes
    of each of its options. Exits with 1 where one was not
    taken over without which the result may differ."""
    outcome = convert_file(file)
    if not as_json:
        print(outcome.spec_yaml(), end="")
        return _complain_of(outcome.lost())
    print_json(
        {
            "file": outcome.file,
            "format": outcome.format,
            "spec": outcome.body,
            "options": [
                {"option": d.option, "value": d.value, "outcome": _kind(d.verdict), "text": d.line()} for d in outcome.decisions
            ],
        }
    )
    return _complain_of(outcome.lost())


def _complain_of(lost: list[str]) -> int:
    if not lost:
        return 0
    said = "an option was not taken over" if len(lost) == 1 else f"{len(lost)} options were not taken over"
    return complain(f"{said}, and the result may differ: {', '.join(lost)}. Why, and what to do, is in the comments above.", 1)


def _kind(verdict: object) -> str:
    if isinstance(verdict, Taken):
        return "taken over"
    return "not supported" if isinstance(verdict, NotSupported) else "not needed"
