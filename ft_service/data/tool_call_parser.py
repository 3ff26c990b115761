"""Calls of tools as a base's chat template writes them, read from an answer.

The template is asked: a conversation with one known call is rendered, and what stands around it is
how calls look. That holds for every template that writes a call as an object with its name and
arguments (Qwen, Hermes, Llama, Mistral before its version 11, …); call_grammar.py reads those of
others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from ft_service.data.line_errors import LineError

_NAME = "ft_name"
_KEY = "ft_key"
_VALUE = "ft_value"
ASKED = {"role": "user", "content": "ft_question"}
_CALL = {
    "type": "function",
    "id": "ftcall000",
    "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class CallFormat:
    """Calls as objects of JSON."""

    prefix: str
    """What stands before the first object; "": nothing."""
    name: str
    """Key of the function's name."""
    arguments: str
    """Key of its arguments."""

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]] | None:
        """The words before the calls, and the calls (name, arguments as a string of JSON).

        None: there are none.
        """
        place = text.find(self.prefix) if self.prefix else 0
        words = text[: max(place, 0)]
        calls = []
        while place >= 0:
            at = place + len(self.prefix)
            while (found := self._object(text, at)) is not None:
                call, at = found
                calls.append(call)
            if at == place + len(self.prefix):
                return None
            place = text.find(self.prefix, at) if self.prefix else -1
        return (words.rstrip(), calls) if calls else None

    def _object(self, text: str, at: int) -> tuple[dict[str, Any], int] | None:
        while at < len(text) and text[at] in " \n\r\t,;":
            at += 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        value = value.get("function", value) if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            return None
        name = value.get(self.name)
        arguments = value.get(self.arguments, {})
        if not isinstance(name, str):
            return None
        written = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        return {"name": as_text(name), "arguments": as_text(written)}, end


def as_text(value: str) -> str:
    """What JSON holds as text, with a question mark for half of a surrogate pair: a model may write
    `\\ud83d` alone, and no answer or record can hold that.
    """
    return value.encode(errors="replace").decode()


class Write(Protocol):
    """A chat template: a conversation as text. Raises LineError."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
    ) -> str: ...


def own_begin(write: Write, text: str) -> int:
    """Where the text of a conversation that ends with calls begins to differ from one that ends
    with words, outside of special tokens: a thought that every answer has, or a role, is no part of
    a call. Raises LineError.
    """
    words = write([ASKED, {"role": "assistant", "content": "ft_words"}], [TOOL])
    length = next(
        (at for at, (a, b) in enumerate(zip(text, words, strict=False)) if a != b),
        min(len(text), len(words)),
    )
    opened = max(text.rfind(brackets[0], 0, length) for brackets in ("<>", "[]"))
    return opened if opened >= 0 and not {">", "]"} & set(text[opened:length]) else length


def call_format(write: Write) -> CallFormat | None:
    """How a chat template writes calls. None: in no way that is known here."""
    try:
        text = write([ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], [TOOL])
        start = own_begin(write, text)
    except LineError:
        return None
    place = text.find(_NAME, start)
    while place > start:
        place = text.rfind("{", start, place)
        if place < 0:
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            continue
        inner = value.get("function", value)
        names = [key for key, held in inner.items() if held == _NAME]
        arguments = [
            key
            for key, held in inner.items()
            if held in ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE}))
        ]
        if names and arguments:
            return CallFormat(text[start:place].strip(), names[0], arguments[0])
    return None
