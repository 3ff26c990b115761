"""Lines at fault, grouped by their reasons, and lines that are skipped for their pictures. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ft_service.data.line_errors import Fault
from ft_service.data.statistics import Lines
from ft_service.wording import counted

SHOWN_LINES = 5
"""Lines that a message names for each reason."""
SHOWN_SKIPPED = 5
"""Reasons that a message about skipped lines lists; the rest is counted."""
ALWAYS_SKIPPED = 200
"""Lines that may be skipped of a file of at least twice as many, as at OpenAI."""
SKIPPED_SHARE = 10
"""Of a larger file one line in so many may be skipped."""
_GROUPS = 100
"""Reasons that are grouped separately; lines with further reasons are only counted."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class FaultGroup:
    """Lines that are at fault for the same reason."""

    first: Fault
    count: int = 1
    lines: tuple[int, ...] = ()
    """Numbers of the first lines."""
    numbers_differ: bool = False
    """Other lines have other numbers in the reason, such as another character at fault."""

    def text(self, word: str) -> str:
        """The lines and the reason. `word`: the name of the file's records, such as line or row."""
        if self.count == 1:
            return self.first.text(word)
        more = ", …" if self.count > len(self.lines) else ""
        lines = f"{self.count:,} {word}s ({', '.join(map(str, self.lines))}{more})"
        reason = " ".join(part for part in (self.first.field, self.first.reason) if part)
        return (
            f"{lines}: {reason} ({word} {self.first.line}; the others likewise)"
            if self.numbers_differ
            else f"{lines}: {reason}"
        )

    def with_fault(self, fault: Fault) -> FaultGroup:
        """The group with one more line.

        Numbers in which the places of its lines differ become stars: `messages.*.role`.
        """
        field = (
            self.first.field if fault.field == self.first.field else _NUMBER.sub("*", fault.field)
        )
        lines = (*self.lines, fault.line) if len(self.lines) < SHOWN_LINES else self.lines
        differ = self.numbers_differ or fault.reason != self.first.reason
        return FaultGroup(replace(self.first, field=field), self.count + 1, lines, differ)


class FaultGroups:
    """Groups faults by their reasons, in the order of their first lines."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], FaultGroup] = {}

    def add(self, fault: Fault) -> None:
        key = (_NUMBER.sub("#", fault.field), _NUMBER.sub("#", fault.reason))
        if key in self._groups:
            self._groups[key] = self._groups[key].with_fault(fault)
        elif len(self._groups) < _GROUPS:
            self._groups[key] = FaultGroup(fault, 1, (fault.line,))

    @property
    def listed(self) -> tuple[FaultGroup, ...]:
        return tuple(self._groups.values())


@dataclass(frozen=True)
class Skipped:
    """Lines that are left out since a picture of theirs cannot be used (data.images: skip)."""

    lines: tuple[int, ...] = ()
    """Numbers of all of them, in their order."""
    groups: tuple[FaultGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lines)

    def text(self, name: str, word: str, kept: int) -> str:
        """The sentence about them. `name`: the file's. `word`: of its records. `kept`: the other
        ones.
        """
        shown = self.groups[:SHOWN_SKIPPED]
        rest = len(self.lines) - sum(group.count for group in shown)
        reasons = [
            *(group.text(word) for group in shown),
            *([f"and {rest:,} more"] if rest else ()),
        ]
        which = Lines.of(self.lines).text(word, word)
        of_all = counted(kept + len(self.lines), word)
        return (
            f"{name}: {which} of {of_all} skipped for an image that cannot be used; data.images = "
            f"'strict' refuses the file. {'; '.join(reasons)}."
        )


def may_skip(lines: int) -> int:
    """How many of a file's lines may be skipped for their pictures: of more, what is left is no
    longer what its user meant.
    """
    return min(lines // 2, max(ALWAYS_SKIPPED, lines // SKIPPED_SHARE))
