"""The blocks of README and docs that are commands or programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
INDENT = "    "
_FENCE = re.compile(r" *```(\w*)")
_COMMAND = re.compile(
    r"((\.venv/bin/)?ft|make|kubectl|kind|docker|python3?|pip|export|curl|pg_dump|rsync|git) "
    r"|\w+=\$\("
)


@dataclass(frozen=True)
class Block:
    """`language`: "sh" or "python"."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, continued ones joined, without comments and what is fed
        to them.
        """
        text = re.sub(r"<<'END'\n.*?^END$", "", self.text, flags=re.MULTILINE | re.DOTALL).replace(
            "\\\n", " "
        )
        return [
            line.strip()
            for line in text.splitlines()
            if line.strip() and not line.lstrip().startswith("#")
        ]


def blocks(page: str) -> list[Block]:
    """Those of a page (its path from the project's folder), in their order: fenced ones of `sh` and
    `python`, and indented ones that begin with a command.
    """
    return list(_found(page, (ROOT / page).read_text().splitlines(True)))


def _found(page: str, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence:
            body = list(takewhile(lambda line: not _FENCE.match(line), lines[number + 1 :]))
            indent = len(lines[number]) - len(lines[number].lstrip())
            if fence[1] in ("sh", "python"):
                yield Block(page, fence[1], "".join(line[indent:] or "\n" for line in body))
            number += len(body) + 2
            continue
        body = list(takewhile(lambda line: line.startswith(INDENT), lines[number:]))
        if body and not lines[number - 1].strip() and _COMMAND.match(body[0].strip()):
            yield Block(page, "sh", "".join(line.removeprefix(INDENT) for line in body))
        number += max(1, len(body))
