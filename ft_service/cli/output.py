"""Functions that commands share: settings, connection, printing."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ft_service.errors import SpecError

if TYPE_CHECKING:
    from ft_service.client.client import Client
    from ft_service.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
_OPTION = {"bind": "host"}
"""Setting → the option of `ft serve` that overrides it, if it has another name."""
_LEAST = 4
"""Smallest width of a shortened column."""
OWN_WIDTH = 1000
"""Width of piped output, in which nothing is shortened."""


def load_settings(**overrides: Any) -> Settings:
    """Return the environment's settings, overridden by the command line's options (None: not
    given). Raises SpecError.
    """
    from pydantic import ValidationError  # `ft --help` does not need it

    from ft_service.settings import Settings
    from ft_service.spec.validation_errors import words_of

    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        message = words_of(fault)
        if not fault["loc"]:
            raise SpecError(f"{message}.") from None
        name = str(fault["loc"][0])
        shown = f"--{_OPTION.get(name, name)}" if name in given else f"FT_{name.upper()}"
        raise SpecError(f"{shown} = {fault['input']!r}: {message}.", param=name) from None


def connect() -> Client:
    """Return a client of the server that the environment, or FT_HOME/credentials, names.

    Raises FtError if none is known.
    """
    from ft_service.client.client import Client
    from ft_service.client.connection import find_connection

    return Client(find_connection(os.environ, load_settings().home))


def print_error(message: str, code: int) -> int:
    """Print an error on stderr, on several lines if the message has them, and return the exit
    code.
    """
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()] or [""]
    first, *more = [
        _on_screen(line, sys.stderr)
        for line in [f"ft: {lines[0]}", *(f"  {line}" for line in lines[1:])]
    ]
    print("\n".join([first, *more]), file=sys.stderr)
    return code


def replace_unencodable(*streams: TextIO) -> None:
    """Let streams print `?` for characters outside their encoding, instead of raising an error."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def print_note(sentence: str) -> None:
    """Print a note on progress to stderr; stdout is for the output of the command."""
    print(_on_screen(sentence, sys.stderr), file=sys.stderr, flush=True)


def print_text(text: str = "") -> None:
    """Print text, wrapped at words on a terminal."""
    print("\n".join(_on_screen(line, sys.stdout) for line in text.split("\n")), flush=True)


def _on_screen(line: str, stream: TextIO) -> str:
    if not stream.isatty():
        return line
    width = Console(file=stream).width
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def print_json(document: Any) -> None:
    print(json_text(document, indent=2))


def print_json_line(document: Any) -> None:
    print(json_text(document), flush=True)


def json_text(document: Any, stream: TextIO | None = None, indent: int | None = None) -> str:
    """Return JSON for a stream (default: stdout); characters outside its encoding are escaped."""
    encoding = ((stream or sys.stdout).encoding or "ascii").lower().replace("-", "")
    return json.dumps(document, indent=indent, ensure_ascii=encoding != "utf8")


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: tuple[str, Sequence[str | None]] | None = None,
    *,
    whole_notes: bool = False,
) -> None:
    """Print a table: on a terminal shortened to its width, piped with tabs between columns.

    `notes`: a title and an optional sentence per row, which a terminal shows below the row, on one
    line unless `whole_notes`, and a pipe as the last column.
    """
    if not is_terminal():
        if notes is not None:
            titles = [*titles, notes[0]]
            rows = [(*row, note or "") for row, note in zip(rows, notes[1], strict=True)]
        for cells in (titles, *rows):
            print("\t".join(" ".join(cell.split()) for cell in cells))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    console = _console()
    columns = list(zip(titles, *rows, strict=True))
    longest = [max(cell_len(cell) for cell in column) for column in columns]
    times = [any(_TIME.fullmatch(cell) for cell in column) for column in columns]
    for title, width in zip(
        titles, fit_widths(longest, console.width - 2 * (len(titles) - 1), times), strict=True
    ):
        table.add_column(title, no_wrap=True, width=width)
    for row in rows:
        # Text, so that `:two:` in a name is not an emoji, nor `[bold]` a style.
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as captured:
        console.print(table, highlight=False)
    header, *lines = captured.get().splitlines()
    print(header)
    for line, note in zip(lines, notes[1] if notes else [None] * len(lines), strict=True):
        print(line)
        if note:
            text = f"    {' '.join(note.split())}"
            print(
                _on_screen(text, sys.stdout)
                if whole_notes or len(text) <= console.width
                else f"{text[: console.width - 1]}…"
            )


def fit_widths(widths: Sequence[int], room: int, whole: Sequence[bool] = ()) -> list[int]:
    """Return column widths that fit into `room` together: the widest columns are shortened first,
    those of `whole` last, since a part of their values is useless.
    """
    left = list(widths)
    for kept in (whole or [False] * len(left), [False] * len(left)):
        yielding = [number for number, stays in enumerate(kept) if not stays]
        while sum(left) > room and any(left[number] > _LEAST for number in yielding):
            left[max(yielding, key=lambda number: left[number])] -= 1
    return left


def print_fields(fields: Sequence[tuple[str, str | None]]) -> None:
    """Print names and values, one pair per line; pairs without a value are left out.

    Values of several lines, and on a terminal long ones, continue below.
    """
    given = [(name, value) for name, value in fields if value]
    width = max((len(name) for name, _ in given), default=0)
    room = screen_width()
    for name, value in [
        (("" if n else name), line)
        for name, text in given
        for n, line in enumerate(text.splitlines())
    ]:
        line = f"{name:<{width}}  {value}"
        wraps = len(line) > room and " " in value
        print(
            textwrap.fill(line, room, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
            if wraps
            else line
        )


def local_time(seconds: float | None, *, seconds_too: bool = False) -> str:
    """Return a time (seconds since the epoch) on this machine's clock, to the minute; empty for
    None.
    """
    return (
        ""
        if seconds is None
        else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M" + ":%S" * seconds_too)
    )


def is_terminal() -> bool:
    return sys.stdout.isatty()


def screen_width() -> int:
    """Return the width of the terminal, or OWN_WIDTH if there is none."""
    return _console().width


def _console() -> Console:
    return (
        Console(emoji=False)
        if is_terminal()
        else Console(width=OWN_WIDTH, no_color=True, emoji=False)
    )
