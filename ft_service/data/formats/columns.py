"""Columns of data files under other names than those of their format: `data: {prompt: question,
completion: answer}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from ft_service.data.line_errors import LineError
from ft_service.spec import MethodType
from ft_service.spec.options import Applied, DataOptions
from ft_service.wording import shown_value

LABEL = "label"
"""The column of a record that says whether its answer is a good one: TRL's, ms-swift's."""
LABELS = (LABEL, "kto_tag")
"""Its names; the second is LLaMA-Factory's."""
INSIDE = ("role", "content")
"""Keys of a message, in any column that holds messages."""
OPTIONAL = ("input", "system", "tools")
"""Columns that need not be in every record."""
_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
_LISTED = 8
"""Names of columns in a message, at most."""


@dataclass(frozen=True)
class Columns:
    """A mapping from a format's names of columns to the file's, and how its records are read.

    Empty: the file uses the format's names.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    of_prompts: bool = False
    """Whether the file holds prompts to grade, whose other columns are the prompts' items."""
    apply_chat_template: Applied = False
    labels: bool | None = False
    """Whether every record has a label, good or bad (method kto). None: a record may have one, as
    where no method is known.
    """
    strict_images: bool = False
    """Whether a picture that cannot be used is a fault of the file, and not only of its line."""

    @classmethod
    def of(
        cls,
        data: DataOptions,
        method: MethodType | None = "supervised",
        *,
        sampled: bool = False,
    ) -> Self:
        """The columns of a job's files. `method`: the job's; None: not known. `sampled`: whether
        the answers are sampled, as always in reinforcement learning.
        """
        labels = None if method is None else method == "kto"
        of_prompts = sampled or method == "reinforcement"
        strict = data.images == "strict"
        return cls(data.pairs, of_prompts, data.apply_chat_template, labels, strict)

    @cached_property
    def ours(self) -> Mapping[str, str]:
        """The file's name of a column → the format's."""
        return {theirs: ours for ours, theirs in self.pairs if ours not in INSIDE}

    @cached_property
    def _message_keys(self) -> Mapping[str, str]:
        return {theirs: ours for ours, theirs in self.pairs if ours in INSIDE}

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def name(self, theirs: str) -> str | None:
        """The format's name of one of the file's columns.

        None: left out, since another one is mapped to its name.
        """
        if theirs in self.ours:
            return self.ours[theirs]
        return None if theirs in self.ours.values() else theirs

    def record(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A record under the format's names.

        Raises LineError if it lacks a column that the mapping names.
        """
        if not self.pairs:
            return dict(row)
        missing = next(
            (
                theirs
                for theirs, ours in self.ours.items()
                if theirs not in row and ours not in OPTIONAL
            ),
            None,
        )
        if missing is not None:
            raise LineError(
                missing,
                f"is not there, and data.{self.ours[missing]} names it: its columns are "
                f"{listed(row)}",
            )
        record = {
            ours: value for theirs, value in row.items() if (ours := self.name(theirs)) is not None
        }
        if self._message_keys:
            for name in _MESSAGES:
                if isinstance(record.get(name), list):
                    record[name] = [self._message(message) for message in record[name]]
        return record

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        own = self._message_keys
        named = {
            own.get(key, key): value
            for key, value in message.items()
            if key in own or key not in own.values()
        }
        if "role" in own.values() and isinstance(role := named.get("role"), str):
            named["role"] = PEOPLE.get(role, role)
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
"""Name of a speaker in ShareGPT's `from`, or in a column that `data.role` names → OpenAI's name of
the role.
"""
PEOPLE: Mapping[str, str] = {
    name: role
    for name, role in SPEAKERS.items()
    if name not in ("observation", "function_call", role)
}
"""Names of speakers whose messages have words alone → OpenAI's name of the role."""
QUESTIONS = ("question", "query", "user", "instruction", "input", "human", "prompt", "problem")
ANSWERS = ("solution", "answer", "response", "reply", "assistant", "output", "completion", "target")
CONTEXTS = ("context", "input", "passage", "document")
"""Frequent names for columns of questions, of answers, and of texts that a question is about.

Where there is a solution beside an answer, the answer is its last number.
"""
AS_THEY_ARE = Columns()


def listed(keys: Sequence[str] | Mapping[str, Any]) -> str:
    """The first names of some columns, for a message."""
    names = list(keys)
    return ", ".join(shown_value(name) for name in names[:_LISTED]) + (
        ", …" if len(names) > _LISTED else ""
    )
