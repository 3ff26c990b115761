"""One line of a chat training file, as OpenAI's users write them: `{"messages": [{"role": …, "content": …}, …], "tools": […]}`.

Shared by the service, which checks a file before a job may start, and the workers, which train on it, so that both accept the
same lines. Unsupported content (images, audio) is refused by name instead of being left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ft_service.data.line_errors import LineError, kind, refuse_keys, shown, text_of
from ft_service.data.records import Chat
from ft_service.data.tool_calls import Tool, parse_calls, parse_tools

MAX_LINE_BYTES = 10 * 1024**2
"""Longest line that is read, its end not counted."""

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role in the file → role that the chat template sees. `developer` is OpenAI's newer name of `system`, `function` its older one
of `tool`."""

KEYS = ("messages", "tools", "parallel_tool_calls", "functions")
_OTHER = "and this file began with OpenAI's chat lines: put each format into a file of its own"
_REFUSED_KEYS: Mapping[str, str] = {
    "instruction": f"is of Alpaca's format, {_OTHER}",
    "conversations": f"is of ShareGPT's format, {_OTHER}",
    "preferred_output": f"is of preference pairs, {_OTHER}",
    "non_preferred_output": f"is of preference pairs, {_OTHER}",
    "chosen": f"is of preference pairs, {_OTHER}",
    "rejected": f"is of preference pairs, {_OTHER}",
    "prompt": f"is of prompts with completions, {_OTHER}",
    "completion": f"is of prompts with completions, {_OTHER}",
    "text": f"is bare text, {_OTHER}",
}

_MESSAGE_KEYS: Mapping[str, set[str]] = {
    "assistant": {"tool_calls", "function_call", "reasoning_content", "thinking"},
    "tool": {"tool_call_id"},
    "function": {"name"},
}
"""Keys of a message by its role, beside role, content and weight."""
_REFUSED_MESSAGE_KEYS: Mapping[str, str] = {
    "name": "is not part of chat templates: leave it out",
    "refusal": "cannot be trained on: write it as content",
    "audio": "cannot be trained on: only text can",
    "reasoning_content": "can be in only assistant messages",
    "thinking": "can be in only assistant messages",
    "tool_calls": "can be in only assistant messages",
    "function_call": "can be in only assistant messages",
    "tool_call_id": "is for messages of the role tool, which answer a call",
}


def _keys(role: str) -> tuple[set[str], Mapping[str, str]]:
    """Known keys of a message, and the refused ones with the reason."""
    known = {"role", "content", "weight"} | _MESSAGE_KEYS.get(role, set())
    return known, {key: why for key, why in _REFUSED_MESSAGE_KEYS.items() if key not in known}


_KEYS_BY_ROLE = {role: _keys(role) for role in ROLES}


def parse_line(text: str) -> Chat:
    """A line as a Chat. Raises LineError (a DataError) with the line's first fault."""
    return parse_chat(load_object(text))


def parse_chat(line: Mapping[str, Any]) -> Chat:
    """An object with messages as a Chat. Raises LineError with its first fault."""
    refuse_keys(line, KEYS, _REFUSED_KEYS, "")
    parsed = parse_messages(line, "messages")
    tools = parse_tools(line)
    _require_target(parsed)
    return Chat(tuple(message for message, _ in parsed), tuple(weight for _, weight in parsed), tuple(tools))


def parse_messages(line: Mapping[str, Any], key: str) -> list[tuple[dict[str, Any], int]]:
    """The messages below a key, and their weights. Raises LineError."""
    if key not in line:
        raise LineError(key, "is required")
    messages = line[key]
    if not isinstance(messages, list) or not messages:
        raise LineError(key, f"must be a list with at least one message, not {kind(messages)}")
    parsed = [parse_message(message, f"{key}.{number}") for number, message in enumerate(messages)]
    require_answered_calls(parsed, key)
    return parsed


def load_object(text: str) -> dict[str, Any]:
    """A line's object. Raises LineError."""
    line = load_json(text)
    if not isinstance(line, dict):
        raise LineError("", f"must be a JSON object with messages, not {kind(line)}")
    return line


