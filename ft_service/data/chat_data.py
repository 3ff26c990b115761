"""Lines of data files made of chats that were kept, and of what their users said of the answers.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ft_service.data.formats.columns import LABEL
from ft_service.data.formats.detect_format import Format
from ft_service.data.formats.normalize import as_record
from ft_service.data.line_errors import LineError

Shape = Literal["sft", "kto", "dpo"]
"""sft: one answer, the better one if there is one. kto: answers with labels, a better one with the
label true. dpo: the better answer beside the one that was given."""
_LEARNED = ("role", "content", "tool_calls", "reasoning_content")
"""Keys of an answer that are learned; the others tell how it came about."""
_CUT = ("length", "content_filter")
"""Why an answer ended too early."""


class LeftOutError(Exception):
    """A chat of which no line can be made. The text says why."""


def lines_of(chat: Mapping[str, Any], shape: Shape) -> list[dict[str, Any]]:
    """The lines of a chat, as the server's list has it with its messages.

    Every line can be trained on. Raises LeftOutError.
    """
    try:
        lines = list(_LINES[shape](chat))
        for line in lines:
            form = Format.OPENAI_PAIRS if shape == "dpo" else Format.CHAT
            as_record(form, line, labels=True if shape == "kto" else None)
    except LineError as error:
        raise LeftOutError(f"{error.field}: {error.reason}".removeprefix(": ")) from None
    return lines


def _one_answer(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    said = _feedback(chat)
    if said.get("better") is None and said.get("label") is False:
        raise LeftOutError("the answer is a bad one, and there is no better one")
    yield _line(chat, _better(chat) or _given(chat))


def _labelled(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    better = _better(chat)
    label = _feedback(chat).get("label")
    if label is None and better is None:
        raise LeftOutError("nobody has given the answer a label")
    if label is not None:
        yield {**_line(chat, _given(chat)), LABEL: label}
    if better is not None:
        yield {**_line(chat, better), LABEL: True}


def _pair(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    better = _better(chat)
    if better is None:
        raise LeftOutError("there is no better answer")
    tools = {"tools": chat["tools"]} if chat.get("tools") else {}
    yield {
        "input": {"messages": chat["messages"], **tools},
        "preferred_output": [better],
        "non_preferred_output": [_given(chat)],
    }


_LINES = {"sft": _one_answer, "kto": _labelled, "dpo": _pair}


def _line(chat: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation of which only the last answer is learned: earlier ones are of chats of their
    own.
    """
    earlier = [
        {**message, "weight": 0} if message.get("role") == "assistant" else message
        for message in chat["messages"]
    ]
    tools = {"tools": chat["tools"]} if chat.get("tools") else {}
    return {"messages": [*earlier, dict(answer)], **tools}


def _feedback(chat: Mapping[str, Any]) -> Mapping[str, Any]:
    return chat.get("feedback") or {}


def _better(chat: Mapping[str, Any]) -> dict[str, Any] | None:
    better = _feedback(chat).get("better")
    return None if better is None else _learned(better)


def _given(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The answer that was given, or the one of several that feedback is about. Raises
    LeftOutError.
    """
    choice = chat["choices"][_feedback(chat).get("choice", 0)]
    if choice.get("finish_reason") in _CUT:
        raise LeftOutError("the answer was cut short")
    if choice["message"].get("refusal"):
        raise LeftOutError("the answer is a refusal")
    return _learned(choice["message"])


def _learned(message: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: message[name] for name in _LEARNED if message.get(name) is not None}
    return {"content": None, **known, "role": "assistant"} if "tool_calls" in known else known
