"""Reconstruction of a conversation from the tokens of its prompt, for chat templates that allow
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ft_service.data.line_errors import LineError

Write = Callable[[list[dict[str, Any]]], str]
"""A function that renders a prompt. Raises LineError if the chat template refuses it."""

_MARKS = ("qfirstq", "qsecondq", "qthirdq", "qfourthq")
"""Contents that templates do not change and do not contain."""


def turns_of(ids: Iterable[int], tokenizer: Any, write: Write) -> list[dict[str, Any]] | None:
    """The messages from which a prompt was rendered; rendered again, they give exactly these
    tokens. None: not known.
    """
    tokens = [int(token) for token in ids]
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for messages in _guesses(text, write):
        try:
            rendered = write(messages)
        except LineError:
            continue
        if list(tokenizer(rendered, add_special_tokens=False)["input_ids"]) == tokens:
            return messages
    return None


def _guesses(text: str, write: Write) -> Iterator[list[dict[str, Any]]]:
    """Conversations that may have this text, first without a system message, since such a message
    may match any beginning.
    """
    for roles in (("user", "assistant", "user"), ("system", "user", "assistant", "user")):
        parts = _between(roles, write)
        if parts is None or not (text.startswith(parts[0]) and text.endswith(parts[-1])):
            continue
        begin = len(parts[0])
        end = len(text) - len(parts[-1])
        behind = {"system": parts[1], "user": parts[-3], "assistant": parts[-2]}
        messages: list[dict[str, Any]] = []
        role = roles[0]
        while (found := text.find(behind[role], begin, end)) >= 0:
            messages.append({"role": role, "content": text[begin:found]})
            begin = found + len(behind[role])
            role = "assistant" if role == "user" else "user"
        if role == "user":
            yield [*messages, {"role": role, "content": text[begin:end]}]


def _between(roles: Sequence[str], write: Write) -> list[str] | None:
    """The template's text before, between and after messages of these roles.

    None: it refuses them.
    """
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    try:
        text = write(messages)
    except LineError:
        return None
    parts: list[str] = []
    for mark in _MARKS[: len(roles)]:
        before, there, text = text.partition(mark)
        if not there:
            return None
        parts.append(before)
    parts.append(text)
    return parts if all(parts[1:]) else None
