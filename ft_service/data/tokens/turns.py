"""The conversation that a prompt's tokens were made of, as far as its chat template lets itself be read backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ft_service.data.line_errors import LineError

Write = Callable[[list[dict[str, Any]]], str]
"""Renders a prompt. Raises LineError for what the chat template does not take."""

_MARKS = ("qfirstq", "qsecondq", "qthirdq", "qfourthq")
"""Contents that no template changes, and that no other text of one holds."""


def turns_of(ids: Iterable[int], tokenizer: Any, write: Write) -> list[dict[str, Any]] | None:
    """The messages that a prompt was rendered from. None: not known. Those that are given make these very tokens."""
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
    """Conversations of text that the prompt may be, first without a system message: that may hold whatever stands in front."""
    for roles in (("user", "assistant", "user"), ("system", "user", "assistant", "user")):
        parts = _between(roles, write)
        if parts is None or not (text.startswith(parts[0]) and text.endswith(parts[-1])):
            continue
        begin, end = len(parts[0]), len(text) - len(parts[-1])
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
    """What the template writes before, between and behind messages of these roles. None: it does not take them."""
    said = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    try:
        text = write(said)
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
