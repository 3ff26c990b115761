"""`ft convert`: from other tools' configurations to a SPEC."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.output import Json, print_json
from ft_service.convert import convert_file
from ft_service.convert.rules import NotSupported, Taken


def register(app: typer.Typer) -> None:
    app.command("convert")(convert)


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Accelerate, DeepSpeed or Transformers configuration (YAML, JSON).")
    ],
    as_json: Json = False,
) -> None:
    """Print another tool's configuration as a SPEC, and what becomes of each of its options."""
    outcome = convert_file(file)
    if not as_json:
        print(outcome.spec_yaml(), end="")
        return
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


def _kind(verdict: object) -> str:
    if isinstance(verdict, Taken):
        return "taken over"
    return "not supported" if isinstance(verdict, NotSupported) else "not needed"
