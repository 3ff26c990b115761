"""Records as lines in OpenAI's formats, which every trainer reads. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ft_service.data.chat_line import VARIABLES
from ft_service.data.formats.columns import LABEL
from ft_service.data.image_part import content_of
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import (
    Conversation,
    GradedPrompt,
    Pair,
    PromptCompletion,
    Record,
    Text,
    images_in,
)


def line_of(record: Record, *, as_chat: bool = False) -> dict[str, Any]:
    """The JSON object of a record: a chat, a preference pair, or bare text unchanged.

    `as_chat`: a prompt becomes the user's message, and its completion the answer; raises LineError
    for a document, which cannot become a chat.
    """
    match record:
        case Conversation():
            return {
                "messages": _messages(record, 0, weights=record.label is None),
                **_tools(record),
                **_variables(record),
                **_label(record),
            }
        case PromptCompletion() if as_chat:
            return line_of(record.as_chat)
        case PromptCompletion():
            return {"prompt": record.prompt, "completion": record.completion, **_label(record)}
        case Text() if as_chat:
            raise LineError("text", "is a document, and not a conversation")
        case Text():
            return {"text": record.text}
        case Pair():
            return _pair(record)
        case GradedPrompt():
            messages = [_message(message) for message in record.messages]
            return {"messages": messages, **_tools(record), **_variables(record), **record.item}


def _pair(pair: Pair) -> dict[str, Any]:
    chosen = pair.preferred
    rejected = pair.rejected
    begin = next(index for index, weight in enumerate(chosen.weights) if weight)
    given = Conversation(
        chosen.messages[:begin], chosen.weights[:begin], chosen.tools, images=chosen.images
    )
    return {
        "input": {"messages": _messages(given, 0), **_tools(given)},
        "preferred_output": _messages(chosen, begin, weights=False),
        "non_preferred_output": _messages(rejected, begin, weights=False),
        **_variables(chosen),
    }


def _messages(chat: Conversation, begin: int, *, weights: bool = True) -> list[dict[str, Any]]:
    """The messages from number `begin` on.

    `weights`: with weight 0 for answers that are not learned.
    """
    images = iter(chat.images)
    shown = [
        message | {"content": content_of(message["content"], list(islice(images, count)))}
        if chat.images and (count := images_in([message]))
        else message
        for message in chat.messages
    ]
    return [
        _message(message)
        | (
            {"weight": 0}
            if weights and message["role"] == "assistant" and not weight and any(chat.weights)
            else {}
        )
        for message, weight in zip(shown[begin:], chat.weights[begin:], strict=True)
    ]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's format: arguments as text; calls without an id and their results in its
    older form.
    """
    written = dict(message)
    if message["role"] == "tool" and "tool_call_id" not in message:
        written["role"] = "function"
    if calls := message.get("tool_calls"):
        written["content"] = message["content"] or None
        if len(calls) > 1 or "id" in calls[0]:  # the older form holds one call
            written["tool_calls"] = [call | {"function": _called(call)} for call in calls]
        else:
            del written["tool_calls"]
            written["function_call"] = _called(calls[0])
    return written


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _label(record: Conversation | PromptCompletion) -> dict[str, bool]:
    return {} if record.label is None else {LABEL: record.label}


def _tools(chat: Conversation | GradedPrompt) -> dict[str, Sequence[Any]]:
    return {"tools": list(chat.tools)} if chat.tools else {}


def _variables(chat: Conversation | GradedPrompt) -> dict[str, Any]:
    return {VARIABLES: dict(chat.variables)} if chat.variables else {}
