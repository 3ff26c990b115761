"""Functions that commands share: settings, the connection, and printing."""

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
_LEAST = 4
"""Columns of a screen that are left to a column of a table."""
OWN_WIDTH = 1000
"""Columns of output that is piped: nothing is cut."""


def load_settings(**overrides: Any) -> Settings:
    """The environment's settings with the command line's options over them (None: not given). Raises SpecError."""
    from pydantic import ValidationError  # `ft --help` needs none of this

    from ft_service.settings import Settings
    from ft_service.spec.faults import words_of

    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        message = words_of(fault)
        if not fault["loc"]:
            raise SpecError(f"{message}.") from None
        name = str(fault["loc"][0])
        shown = f"--{name}" if name in given else f"FT_{name.upper()}"
        raise SpecError(f"{shown} = {fault['input']!r}: {message}.", param=name) from None


def connect() -> Client:
    """A client of the server that the environment, or FT_HOME/credentials, names. Raises FtError if none is known."""
    from ft_service.client.client import Client
    from ft_service.client.connection import find_connection

    return Client(find_connection(os.environ, load_settings().home))


def complain(message: str, code: int) -> int:
    """Print a sentence on stderr, or a line for each of several; returns the exit code."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()] or [""]
    first, *more = [_on_screen(line, sys.stderr) for line in [f"ft: {lines[0]}", *(f"  {line}" for line in lines[1:])]]
    print("\n".join([first, *more]), file=sys.stderr)
    return code


def spare_letters(*streams: TextIO) -> None:
    """Have streams print `?` for letters that their encoding has not, instead of ending in a traceback."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def say(sentence: str) -> None:
    """Print what is being done, or was, on stderr: the output stays what was asked for."""
    print(_on_screen(sentence, sys.stderr), file=sys.stderr, flush=True)


def tell(text: str = "") -> None:
    """Print sentences, each on lines of its own; on a terminal no word is broken at the end of a line."""
    print("\n".join(_on_screen(line, sys.stdout) for line in text.split("\n")), flush=True)


def _on_screen(line: str, stream: TextIO) -> str:
    if not stream.isatty():
        return line
    width = Console(file=stream).width
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def print_json(document: Any) -> None:
    print(json_text(document, indent=2))


def print_json_line(document: Any) -> None:
    print(json_text(document), flush=True)


def json_text(document: Any, stream: TextIO | None = None, indent: int | None = None) -> str:
    """A document as JSON that a stream (default: stdout) can take: letters that it has not are escaped, and none is lost."""
    encoding = ((stream or sys.stdout).encoding or "ascii").lower().replace("-", "")
    return json.dumps(document, indent=indent, ensure_ascii=encoding != "utf8")


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: tuple[str, Sequence[str | None]] | None = None,
    *,
    whole_notes: bool = False,
) -> None:
    """Print columns under titles, cut to the width of a terminal; when piped whole, with a tab between them. `notes`: a title
    and a sentence (or none) for each row, which a terminal shows below the row, in one line unless `whole_notes`, and a pipe
    as the last column.
    """
    if not is_terminal():
        if notes is not None:
            titles, rows = [*titles, notes[0]], [(*row, note or "") for row, note in zip(rows, notes[1], strict=True)]
        for cells in (titles, *rows):
            print("\t".join(" ".join(cell.split()) for cell in cells))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    console = _console()
    columns = list(zip(titles, *rows, strict=True))
    longest = [max(cell_len(cell) for cell in column) for column in columns]
    times = [any(_TIME.fullmatch(cell) for cell in column) for column in columns]
    for title, width in zip(titles, shrunk(longest, console.width - 2 * (len(titles) - 1), times), strict=True):
        table.add_column(title, no_wrap=True, width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as it is: `:two:` in a name is no picture, `[bold]` no style
    with console.capture() as captured:
        console.print(table, highlight=False)
    header, *lines = captured.get().splitlines()
    print(header)
    for line, note in zip(lines, notes[1] if notes and is_terminal() else [None] * len(lines), strict=True):
        print(line)
        if note:
            text = f"    {' '.join(note.split())}"
            print(
                _on_screen(text, sys.stdout) if whole_notes or len(text) <= console.width else f"{text[: console.width - 1]}…"
            )


def shrunk(widths: Sequence[int], room: int, whole: Sequence[bool] = ()) -> list[int]:
    """Widths of columns that fit a room together: the widest ones give way, so that short ones stay whole; those of `whole`
    come last, since half of what they hold says nothing.
    """
    left = list(widths)
    for kept in (whole or [False] * len(left), [False] * len(left)):
        yielding = [number for number, stays in enumerate(kept) if not stays]
        while sum(left) > room and any(left[number] > _LEAST for number in yielding):
            left[max(yielding, key=lambda number: left[number])] -= 1
    return left


def print_fields(fields: Sequence[tuple[str, str | None]]) -> None:
    """Print names and values, one pair a line; pairs without a value are left out. On a terminal long values go on below; so do
    the further lines of a value that has several.
    """
    given = [(name, value) for name, value in fields if value]
    width = max((len(name) for name, _ in given), default=0)
    room = screen_width()
    for name, value in [(("" if n else name), line) for name, text in given for n, line in enumerate(text.splitlines())]:
        line = f"{name:<{width}}  {value}"
        wraps = len(line) > room and " " in value
        print(textwrap.fill(line, room, subsequent_indent=" " * (width + 2), break_on_hyphens=False) if wraps else line)


def local_time(seconds: float | None, *, seconds_too: bool = False) -> str:
    """A moment (seconds since the epoch) on this machine's clock, to the minute; empty for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M" + ":%S" * seconds_too)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def screen_width() -> int:
    """Columns of the terminal; very many where there is none."""
    return _console().width


def _console() -> Console:
    return Console(emoji=False) if is_terminal() else Console(width=OWN_WIDTH, no_color=True, emoji=False)
