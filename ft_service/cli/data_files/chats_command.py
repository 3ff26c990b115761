"""`ft data from-chats`: data files made of chats that the server keeps."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from ft_service.cli.data_files.new_files import refuse_existing, written
from ft_service.cli.output import Json, connect, print_json, print_text
from ft_service.client.responses import RemoteChat
from ft_service.data.chat_data import LeftOutError, Shape, lines_of
from ft_service.errors import DataError, SpecError
from ft_service.wording import counted

_AGO = re.compile(r"(\d+(?:\.\d+)?)([dh])")
_SECONDS = {"d": 86_400.0, "h": 3600.0}


def from_chats(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", help="A new file; compressed if its name ends in .gz."
        ),
    ],
    shape: Annotated[
        Shape,
        typer.Option(
            "--as",
            help="sft: the better answer, or the one given; kto: answers with labels; dpo: the "
            "better answer and the one given.",
        ),
    ] = "sft",
    since: Annotated[
        str,
        typer.Option("--since", metavar="WHEN", help="7d, 12h, or a date such as 2026-11-01."),
    ] = "",
    label: Annotated[
        Literal["good", "bad"] | None,
        typer.Option("--label", help="Only chats whose answer was said to be so."),
    ] = None,
    metadata: Annotated[
        list[str],
        typer.Option("--metadata", metavar="KEY=VALUE", help="Only chats with this pair."),
    ] = [],  # noqa: B006 - typer makes a list of its own for each call
    model: Annotated[
        str, typer.Option("--model", metavar="M", help="Only answers of this model.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write data of the chats that were kept with `store: true`, and FILE.origin.jsonl, which says
    of each line from which chat it is.
    """
    origin = origin_of(out)
    for path in (out, origin):
        refuse_existing(path)
    filters = {
        **({"since": str(_time(since))} if since else {}),
        **({"label": "true" if label == "good" else "false"} if label else {}),
        **({"model": model} if model else {}),
        **_pairs(metadata),
    }
    with connect() as client, written(out) as lines, written(origin) as origins:
        made = _Made(lines, origins)
        for chat in client.chats(**filters):
            made.add(chat, shape)
        if not made.lines:
            raise DataError(f"No line can be made of {made.text}.", param="out")
    if as_json:
        print_json(
            {"lines": made.lines, "chats": made.chats, "left_out": dict(made.left_out)}
            | {"path": str(out), "origin": str(origin)}
        )
    else:
        print_text(f"{counted(made.lines, 'line')} in {out}, of {made.text}. Origin: {origin}")


def origin_of(out: Path) -> Path:
    """The file beside a data file that says where its lines are from."""
    name = out.name.removesuffix(".gz").removesuffix(".jsonl")
    return out.with_name(f"{name}.origin.jsonl")


class _Made:
    """Counts of what was written."""

    def __init__(self, lines: IO[str], origins: IO[str]) -> None:
        self._lines = lines
        self._origins = origins
        self.lines = 0
        self.chats = 0
        self.left_out = Counter[str]()

    def add(self, chat: RemoteChat, shape: Shape) -> None:
        self.chats += 1
        try:
            made = lines_of(chat.model_dump(), shape)
        except LeftOutError as error:
            self.left_out[str(error)] += 1
            return
        for line in made:
            self.lines += 1
            self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            origin = json.dumps(_origin(self.lines, chat), ensure_ascii=False)
            self._origins.write(origin + "\n")

    @property
    def text(self) -> str:
        why = "; ".join(
            f"{counted(count, 'chat')} left out: {reason}"
            for reason, count in self.left_out.most_common(5)
        )
        return counted(self.chats, "chat") + (f" ({why})" if why else "")


def _origin(line: int, chat: RemoteChat) -> Mapping[str, Any]:
    known = chat.model_dump()
    kept = ("model", "created", "metadata", "feedback")
    return {"line": line, "id": chat.id, **{name: known.get(name) for name in kept}}


def _time(when: str) -> float:
    """Seconds since the epoch. Raises SpecError."""
    if ago := _AGO.fullmatch(when):
        return max(0.0, time.time() - float(ago[1]) * _SECONDS[ago[2]])
    try:
        return max(0.0, datetime.fromisoformat(when).timestamp())
    except (ValueError, OverflowError):
        raise SpecError(
            f"--since = {when!r}: give 7d or 12h, or a date such as 2026-11-01.", param="since"
        ) from None


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given]
    for key, between, _ in pairs:
        if not key or not between:
            raise SpecError(f"--metadata {key!r}: give KEY=VALUE.", param="metadata")
    return {f"metadata[{key}]": value for key, _, value in pairs}
