"""The conversation that a prompt's tokens were made of, as far as its chat template lets itself be read backwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.data.token_options import TokenOptions
from ft_service.data.tokens.render import render_prompt

_MARKS = ("qfirstq", "qsecondq", "qthirdq", "qfourthq")
"""Contents that no template changes, and that no other text of one holds."""


def turns_of(ids: Iterable[int], tokenizer: Any, options: TokenOptions) -> list[dict[str, Any]] | None:
    """The messages that a prompt was rendered from. None: not known. Those that are given make these very tokens."""
    tokens = [int(token) for token in ids]
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for messages in _guesses(text, tokenizer, options):
        try:
            rendered = render_prompt(tokenizer, messages, options)
        except LineError:
            continue
        if list(tokenizer(rendered, add_special_tokens=False)["input_ids"]) == tokens:
            return messages
    return None


def _guesses(text: str, tokenizer: Any, options: TokenOptions) -> Iterator[list[dict[str, Any]]]:
    """Conversations of text that the prompt may be, first without a system message: that may hold whatever stands in front."""
    for roles in (("user", "assistant", "user"), ("system", "user", "assistant", "user")):
        parts = _between(roles, tokenizer, options)
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


def _between(roles: Sequence[str], tokenizer: Any, options: TokenOptions) -> list[str] | None:
    """What the template writes before, between and behind messages of these roles. None: it does not take them."""
    said = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    try:
        text = render_prompt(tokenizer, said, options)
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
