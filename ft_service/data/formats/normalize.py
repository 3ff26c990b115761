"""Records of every format as one of the kinds in ft_service/data/sample_kinds.py. Pure.

prompt, completion    strings: bare text; messages: a conversation of which the completion is learned
text                  bare text
conversations         a conversation whose turns have `from` and `value` (or role and content)
instruction, output   a conversation: instruction and input are the user's message, output the assistant's
preference pairs      two conversations, or bare texts, that begin alike (LLaMA-Factory's: an instruction or turns, and answers)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ft_service.data import chat_line
from ft_service.data.chat_line import parse_chat, parse_messages, parse_tools, require_answered_calls
from ft_service.data.formats import media
from ft_service.data.formats.columns import SPEAKERS
from ft_service.data.formats.detect_format import FORMAT_KEYS, Format, recognise
from ft_service.data.formats.media import refuse_media
from ft_service.data.line_errors import LineError, required, text_of
from ft_service.data.preference_line import parse_pair
from ft_service.data.sample_kinds import Conversation, PromptCompletion, Record, Text
from ft_service.wording import kind, shown_value

Fields = Mapping[str, Any]

_TOOLS = ("tools", "parallel_tool_calls", "functions")
_COLUMNS: Mapping[Format, Sequence[str]] = {
    Format.CHAT: chat_line.KEYS,
    Format.PROMPTS: chat_line.KEYS,
    Format.PROMPT_COMPLETION: ("prompt", "completion", *_TOOLS),
    Format.TEXT: ("text",),
    Format.SHAREGPT: ("conversations", "conversation", "system", *_TOOLS),
    Format.ALPACA: ("instruction", "input", "output", "system", "history"),
    Format.OPENAI_PAIRS: (
        *("input", "preferred_output", "non_preferred_output", "preferred_completion", "non_preferred_completion"),
    ),
    Format.TRL_PAIRS: (
        *("prompt", "chosen", "rejected", "tools"),
        *("conversations", "conversation", "instruction", "input", "system", "history"),
    ),
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
    refuse_media({name: value for name, value in fields.items() if name in _COLUMNS[format] or name in media.COLUMNS})
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
    question = _question(fields)
    output = text_of(required(fields, "output"), "output")
    if not output.strip():
        raise LineError("output", "is empty, so there is nothing to train on")
    turns = (*_system(fields), *question, {"role": "assistant", "content": output})
    return Conversation(turns, tuple(int(turn["role"] == "assistant") for turn in turns))


def _question(fields: Fields) -> list[dict[str, Any]]:
    """The user's message of one of Alpaca's records, its instruction and its input, after LLaMA-Factory's `history`: a list of
    earlier questions with their answers."""
    instruction = text_of(required(fields, "instruction"), "instruction")
    context = text_of(fields.get("input") or "", "input")
    question = "\n\n".join(text for text in (instruction, context) if text.strip())
    if not question:
        raise LineError("instruction", "is empty, and so is the input")
    turns: list[dict[str, Any]] = []
    history = fields.get("history") or []
    if not isinstance(history, list):
        raise LineError("history", f"must be a list of earlier questions with their answers, not {kind(history)}")
    for number, earlier in enumerate(history):
        if not isinstance(earlier, list) or len(earlier) != 2:
            raise LineError(f"history.{number}", f"must be a list of a question and its answer, not {shown_value(earlier)}")
        for role, text in zip(("user", "assistant"), earlier, strict=True):
            turns.append({"role": role, "content": text_of(text, f"history.{number}")})
    return [*turns, {"role": "user", "content": question}]


def _system(fields: Fields) -> list[dict[str, Any]]:
    system = text_of(fields.get("system") or "", "system")
    return [{"role": "system", "content": system}] if system.strip() else []


def _sharegpt(fields: Fields) -> Record:
    key = "conversations" if "conversations" in fields else "conversation"
    messages = _messages_of(required(fields, key), key)
    tools = {name: fields[name] for name in _TOOLS if name in fields}
    try:
        return parse_chat({"messages": [*_system(fields), *messages], **tools})
    except LineError as error:
        raise LineError(error.field.replace("messages", key, 1), error.reason) from None


def _messages_of(turns: Any, key: str) -> list[Any]:
    """ShareGPT's turns as messages in OpenAI's format; they may be that already. Raises LineError."""
    if not isinstance(turns, list) or not turns:
        raise LineError(key, f"must be a list with at least one turn, not {kind(turns)}")
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return turns
    return [_turn(turn, f"{key}.{number}") for number, turn in enumerate(turns)]


def _trl_pair(fields: Fields) -> Record:
    """A preference pair in TRL's format, or in one of LLaMA-Factory's, which have its prompt as ShareGPT's turns or as
    Alpaca's instruction, and each answer as a text or as one turn. Axolotl's pairs of one message each are read so too."""
    answers = {name: _answer(fields[name], name) for name in ("chosen", "rejected") if name in fields}
    is_answer = all(isinstance(fields.get(name), str | dict) for name in ("chosen", "rejected"))
    key = next((name for name in ("conversations", "conversation", "instruction") if fields.get(name) is not None), None)
    given = {name: fields[name] for name in ("prompt", "tools") if name in fields}
    if is_answer and isinstance(given.get("prompt"), str) and not isinstance(fields["chosen"], str):
        given["prompt"] = [{"role": "user", "content": given["prompt"]}]
    if not is_answer or "prompt" in fields or key is None:
        return parse_pair({**given, **answers})
    prompt = _question(fields) if key == "instruction" else _messages_of(fields[key], key)
    try:
        return parse_pair({**given, "prompt": [*_system(fields), *prompt], **answers})
    except LineError as error:
        raise LineError(error.field.replace("prompt", key, 1), error.reason) from None


def _answer(value: Any, place: str) -> Any:
    """An answer of a pair as messages, if it is one message or has ShareGPT's turns. All else is left as it is."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and all(isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in value):
        return [_turn(turn, f"{place}.{number}") for number, turn in enumerate(value)]
    return value


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """One of ShareGPT's turns as a message in OpenAI's format. Raises LineError."""
    if not isinstance(turn, dict):
        raise LineError(place, f"must be an object with from and value, not {kind(turn)}")
    speaker, value = required(turn, "from", f"{place}."), required(turn, "value", f"{place}.")
    content = text_of(value, f"{place}.value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise LineError(f"{place}.from", f"must be one of {', '.join(SPEAKERS)}, not {shown_value(speaker)}")
    weight = {key: turn[key] for key in ("weight", "train", "train_detail") if turn.get(key) is not None}
    if speaker == "function_call":
        return {"role": "assistant", "content": None, "function_call": _function_call(content, place), **weight}
    if SPEAKERS[speaker] == "tool":
        return {"role": "function", "name": "tool", "content": content, **weight}
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
    Format.TRL_PAIRS: _trl_pair,
}
