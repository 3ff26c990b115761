"""Tools in a chat line: their definitions, the calls that an assistant makes, and OpenAI's older words for both.

Chat templates of open models take what OpenAI's interface takes, with one difference: arguments of a call are an object for
them and a string of JSON in OpenAI's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ft_service.data.line_errors import LineError, kind, refuse_keys, text_of

Tool = dict[str, Any]


def parse_tools(line: Mapping[str, Any]) -> list[Tool]:
    """The definitions of a line, from `tools` or the older `functions`. Raises LineError."""
    if "parallel_tool_calls" in line and not isinstance(line["parallel_tool_calls"], bool):
        raise LineError("parallel_tool_calls", f"must be true or false, not {kind(line['parallel_tool_calls'])}")
    if "functions" not in line:
        return [_tool(tool, f"tools.{number}") for number, tool in enumerate(_list(line.get("tools", []), "tools"))]
    if "tools" in line:
        raise LineError("functions", "is the older word for tools, which are given too: keep one")
    functions = _list(line["functions"], "functions")
    return [_function_tool(function, f"functions.{number}") for number, function in enumerate(functions)]


def parse_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The calls of an assistant message, from `tool_calls` or the older `function_call`, as chat templates take them."""
    if "function_call" in message:
        if "tool_calls" in message:
            raise LineError(f"{place}.function_call", "is the older word for tool_calls, which are given too: keep one")
        return [{"type": "function", "function": _call(message["function_call"], f"{place}.function_call")}]
    calls = _list(message["tool_calls"], f"{place}.tool_calls")
    if not calls:
        raise LineError(f"{place}.tool_calls", "must hold at least one call; leave it out where there is none")
    return [_tool_call(call, f"{place}.tool_calls.{number}") for number, call in enumerate(calls)]


def _tool(tool: Any, place: str) -> Tool:
    refuse_keys(_object(tool, place), {"type", "function"}, {}, f"{place}.")
    if tool.get("type") != "function":
        raise LineError(f"{place}.type", "must be 'function'")
    return _function_tool(tool.get("function"), f"{place}.function")


def _function_tool(function: Any, place: str) -> Tool:
    definition = _object(function, place)
    refuse_keys(definition, {"name", "description", "parameters", "strict"}, {}, f"{place}.")
    _name(definition, place)
    if "parameters" in definition:
        _object(definition["parameters"], f"{place}.parameters")
    return {"type": "function", "function": {key: value for key, value in definition.items() if key != "strict"}}


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    refuse_keys(_object(call, place), {"id", "type", "function"}, {}, f"{place}.")
    if call.get("type", "function") != "function":
        raise LineError(f"{place}.type", "must be 'function'")
    named = {"id": text_of(call["id"], f"{place}.id")} if "id" in call else {}
    return {**named, "type": "function", "function": _call(call.get("function"), f"{place}.function")}


def _call(function: Any, place: str) -> dict[str, Any]:
    called = _object(function, place)
    refuse_keys(called, {"name", "arguments"}, {}, f"{place}.")
    name = _name(called, place)
    text = text_of(called.get("arguments"), f"{place}.arguments")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        raise LineError(f"{place}.arguments", "is not JSON") from None
    return {"name": name, "arguments": _object(arguments, f"{place}.arguments")}


def _name(function: dict[str, Any], place: str) -> str:
    if "name" not in function:
        raise LineError(f"{place}.name", "is required")
    return text_of(function["name"], f"{place}.name")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LineError(place, f"must be an object, not {kind(value)}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise LineError(place, f"must be a list, not {kind(value)}")
    return value