def parse_conversation(messages: list[Any], tools: list[Any]) -> tuple[list[dict[str, Any]], list[Tool]]:
    """Messages that an answer is wanted to, and definitions of tools, as a chat template takes them: as in a line, and a field
    without a value is none. Raises LineError.
    """
    given = [_without_nulls(message) if isinstance(message, dict) else message for message in messages]
    parsed = [parse_message(message, f"messages.{number}") for number, message in enumerate(given)]
    require_answered_calls(parsed)
    return [message for message, _ in parsed], parse_tools({"tools": tools})


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what OpenAI's answers hold and a next request sends back: fields that are null."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def load_json(text: str) -> Any:
    """A line's JSON. Raises LineError."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise LineError("", f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except RecursionError:
        raise LineError("", "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # numbers of thousands of digits
        raise LineError("", f"is not usable JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises LineError for a key that is given twice, of which JSON's readers keep the last without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LineError("", f"has the key {shown(twice)} twice in an object: keep one")
    return made


def parse_message(message: Any, place: str) -> tuple[dict[str, Any], int]:
    """A message as chat templates take it, and its weight. Raises LineError. `place`: dotted, in the line."""
    if not isinstance(message, dict):
        raise LineError(place, f"must be an object with role and content, not {kind(message)}")
    role = _parse_role(message, place)
    refuse_keys(message, *_KEYS_BY_ROLE[role], f"{place}.")
    calls = parse_calls(message, place) if "tool_calls" in message or "function_call" in message else None
    content = "" if calls and message.get("content") is None else _parse_content(message, place)
    parsed = {"role": ROLES[role], "content": content, **({"tool_calls": calls} if calls else {})}
    parsed |= _parse_reasoning(message, content, place)
    if role in ("tool", "function"):
        parsed |= _parse_answer(message, role, place)
    return parsed, _parse_weight(message, role, place)


def _parse_role(message: dict[str, Any], place: str) -> str:
    if "role" not in message:
        raise LineError(f"{place}.role", "is required")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise LineError(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    return role


def _parse_content(message: dict[str, Any], place: str) -> str:
    if "content" not in message:
        raise LineError(f"{place}.content", "is required")
    content = message["content"]
    if isinstance(content, list):
        return "".join(_parse_part(part, f"{place}.content.{number}") for number, part in enumerate(content))
    return text_of(content, f"{place}.content")


def _parse_part(part: Any, place: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise LineError(place, "only parts of type text are taken: no images, audio or files")
    refuse_keys(part, {"type", "text"}, {}, f"{place}.")
    return text_of(part.get("text"), f"{place}.text")


def _parse_reasoning(message: dict[str, Any], content: str, place: str) -> dict[str, str]:
    """What an assistant thinks before it answers, under either of its names; empty is none."""
    key = "thinking" if message.get("thinking") is not None else "reasoning_content"
    reasoning = message.get(key)
    if reasoning is None:
        return {}
    if key == "thinking" and message.get("reasoning_content") is not None:
        raise LineError(f"{place}.thinking", "and reasoning_content are both given: keep one")
    text = text_of(reasoning, f"{place}.{key}")
    if text.strip() and "</think>" in content:
        raise LineError(f"{place}.{key}", "is given too where the content has a </think>: keep one")
    return {"reasoning_content": text} if text.strip() else {}


def _parse_answer(message: dict[str, Any], role: str, place: str) -> dict[str, str]:
    """The field of a tool's message that names the call it answers."""
    key = "tool_call_id" if role == "tool" else "name"
    if key not in message:
        raise LineError(f"{place}.{key}", "is required")
    return {key: text_of(message[key], f"{place}.{key}")}


def _parse_weight(message: dict[str, Any], role: str, place: str) -> int:
    if "weight" not in message:
        return 1 if role == "assistant" else 0
    weight = message["weight"]
    if role != "assistant":
        raise LineError(f"{place}.weight", f"is only for assistant messages, and this one's role is {role}")
    if type(weight) is not int or weight not in (0, 1):
        raise LineError(f"{place}.weight", f"must be 0 or 1, not {shown(weight)}")
    return weight


def require_answered_calls(parsed: list[tuple[dict[str, Any], int]], place: str = "messages") -> None:
    """Raises LineError for a tool's message that answers no call before it. `place`: of the messages in the line."""
    called: set[str] = set()
    for number, (message, _) in enumerate(parsed):
        called.update(call["id"] for call in message.get("tool_calls", []) if "id" in call)
        answered = message.get("tool_call_id")
        if answered is not None and answered not in called:
            raise LineError(f"{place}.{number}.tool_call_id", f"{shown(answered)} is the id of no call before it")


def _require_target(parsed: list[tuple[dict[str, Any], int]]) -> None:
    if not any(message["role"] == "assistant" for message, _ in parsed):
        raise LineError("messages", "holds no assistant message, so there is nothing to train on")
    if not any(weight for _, weight in parsed):
        raise LineError("messages", "every assistant message has weight 0, so there is nothing to train on")
