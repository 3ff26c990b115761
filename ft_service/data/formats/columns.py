"""Columns of data files that have other names than their format gives them: `data: {prompt: question, completion: answer}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ft_service.data.line_errors import LineError, shown

INSIDE = ("role", "content")
"""Names of a message's own keys, in whichever column the messages are."""
OPTIONAL = ("input", "system", "tools")
"""Columns that a record may lack."""
_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
_LISTED = 8


@dataclass(frozen=True)
class Columns:
    """A mapping of names: ours → the file's. Empty: the file's names are ours."""

    pairs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def ours(self) -> Mapping[str, str]:
        """The file's name of a column → ours."""
        return {theirs: ours for ours, theirs in self.pairs if ours not in INSIDE}

    @cached_property
    def _inside(self) -> Mapping[str, str]:
        return {theirs: ours for ours, theirs in self.pairs if ours in INSIDE}

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def name(self, theirs: str) -> str | None:
        """Our name of one of the file's columns. None: it is left out, since another column is to have that name."""
        if theirs in self.ours:
            return self.ours[theirs]
        return None if theirs in self.ours.values() else theirs

    def record(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A record under our names. Raises LineError if it lacks a column that the mapping names."""
        if not self.pairs:
            return dict(row)
        missing = next((theirs for theirs, ours in self.ours.items() if theirs not in row and ours not in OPTIONAL), None)
        if missing is not None:
            raise LineError(missing, f"is not there, and data.{self.ours[missing]} names it: its columns are {listed(row)}")
        found = {ours: value for theirs, value in row.items() if (ours := self.name(theirs)) is not None}
        if self._inside:
            for name in _MESSAGES:
                if isinstance(found.get(name), list):
                    found[name] = [self._message(message) for message in found[name]]
        return found

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        own = self._inside
        named = {own.get(key, key): value for key, value in message.items() if key in own or key not in own.values()}
        if "role" in own.values() and isinstance(role := named.get("role"), str):
            named["role"] = SPEAKERS.get(role, role)
        return named


SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_call": "assistant",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
}
"""Name of a speaker in ShareGPT's `from`, or in a column that `data.role` names → role."""
AS_THEY_ARE = Columns()


def listed(keys: Sequence[str] | Mapping[str, Any]) -> str:
    """Names of columns for a message, the first few of them."""
    names = list(keys)
    return ", ".join(shown(name) for name in names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
