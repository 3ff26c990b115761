"""Results as they come: JSON lines that sections append, and the Markdown made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
CELL = 300
"""Characters of a note's end in the table; all of it is in the JSON lines."""


class SkippedError(Exception):
    """A case cannot be run here; its words say what is missing."""


@dataclass(frozen=True)
class Row:
    """What one case of a section showed."""

    section: str
    case: str
    status: Status
    numbers: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Rows:
    """A section's rows. Each is in the file as soon as it is added: a section may be killed."""

    path: Path
    section: str

    def add(self, case: str, status: Status = "ok", note: str = "", **numbers: Any) -> None:
        append(self.path, Row(self.section, case, status, numbers, note))

    def run(self, case: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Add what `measure` returns, or its error; other cases continue.

        A case with `ok=False` in its numbers has failed.
        """
        with self.case(case) as numbers:
            numbers.update(measure())

    @contextmanager
    def case(self, case: str) -> Iterator[dict[str, Any]]:
        numbers: dict[str, Any] = {}
        try:
            yield numbers
        except SkippedError as reason:
            self.add(case, "skipped", str(reason), **numbers)
        except Exception as error:
            self.add(case, "failed", f"{type(error).__name__}: {error}"[-2000:], **numbers)
        else:
            ok = numbers.pop("ok", True)
            self.add(case, "ok" if ok else "failed", numbers.pop("note", ""), **numbers)


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row), default=str) + "\n")


def read(path: Path) -> list[Row]:
    return (
        [Row(**json.loads(line)) for line in path.read_text().splitlines() if line]
        if path.exists()
        else []
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table a section, in the order in which they came, below a count of all."""
    count = {
        status: sum(row.status == status for row in rows) for status in ("ok", "failed", "skipped")
    }
    parts = ["# GPU report", ", ".join(f"{number} {status}" for status, number in count.items())]
    for section in dict.fromkeys(row.section for row in rows):
        lines = ["| case | | numbers | |", "| --- | --- | --- | --- |"]
        lines += [_line(row) for row in rows if row.section == section]
        parts += [f"## {section}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _line(row: Row) -> str:
    numbers = ", ".join(f"{key} {_text(value)}" for key, value in row.numbers.items())
    cells = (row.case, "" if row.status == "ok" else row.status, numbers, row.note[-CELL:])
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
