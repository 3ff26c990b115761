"""Lines of a chat training file in OpenAI's format: `{"messages": [{"role": …, "content": …}, …],
"tools": […]}`.

The service checks files with this module and the workers train on them with it, so both accept the
same lines. Unsupported content (audio, files) is refused by name, never dropped silently; images
are taken in the user's messages of supervised chats (image_part.py). Chat templates of open models
take tools and calls as OpenAI's API does, with one difference: a call's arguments are an object for
them, and a string of JSON in OpenAI's files.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ft_service.data.image_part import (
    COLUMNS,
    SUPERVISED_ONLY,
    TYPE,
    TYPES,
    USERS_ONLY,
    LineImages,
    refuse_paths,
)
from ft_service.data.json_faults import json_fault
from ft_service.data.line_errors import LineError, json_of, refuse_keys, required, text_of
from ft_service.data.null_fields import definition_without_null_fields, without_null_fields
from ft_service.data.sample_kinds import Conversation, Tool, Variable
from ft_service.spec.template_variables import Variables
from ft_service.wording import kind, shown_value

MAX_LINE_BYTES = 16 * 1024**2
"""Longest line that is accepted, without its line break: room for a picture of
image_part.MOST_BYTES in base64.
"""

WeightedMessage = tuple[dict[str, Any], int]
"""A message as a chat template takes it, and its weight: 1 if its tokens are trained on, else 0."""

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role in the file → role that the chat template sees.

OpenAI renamed `system` to `developer`, and `function` to `tool`.
"""

VARIABLES = "chat_template_kwargs"
"""The key of a record's variables of the chat template, as TRL has it."""
_VARIABLES: TypeAdapter[dict[str, Variable]] = TypeAdapter(Variables)
KEYS = ("messages", "tools", "parallel_tool_calls", "functions", VARIABLES)
_OTHER = "and this file began with OpenAI's chat lines: put each format into a file of its own"
_REFUSED_KEYS: Mapping[str, str] = {
    "instruction": f"is of Alpaca's format, {_OTHER}",
    "conversations": f"is of ShareGPT's format, {_OTHER}",
    **dict.fromkeys(
        ("preferred_output", "non_preferred_output", "chosen", "rejected"),
        f"is of preference pairs, {_OTHER}",
    ),
    **dict.fromkeys(("prompt", "completion"), f"is of prompts with completions, {_OTHER}"),
    "text": f"is bare text, {_OTHER}",
}

_MESSAGE_KEYS: Mapping[str, set[str]] = {
    "assistant": {"tool_calls", "function_call", "reasoning_content", "thinking"},
    "tool": {"tool_call_id"},
}
"""Keys of a message that depend on its role; every message may have role, content, name, and weight
or train.
"""
_PARTICIPANT = re.compile(r"[^\s<|\\/>]{1,64}")
"""The name of a participant, as OpenAI's API takes it."""
_REFUSED_MESSAGE_KEYS: Mapping[str, str] = {
    "refusal": "cannot be trained on: write it as content",
    "audio": "cannot be trained on: only text can",
    "train_detail": "masks parts of a message, and a message is learned whole or not at all: give "
    "weight 0 or 1",
    **dict.fromkeys(
        ("reasoning_content", "thinking", "tool_calls", "function_call"),
        "is only for messages of the role assistant",
    ),
    "tool_call_id": "is for messages of the role tool, which answer a call",
}


def parse_line(text: str) -> Conversation:
    """A line as a conversation. Raises LineError (a DataError) with the line's first fault."""
    return parse_chat(load_object(text))


