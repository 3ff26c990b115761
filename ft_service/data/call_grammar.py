"""Calls of tools that a chat template writes as a name with arguments, each between texts of its
own, read from an answer.

The template is asked: a conversation with two known calls is rendered, and what stands around
names, keys and values is how calls look. Arguments are an object of JSON (DeepSeek, Kimi, Mistral
from its version 11 on, …) or written one by one (Qwen 3.5, GLM, MiniMax, …); such a value is taken
as JSON where it is some, else as text. White space is as in any call: some or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ft_service.data.line_errors import LineError
from ft_service.data.tool_call_parser import (
    ASKED,
    TOOL,
    CallFormat,
    Write,
    as_text,
    call_format,
    own_begin,
)

_NAMES = ("ft_name", "ft_second")
_ARGUMENTS = {"ft_key": "ft_value", "ft_other": "ft_more"}
_NAME = r"([^\s<>\[\](){}\"'=|,]{1,200}?)"


@dataclass(frozen=True)
class CallGrammar:
    """Calls as a name and its arguments."""

    opening: str
    """What stands before the first call's name."""
    between: str
    """What stands between a name and its arguments; of single arguments, before the first key."""
    joint: str
    """What stands between a call's arguments and the next call's name; empty: there is never a
    second call.
    """
    items: Sequence[str] | None = None
    """What stands between key and value, between a value and the next key, and behind the last
    value. None: arguments are an object of JSON.
    """
    empty: str | None = None
    """What stands behind the name of a call without arguments. None: it is not known."""

    @property
    def prefix(self) -> str:
        """The beginning of what stands before the first call."""
        return self.opening.split()[0]

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]] | None:
        """The words before the calls, and the calls (name, arguments as a string of JSON).

        None: there are none.
        """
        head = self._first.search(text)
        words = text[: head.start()] if head else text
        calls = list[dict[str, Any]]()
        while head is not None and (found := self._call(text, head.end())) is not None:
            call, end = found
            calls.append(call)
            head = self._next.match(text, end) if self.joint else None
        return (words.rstrip(), calls) if calls else None

    @cached_property
    def _first(self) -> re.Pattern[str]:
        # Or white space would be searched again and again.
        return re.compile(_spaced(self.opening).removeprefix(r"\s*"))

    @cached_property
    def _next(self) -> re.Pattern[str]:
        return re.compile(_spaced(self.joint))

    @cached_property
    def _named(self) -> re.Pattern[str]:
        between = _spaced(self.between) + (r"(?=\{)" if self.items is None else "")
        return re.compile(
            rf"\s*{_NAME}(?:"
            + (f"({_spaced(self.empty)})" if self.empty else "()(?!)")
            + f"|{between})"
        )

    def _call(self, text: str, at: int) -> tuple[dict[str, Any], int] | None:
        named = self._named.match(text, at)
        if named is None:
            return None
        found = ({}, named.start(2)) if named[2] is not None else self._arguments(text, named.end())
        if found is None:
            return None
        arguments, end = found
        return {
            "name": as_text(named[1]),
            "arguments": as_text(json.dumps(arguments, ensure_ascii=False)),
        }, end

    def _arguments(self, text: str, at: int) -> tuple[Any, int] | None:
        """The arguments, and where they end."""
        if self.items is None:
            try:
                return json.JSONDecoder().raw_decode(text, len(text) - len(text[at:].lstrip()))
            except (ValueError, RecursionError):
                return None
        middle, following, last = self.items
        arguments: dict[str, Any] = {}
        while (key_end := text.find(middle, at)) >= 0:
            begin = key_end + len(middle)
            ends = [(end, own) for own in (following, last) if (end := text.find(own, begin)) >= 0]
            if not ends:
                return None
            end, own = min(ends)
            arguments[text[at:key_end]] = _value(text[begin:end])
            at = end + len(own)
            if own == last:
                return arguments, end
        return None


def calls_of(write: Write) -> CallFormat | CallGrammar | None:
    """How a chat template writes calls. None: in no way that is known here."""
    return call_format(write) or _grammar(write)


def calls_of_json(value: dict[str, Any]) -> CallFormat | CallGrammar:
    """What `calls_of` returned, of its fields as JSON."""
    return CallGrammar(**value) if "opening" in value else CallFormat(**value)


def _grammar(write: Write) -> CallGrammar | None:
    try:
        text = write([ASKED, _answer(*_NAMES)], [TOOL])
    except LineError:  # one call at a time
        text = ""
    try:
        two = bool(text)
        text = text or write([ASKED, _answer(_NAMES[0])], [TOOL])
        start = own_begin(write, text)
    except LineError:
        return None
    first = text.find(_NAMES[0], start)
    found = _arguments_in(text, first + len(_NAMES[0])) if first >= 0 else None
    if found is None or not text[start:first].strip():
        return None
    begin, end, items = found
    opening = text[start:first]
    between = text[first + len(_NAMES[0]) : begin]
    second = text.find(_NAMES[1], end) if two else -1
    if second < 0:
        return CallGrammar(opening, between, "") if items is None else None
    joint = text[end:second]
    other = _arguments_in(text, second + len(_NAMES[1]))
    if other is None:
        return None
    if items is None:
        return CallGrammar(opening, between, joint)
    last = _common(joint, text[other[1] :])
    return (
        CallGrammar(opening, between, joint, (*items, last), _empty(write, text[:first], last))
        if last.strip()
        else None
    )


def _answer(*names: str, arguments: dict[str, str] = _ARGUMENTS) -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "id": f"functions.{name}:{number}",
            "function": {"name": name, "arguments": arguments},
        }
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _arguments_in(text: str, at: int) -> tuple[int, int, tuple[str, str] | None] | None:
    """Begin and end of known arguments behind a name, and for single ones what stands between
    them.
    """
    places: list[int] = []
    for word in (word for pair in _ARGUMENTS.items() for word in pair):
        place = text.find(word, places[-1] if places else at)
        if place < 0:
            return None
        places.append(place)
    if (brace := text.find("{", at, places[0])) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace)
        except ValueError:
            value = None
            end = 0
        if value == _ARGUMENTS:
            return brace, end, None
    (key, value), (_, more) = _ARGUMENTS.items()
    middle = text[places[0] + len(key) : places[1]]
    following = text[places[1] + len(value) : places[2]]
    return (places[0], places[3] + len(more), (middle, following)) if middle and following else None


def _empty(write: Write, before: str, last: str) -> str | None:
    """What stands behind a name without arguments, as far as it ends as arguments do."""
    try:
        text = write([ASKED, _answer(_NAMES[0], arguments={})], [TOOL])
    except LineError:
        return None
    if not text.startswith(before):
        return None
    rest = text[len(before) + len(_NAMES[0]) :]
    for place in range(len(last)):  # the longest end of `last` that follows
        if last[place:].strip() and (found := rest.find(last[place:])) >= 0:
            return rest[: found + len(last[place:])]
    return None


def _common(one: str, other: str) -> str:
    length = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length].rstrip("<[ \n")


def _spaced(text: str) -> str:
    """A pattern for a text with any white space where it has some; numbers of calls may differ."""
    return (
        r"\s*"
        + r"\s*".join(re.sub(r"\d+", r"\\d+", re.escape(word)) for word in text.split())
        + r"\s*"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
