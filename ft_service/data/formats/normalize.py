"""Records of every format as one of the kinds in ft_service/data/sample_kinds.py. Pure.

prompt, completion    strings: bare text; messages: a conversation of which the completion is learned
text                  bare text
conversations         a conversation whose turns have `from` and `value` (or role and content)
instruction, output   a conversation: instruction and input are the user's message, output the assistant's
preference pairs      two conversations, or bare texts, that begin alike
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ft_service.data import chat_line
from ft_service.data.chat_line import parse_chat, parse_messages, parse_tools, require_answered_calls
from ft_service.data.formats.columns import SPEAKERS
from ft_service.data.formats.detect_format import FORMAT_KEYS, Format, recognise
from ft_service.data.line_errors import LineError, kind, required, shown, text_of
from ft_service.data.preference_line import parse_pair
from ft_service.data.sample_kinds import Conversation, PromptCompletion, Record, Text

Fields = Mapping[str, Any]

_TOOLS = ("tools", "parallel_tool_calls", "functions")
_COLUMNS: Mapping[Format, Sequence[str]] = {
    Format.CHAT: chat_line.KEYS,
    Format.PROMPTS: chat_line.KEYS,
    Format.PROMPT_COMPLETION: ("prompt", "completion", *_TOOLS),
    Format.TEXT: ("text",),
    Format.SHAREGPT: ("conversations", "conversation", "system", *_TOOLS),
    Format.ALPACA: ("instruction", "input", "output", "system"),
    Format.OPENAI_PAIRS: (
        *("input", "preferred_output", "non_preferred_output", "preferred_completion", "non_preferred_completion"),
    ),
    Format.TRL_PAIRS: ("prompt", "chosen", "rejected", "tools"),
}


LABEL = "label"
"""Of TRL's unpaired preferences: whether the answer is a good one. It is looked at, and left out."""


def columns_of(format: Format) -> Sequence[str]:
    """The keys of a format's records; other keys are left out."""
    return _COLUMNS[format]


def as_record(format: Format, fields: Fields) -> Record:
    """A record of this format, without keys that the format does not have. Raises LineError with its first fault."""
    own_keys = set().union(*(keys for other, keys in FORMAT_KEYS if other is format))
    other = recognise(fields) if own_keys.isdisjoint(fields) else None
    if other is not None:
        raise LineError("", f"is {other.value}, and this file began as {format.value}: put each format into a file of its own")
    if format is Format.PROMPT_COMPLETION and fields.get(LABEL) is False:
        raise LineError(LABEL, "is false, and the answer would be learned like a good one: remove such records, or make pairs")
    return _PARSERS[format]({name: value for name, value in fields.items() if name in _COLUMNS[format]})


def _prompt_completion(fields: Fields) -> Record:
    prompt, completion = required(fields, "prompt"), required(fields, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        text_of(prompt, "prompt")
        if not text_of(completion, "completion"):
            raise LineError("completion", "is empty, so there is nothing to train on")
        return PromptCompletion(prompt, completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise LineError(
            "completion", f"is {kind(completion)} and the prompt {kind(prompt)}: both are strings, or both messages"
        )
    before = parse_messages(prompt, "prompt") if prompt else []
    require_answered_calls(before, "prompt")
    answer = parse_messages(completion, "completion")
    require_answered_calls(answer, "completion")
    if not any(weight for _, weight in answer):
        raise LineError("completion", "holds no assistant message to learn")
    messages = tuple(message for message, _ in (*before, *answer))
    weights = (*(0 for _ in before), *(weight for _, weight in answer))
    return Conversation(messages, weights, tuple(parse_tools(fields)))


def _text(fields: Fields) -> Record:
    text = text_of(required(fields, "text"), "text")
    if not text.strip():
        raise LineError("text", "is empty, so there is nothing to train on")
    return Text(text)


def _alpaca(fields: Fields) -> Record:
    instruction = text_of(required(fields, "instruction"), "instruction")
    context = text_of(fields.get("input") or "", "input")
    output = text_of(required(fields, "output"), "output")
    question = "\n\n".join(text for text in (instruction, context) if text.strip())
    if not question:
        raise LineError("instruction", "is empty, and so is the input")
    if not output.strip():
        raise LineError("output", "is empty, so there is nothing to train on")
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    system = _system(fields)
    return Conversation((*system, *turns), (*(0 for _ in system), 0, 1))


def _system(fields: Fields) -> list[dict[str, Any]]:
    system = text_of(fields.get("system") or "", "system")
    return [{"role": "system", "content": system}] if system.strip() else []


def _sharegpt(fields: Fields) -> Record:
    key = "conversations" if "conversations" in fields else "conversation"
    turns = required(fields, key)
    if not isinstance(turns, list) or not turns:
        raise LineError(key, f"must be a list with at least one turn, not {kind(turns)}")
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        messages = turns
    else:
        messages = [_turn(turn, f"{key}.{number}") for number, turn in enumerate(turns)]
    tools = {name: fields[name] for name in _TOOLS if name in fields}
    try:
        return parse_chat({"messages": [*_system(fields), *messages], **tools})
    except LineError as error:
        raise LineError(error.field.replace("messages", key, 1), error.reason) from None


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """One of ShareGPT's turns as a message in OpenAI's format. Raises LineError."""
    if not isinstance(turn, dict):
        raise LineError(place, f"must be an object with from and value, not {kind(turn)}")
    speaker, value = required(turn, "from", f"{place}."), required(turn, "value", f"{place}.")
    content = text_of(value, f"{place}.value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise LineError(f"{place}.from", f"must be one of {', '.join(SPEAKERS)}, not {shown(speaker)}")
    weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
    if speaker == "function_call":
        return {"role": "assistant", "content": None, "function_call": _function_call(content, place), **weight}
    if SPEAKERS[speaker] == "tool":
        return {"role": "function", "name": "tool", "content": content}
    return {"role": SPEAKERS[speaker], "content": content, **weight}


def _function_call(text: str, place: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise LineError(f"{place}.value", "must be a call in JSON: an object with name and arguments")
    return {"name": call["name"], "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False)}


_PARSERS: Mapping[Format, Callable[[Fields], Record]] = {
    Format.CHAT: parse_chat,
    Format.PROMPT_COMPLETION: _prompt_completion,
    Format.TEXT: _text,
    Format.SHAREGPT: _sharegpt,
    Format.ALPACA: _alpaca,
    Format.OPENAI_PAIRS: parse_pair,
    Format.TRL_PAIRS: parse_pair,
}