def parse_chat(line: Mapping[str, Any], *, lead: bool = True) -> Conversation:
    """An object with messages, and perhaps a column of pictures, as a conversation. `lead`: as of
    LineImages.complete. Raises LineError with its first fault.
    """
    refuse_keys(line, (*KEYS, *COLUMNS), _REFUSED_KEYS, "")
    images = LineImages.of(line)
    parsed = parse_messages(required(line, "messages"), "messages", images)
    parsed = images.complete(parsed, lead=lead)
    require_answered_calls(parsed)
    tools = parse_tools(line)
    if not any(message["role"] == "assistant" for message, _ in parsed):
        raise LineError("messages", "holds no assistant message, so there is nothing to train on")
    if not any(weight for _, weight in parsed):
        raise LineError(
            "messages", "every assistant message has weight 0, so there is nothing to train on"
        )
    messages, weights = zip(*parsed, strict=True)
    return Conversation(
        messages,
        weights,
        tuple(tools),
        parse_variables(line),
        tuple(images.pictures),
        tuple(images.places),
    )


def parse_conversation(
    messages: list[Any], tools: list[Any]
) -> tuple[list[dict[str, Any]], list[Tool], LineImages]:
    """Messages to answer and definitions of tools from a request, as a chat template takes them,
    and the pictures of IMAGE in the messages, of which none is in a file.

    Raises LineError.
    """
    images = LineImages()
    parsed = images.complete(
        [
            parse_message(message, f"messages.{number}", images)
            for number, message in enumerate(messages)
        ]
    )
    refuse_paths(images.pictures, images.places)
    require_answered_calls(parsed)
    return [message for message, _ in parsed], parse_tools({"tools": tools}), images


