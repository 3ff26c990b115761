"""Functions that commands share: settings, the connection, and printing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from ft_service.client.client import Client
from ft_service.client.connection import find_connection
from ft_service.errors import SpecError
from ft_service.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job, as `ft jobs` shows it.")]


def load_settings(**overrides: Any) -> Settings:
    """The environment's settings with the command line's options over them (None: not given). Raises SpecError."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        message = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            raise SpecError(f"{message}.") from None
        name = str(fault["loc"][0])
        shown = f"--{name}" if name in given else f"FT_{name.upper()}"
        raise SpecError(f"{shown} = {fault['input']!r}: {message}.", param=name) from None


def connect() -> Client:
    """A client of the server that the environment, or FT_HOME/credentials, names. Raises FtError if none is known."""
    return Client(find_connection(os.environ, load_settings().home))


def complain(message: str, code: int) -> int:
    """Print one line on stderr; returns the exit code."""
    print(f"ft: {' '.join(message.split())}", file=sys.stderr)
    return code


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_json_line(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under titles; cut to the width of a terminal, whole when piped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console().print(table, highlight=False, markup=False)


def print_fields(fields: Sequence[tuple[str, str | None]]) -> None:
    """Print names and values, one pair a line; pairs without a value are left out."""
    shown = [(name, value) for name, value in fields if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name:<{width}}  {value}")


def local_time(seconds: float | None) -> str:
    """A moment (seconds since the epoch) on this machine's clock, to the minute; empty for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def queue_text(queue: dict[str, Any] | None, *, whole: bool = False) -> str:
    """A waiting job's place: `#3 · starts about 14:05`; `whole`: with the reason. Empty without one."""
    if not queue:
        return ""
    starts = queue.get("estimated_start")
    parts = [f"#{queue.get('position')}", f"starts about {local_time(starts)}" if starts else "start not known yet"]
    return " · ".join([*parts, str(queue.get("reason"))] if whole else parts)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=1000, no_color=True)
