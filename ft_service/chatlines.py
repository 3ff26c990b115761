"""One line of a chat training file, as OpenAI's users write them: `{"messages": [{"role": …, "content": …}, …]}`.

Shared by the service, which checks a file before a job may start, and the workers, which train on it, so that both accept the
same lines. Only plain chat trains: what needs more (tool calls, images) is refused by name instead of being left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.errors import DataError

MAX_LINE_BYTES = 10 * 1024**2
"""Longest line that is read, its end not counted."""

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in the file → role that the chat template sees. `developer` is OpenAI's newer name of `system`, which templates know."""

_TOOLS = "tool calls cannot be trained on in this version: leave the line out, or write the call as plain text"

_REFUSED_KEYS: Mapping[str, str] = {
    "tools": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "functions": _TOOLS,
    "prompt": "prompt and completion are not chat: write them as a user and an assistant message",
    "completion": "prompt and completion are not chat: write them as a user and an assistant message",
    "input": "preference pairs (DPO) cannot be trained on in this version",
    "preferred_output": "preference pairs (DPO) cannot be trained on in this version",
    "non_preferred_output": "preference pairs (DPO) cannot be trained on in this version",
}

_REFUSED_MESSAGE_KEYS: Mapping[str, str] = {
    "tool_calls": _TOOLS,
    "tool_call_id": _TOOLS,
    "function_call": _TOOLS,
    "name": "names of participants are not part of chat templates: leave it out",
    "refusal": "write the refusal as content",
    "audio": "only text can be trained on",
}


@dataclass(frozen=True)
class Sample:
    """One conversation."""

    messages: tuple[dict[str, str], ...]
    """`{"role", "content"}` each, as a chat template takes them; roles are system, user and assistant."""
    weights: tuple[int, ...]
    """For each message: 1 if its tokens are trained on, else 0. Always 0 for system and user."""


class LineError(DataError):
    """A line that cannot be trained on. `field`: dotted place in the line, empty: the line as a whole; `reason`: why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


def parse_line(text: str) -> Sample:
    """A line as a Sample. Raises LineError (a DataError) with the first thing that is wrong with it."""
    line = _load(text)
    if not isinstance(line, dict):
        raise LineError("", f"must be a JSON object with messages, not {_kind(line)}")
    _refuse_keys(line, {"messages"}, _REFUSED_KEYS, "")
    if "messages" not in line:
        raise LineError("messages", "is required")
    messages = line["messages"]
    if not isinstance(messages, list) or not messages:
        raise LineError("messages", f"must be a list with at least one message, not {_kind(messages)}")
    parsed = [_parse_message(message, f"messages.{number}") for number, message in enumerate(messages)]
    _require_target(parsed)
    return Sample(tuple(message for message, _ in parsed), tuple(weight for _, weight in parsed))


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError("", f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise LineError("", "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # numbers of thousands of digits
        raise LineError("", f"is not usable JSON: {error}") from None


def _parse_message(message: Any, place: str) -> tuple[dict[str, str], int]:
    if not isinstance(message, dict):
        raise LineError(place, f"must be an object with role and content, not {_kind(message)}")
    _refuse_keys(message, {"role", "content", "weight"}, _REFUSED_MESSAGE_KEYS, f"{place}.")
    role = _parse_role(message, place)
    content = _parse_content(message, place)
    return {"role": ROLES[role], "content": content}, _parse_weight(message, role, place)


def _parse_role(message: dict[str, Any], place: str) -> str:
    if "role" not in message:
        raise LineError(f"{place}.role", "is required")
    role = message["role"]
    if role in ("tool", "function"):
        raise LineError(f"{place}.role", f"{role}: {_TOOLS}")
    if not isinstance(role, str) or role not in ROLES:
        raise LineError(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {_shown(role)}")
    return role


def _parse_content(message: dict[str, Any], place: str) -> str:
    if "content" not in message:
        raise LineError(f"{place}.content", "is required")
    content = message["content"]
    if isinstance(content, list):
        raise LineError(f"{place}.content", "must be one string: lists of parts (images, audio, files) cannot be trained on")
    if not isinstance(content, str):
        raise LineError(f"{place}.content", f"must be a string, not {_kind(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise LineError(f"{place}.content", f"holds half of a surrogate pair at character {error.start + 1}") from None
    return content


def _parse_weight(message: dict[str, Any], role: str, place: str) -> int:
    if "weight" not in message:
        return 1 if role == "assistant" else 0
    weight = message["weight"]
    if role != "assistant":
        raise LineError(f"{place}.weight", f"is only for assistant messages, and this one's role is {role}")
    if type(weight) is not int or weight not in (0, 1):
        raise LineError(f"{place}.weight", f"must be 0 or 1, not {_shown(weight)}")
    return weight


def _require_target(parsed: list[tuple[dict[str, str], int]]) -> None:
    if not any(message["role"] == "assistant" for message, _ in parsed):
        raise LineError("messages", "holds no assistant message, so there is nothing to train on")
    if not any(weight for _, weight in parsed):
        raise LineError("messages", "every assistant message has weight 0, so there is nothing to train on")


def _refuse_keys(found: dict[str, Any], known: set[str], refused: Mapping[str, str], prefix: str) -> None:
    for key in found:
        if key in refused:
            raise LineError(prefix + key, refused[key])
    for key in found:
        if key not in known:
            raise LineError(prefix + _shown(key).strip("'"), f"there is no such key; known are {', '.join(sorted(known))}")


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, dict)):
        name = "a list" if isinstance(value, list) else "an object"
        return name if value else f"an empty {name.split()[1]}"
    return "a string" if isinstance(value, str) else "a number"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