def parse_variables(line: Mapping[str, Any]) -> dict[str, Variable]:
    """The variables of the chat template that a record sets, without null ones, which tables write.

    Raises LineError.
    """
    given = line.get(VARIABLES)
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if value is not None}
    if given in (None, {}):
        return {}
    try:
        return _VARIABLES.validate_python(given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join((VARIABLES, *(str(part) for part in fault["loc"][:1])))
        reason = fault["msg"].removeprefix("Value error, ")
        raise LineError(place, f"is not a variable that a template can read: {reason}") from None


def load_object(text: str) -> dict[str, Any]:
    """The JSON object that a line holds. Raises LineError."""
    try:
        line = json.loads(text, object_pairs_hook=_with_unique_keys)
    except json.JSONDecodeError as error:
        raise LineError("", json_fault(text, error)) from None
    except RecursionError:
        raise LineError("", "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # numbers of thousands of digits
        raise LineError("", f"is not usable JSON: {error}") from None
    if not isinstance(line, dict):
        raise LineError("", f"must be a JSON object with messages, not {kind(line)}")
    return line


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises LineError for a key that is given twice: Python's reader would silently
    keep the last one.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise LineError("", f"has the key {shown_value(twice)} twice in an object: keep one")
    return made


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A record without fields that are null (null_fields.py).

    Definitions of tools are left to `parse_tools`.
    """
    tools = record.get("tools") or record.get("functions") or []
    if isinstance(given := record.get("input"), dict):  # OpenAI's preference pairs
        tools = tools or given.get("tools") or []
    schemas: dict[str, Any] = {}
    with contextlib.suppress(LineError):  # whoever parses them tells
        definitions = [tool["function"] for tool in parse_tools({"tools": tools})]
        schemas = {definition["name"]: definition.get("parameters") for definition in definitions}
    return without_null_fields(record, schemas)


def parse_messages(
    messages: Any, place: str, images: LineImages | None = None
) -> list[WeightedMessage]:
    """A list of messages with their weights. `place`: dotted, in the line. `images`: those of the
    line, which is to be completed; None: they are refused. Raises LineError.
    """
    if not isinstance(messages, list) or not messages:
        raise LineError(place, f"must be a list with at least one message, not {kind(messages)}")
    return [
        parse_message(message, f"{place}.{number}", images)
        for number, message in enumerate(messages)
    ]


def parse_message(message: Any, place: str, images: LineImages | None = None) -> WeightedMessage:
    """A message as chat templates take it, and its weight.

    `place`: dotted, in the line. `images`: as of `parse_messages`. Raises LineError.

    Fields that are null count as absent, and so do empty annotations: the messages of OpenAI's
    answers have them, which become training data and are sent back in a request.
    """
    if not isinstance(message, dict):
        raise LineError(place, f"must be an object with role and content, not {kind(message)}")
    message = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    if message.get("annotations") == []:
        del message["annotations"]
    role = required(message, "role", f"{place}.")
    if not isinstance(role, str) or role not in ROLES:
        raise LineError(
            f"{place}.role", f"must be one of {', '.join(ROLES)}, not {shown_value(role)}"
        )
    known = {"role", "content", "name", "weight", "train"} | _MESSAGE_KEYS.get(role, set())
    refuse_keys(
        message,
        known,
        {key: why for key, why in _REFUSED_MESSAGE_KEYS.items() if key not in known},
        f"{place}.",
    )
    message = _with_thoughts_apart(message, place) if role == "assistant" else message
    calls = (
        parse_calls(message, place)
        if "tool_calls" in message or "function_call" in message
        else None
    )
    content = (
        "" if calls and message.get("content") is None else _parse_content(message, place, images)
    )
    parsed = {"role": ROLES[role], "content": content, **({"tool_calls": calls} if calls else {})}
    parsed |= _parse_reasoning(message, content, place)
    if role == "tool" and (
        "tool_call_id" in message or "name" not in message
    ):  # TRL's results have the name alone
        parsed["tool_call_id"] = text_of(
            required(message, "tool_call_id", f"{place}."), f"{place}.tool_call_id"
        )
    if role == "function" or (
        role == "tool" and "name" in message
    ):  # the function that was called; some templates write it
        parsed["name"] = text_of(required(message, "name", f"{place}."), f"{place}.name")
    elif "name" in message:
        parsed["name"] = _parse_participant(message["name"], f"{place}.name")
    return parsed, _parse_weight(message, role, place)


def _parse_participant(name: Any, place: str) -> str:
    if not _PARTICIPANT.fullmatch(text_of(name, place)):
        allowed = "1 to 64 characters, none of them white space, <, >, |, / or \\"
        raise LineError(place, f"of a participant must be {allowed}, not {shown_value(name)}")
    return name


def _parse_content(message: dict[str, Any], place: str, images: LineImages | None) -> str:
    place = f"{place}.content"
    content = required(message, "content", place.removesuffix("content"))
    of_user = message["role"] == "user"
    if not isinstance(content, list):
        text = text_of(content, place)
        return text if images is None else images.text(text, place, of_user=of_user)
    texts: list[str] = []
    for number, part in enumerate(content):
        own = f"{place}.{number}"
        if not isinstance(part, dict) or part.get("type") not in TYPES:
            text = _parse_part(part, own)
            own = f"{own}.text"
            texts.append(text if images is None else images.text(text, own, of_user=of_user))
        elif images is not None and of_user:
            texts.append(images.part(part, own))
        else:
            why = SUPERVISED_ONLY if images is None else USERS_ONLY
            raise LineError(
                f"{own}.type", f"is '{part['type']}', and {why}. Leave the part out, or the line"
            )
    return "".join(texts)


def _with_thoughts_apart(message: dict[str, Any], place: str) -> dict[str, Any]:
    """An assistant's message whose first parts of type thinking (Mistral's, Anthropic's) are its
    reasoning_content.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thoughts = list(takewhile(_is_thought, content))
    if not thoughts:
        return message
    if message.get("reasoning_content") is not None or message.get("thinking") is not None:
        raise LineError(
            f"{place}.content.0",
            "is a thought, and reasoning_content or thinking is given too: keep one",
        )
    texts = [
        _parse_thought(part, f"{place}.content.{number}") for number, part in enumerate(thoughts)
    ]
    return {
        **message,
        "content": content[len(thoughts) :] or "",
        "reasoning_content": "\n".join(texts),
    }


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _parse_thought(part: dict[str, Any], place: str) -> str:
    """The text of a part of type thinking: a string, or parts of type text.

    What proves it to its maker is left out.
    """
    refuse_keys(part, {"type", "thinking", "closed", "signature"}, {}, f"{place}.")
    thought = required(part, "thinking", f"{place}.")
    if isinstance(thought, list):
        return "".join(
            _parse_part(inner, f"{place}.thinking.{number}") for number, inner in enumerate(thought)
        )
    return text_of(thought, f"{place}.thinking")


def _parse_part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise LineError(place, f'must be {{"type": "text", "text": …}}, not {kind(part)}')
    if _is_thought(part):
        raise LineError(
            f"{place}.type",
            "is 'thinking', which only the first parts of an assistant's message may be",
        )
    if (type := required(part, "type", f"{place}.")) != "text":
        raise LineError(
            f"{place}.type",
            f"is {shown_value(type)}, and only parts of type 'text' are taken, and '{TYPE}' in "
            "the user's messages of supervised chats: no audio, films or files. Leave the part "
            "out, or the line",
        )
    refuse_keys(part, {"type", "text"}, {}, f"{place}.")
    return text_of(part.get("text"), f"{place}.text")


def _parse_reasoning(message: dict[str, Any], content: str, place: str) -> dict[str, str]:
    """The assistant's reasoning before its answer, under either of its names; blank reasoning is
    left out.
    """
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


def _parse_weight(message: dict[str, Any], role: str, place: str) -> int:
    if "train" in message:
        return _parse_train(message, role, place)
    if "weight" not in message:
        return 1 if role == "assistant" else 0
    weight = message["weight"]
    if role != "assistant":
        raise LineError(
            f"{place}.weight", f"is only for assistant messages, and this one's role is {role}"
        )
    if type(weight) is not int or weight not in (0, 1):
        raise LineError(f"{place}.weight", f"must be 0 or 1, not {shown_value(weight)}")
    return weight


def _parse_train(message: dict[str, Any], role: str, place: str) -> int:
    """The weight that Axolotl's key for a message's mask means."""
    if "weight" in message:
        raise LineError(f"{place}.train", "says the same as weight, which is given too: keep one")
    if not isinstance(train := message["train"], bool):
        raise LineError(f"{place}.train", f"must be true or false, not {shown_value(train)}")
    if train and role != "assistant":
        raise LineError(
            f"{place}.train",
            f"can be true only for assistant messages, and this one's role is {role}",
        )
    return int(train)


def require_answered_calls(
    parsed: Sequence[WeightedMessage], place: str = "messages", first: int = 0
) -> None:
    """Raise LineError for a tool's message that answers no call before it.

    `place`: that of the messages in the line. `first`: the number there of the first one, negative
    if messages of another place come before them.
    """
    called: set[str] = set()
    for number, (message, _) in enumerate(parsed, first):
        called.update(call["id"] for call in message.get("tool_calls", []) if "id" in call)
        answered = message.get("tool_call_id")
        if answered is not None and answered not in called:
            raise LineError(
                f"{place}.{number}.tool_call_id",
                f"{shown_value(answered)} is the id of no call before it",
            )


def parse_tools(line: Mapping[str, Any]) -> list[Tool]:
    """A line's definitions of tools, from `tools` or the older `functions`; null counts as absent.

    Raises LineError.
    """
    line = {
        key: line[key]
        for key in ("tools", "functions", "parallel_tool_calls")
        if line.get(key) is not None
    }
    if "parallel_tool_calls" in line and not isinstance(line["parallel_tool_calls"], bool):
        raise LineError(
            "parallel_tool_calls", f"must be true or false, not {kind(line['parallel_tool_calls'])}"
        )
    if "functions" not in line:
        return [
            _tool(tool, f"tools.{number}")
            for number, tool in enumerate(_tools_list(line.get("tools", [])))
        ]
    if "tools" in line:
        raise LineError("functions", "is the older word for tools, which are given too: keep one")
    functions = _list(line["functions"], "functions")
    return [
        _function_tool(function, f"functions.{number}") for number, function in enumerate(functions)
    ]


def parse_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, from `tool_calls` or the older `function_call`, as chat
    templates take them. Raises LineError.
    """
    if "function_call" in message:
        if "tool_calls" in message:
            raise LineError(
                f"{place}.function_call",
                "is the older word for tool_calls, which are given too: keep one",
            )
        return [
            {
                "type": "function",
                "function": _call(message["function_call"], f"{place}.function_call"),
            }
        ]
    calls = _list(message["tool_calls"], f"{place}.tool_calls")
    if not calls:
        raise LineError(
            f"{place}.tool_calls", "must hold at least one call; leave it out where there is none"
        )
    return [_tool_call(call, f"{place}.tool_calls.{number}") for number, call in enumerate(calls)]


def _tools_list(tools: Any) -> list[Any]:
    """The definitions of tools, which Parquet files and LLaMA-Factory's hold as a string of JSON;
    an empty one means none.
    """
    if not isinstance(tools, str):
        return _list(tools, "tools")
    try:
        parsed = json.loads(tools) if tools.strip() else []
    except (ValueError, RecursionError):
        raise LineError(
            "tools", "must be a list, not a string, unless that is JSON of a list"
        ) from None
    return _list(parsed, "tools")


def _tool(tool: Any, place: str) -> Tool:
    if isinstance(tool, dict):
        tool = {key: value for key, value in tool.items() if value is not None}
    # As LLaMA-Factory has them.
    is_bare = isinstance(tool, dict) and "function" not in tool and "name" in tool
    if is_bare and tool.get("type", "function") == "function":
        return _function_tool({key: value for key, value in tool.items() if key != "type"}, place)
    refuse_keys(_object(tool, place), {"type", "function"}, {}, f"{place}.")
    if tool.get("type") != "function":
        raise LineError(f"{place}.type", "must be 'function'")
    return _function_tool(tool.get("function"), f"{place}.function")


def _function_tool(function: Any, place: str) -> Tool:
    definition = definition_without_null_fields(_object(function, place))
    refuse_keys(definition, {"name", "description", "parameters", "strict"}, {}, f"{place}.")
    _name(definition, place)
    if "parameters" in definition:
        _object(definition["parameters"], f"{place}.parameters")
    json_of(definition, place)
    return {
        "type": "function",
        "function": {key: value for key, value in definition.items() if key != "strict"},
    }


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    refuse_keys(_object(call, place), {"id", "type", "function"}, {}, f"{place}.")
    if call.get("type", "function") != "function":
        raise LineError(f"{place}.type", "must be 'function'")
    named = {"id": text_of(call["id"], f"{place}.id")} if "id" in call else {}
    return {
        **named,
        "type": "function",
        "function": _call(call.get("function"), f"{place}.function"),
    }


def _call(function: Any, place: str) -> dict[str, Any]:
    called = _object(function, place)
    refuse_keys(called, {"name", "arguments"}, {}, f"{place}.")
    name = _name(called, place)
    arguments = called.get("arguments")
    if not isinstance(arguments, dict):
        text = text_of(arguments, f"{place}.arguments")
        try:
            arguments = json.loads(text)
        except json.JSONDecodeError as error:
            raise LineError(f"{place}.arguments", json_fault(text, error)) from None
        except (ValueError, RecursionError):
            raise LineError(f"{place}.arguments", "is not usable JSON") from None
    return {
        "name": name,
        "arguments": json_of(_object(arguments, f"{place}.arguments"), f"{place}.arguments"),
    }


def _name(function: dict[str, Any], place: str) -> str:
    return text_of(required(function, "name", f"{place}."), f"{place}.name")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LineError(place, f"must be an object, not {kind(value)}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise LineError(place, f"must be a list, not {kind(value)}")
    return value
