"""One line of a preference file: a conversation, and two answers to it of which one is preferred.

    {"input": {"messages": […], "tools": […]}, "preferred_output": […], "non_preferred_output": […]}     as OpenAI has it
    {"prompt": …, "chosen": …, "rejected": …}     as TRL has it: texts, or lists of messages; without a prompt chosen and
                                                  rejected are whole conversations that begin alike

Both become two samples with the same conversation in front, of which only the answers are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_service.data.chat_line import Sample, load_json, parse_message, require_answered_calls
from ft_service.data.line_errors import LineError, kind, refuse_keys, text_of
from ft_service.data.tool_calls import Tool, parse_tools

Message = tuple[dict[str, Any], int]
"""As a chat template takes it, and its weight."""

_OPENAI = ("input", "preferred_output", "non_preferred_output")
_OLDER: Mapping[Any, str] = {"preferred_completion": "preferred_output", "non_preferred_completion": "non_preferred_output"}
"""What OpenAI's files called the answers before."""
_TRL = ("prompt", "chosen", "rejected")
_ONE_ANSWER = "is of supervised training, which has one answer a line: give method: {type: supervised}, or two answers"
_REFUSED: Mapping[str, str] = {"messages": _ONE_ANSWER, "completion": _ONE_ANSWER, "text": _ONE_ANSWER}


@dataclass(frozen=True)
class Pair:
    """Two samples that are the same but for the answer at their end."""

    preferred: Sample
    rejected: Sample


def parse_pair(text: str) -> Pair:
    """A line as a Pair. Raises LineError (a DataError) with the line's first fault."""
    line = load_json(text)
    if not isinstance(line, dict):
        raise LineError("", f"must be a JSON object with input and two outputs, or prompt and two answers, not {kind(line)}")
    if any(key in line for key in ("chosen", "rejected")):
        return _of_trl(line)
    return _of_openai({_OLDER.get(key, key): value for key, value in line.items()})


def _of_openai(line: dict[str, Any]) -> Pair:
    refuse_keys(line, _OPENAI, _REFUSED, "")
    _require(line, _OPENAI)
    given = line["input"]
    if not isinstance(given, dict):
        raise LineError("input", f"must be an object with messages, not {kind(given)}")
    refuse_keys(given, {"messages", "tools", "parallel_tool_calls"}, {}, "input.")
    _require(given, ("messages",), "input.")
    prompt = _messages(given["messages"], "input.messages")
    try:
        tools = parse_tools(given)
    except LineError as error:
        raise LineError(f"input.{error.field}", error.reason) from None
    return _pair(prompt, tools, {name: _messages(line[name], name) for name in _OPENAI[1:]}, "input.messages")


def _of_trl(line: dict[str, Any]) -> Pair:
    refuse_keys(line, {*_TRL, "tools"}, _REFUSED, "")
    _require(line, _TRL[1:])
    tools = parse_tools({"tools": line["tools"]} if line.get("tools") is not None else {})
    answers = {name: _text_or_messages(line[name], name, "assistant") for name in _TRL[1:]}
    if "prompt" in line:
        return _pair(_text_or_messages(line["prompt"], "prompt", "user"), tools, answers, "prompt")
    if any(isinstance(line[name], str) for name in _TRL[1:]):
        raise LineError("prompt", "is required where chosen and rejected are texts")
    prompt = _common(answers["chosen"], answers["rejected"])
    if not prompt:
        raise LineError("prompt", "is required where chosen and rejected do not begin with the same messages")
    return _pair(prompt, tools, {name: own[len(prompt) :] for name, own in answers.items()}, "chosen", len(prompt))


def _pair(prompt: list[Message], tools: list[Tool], answers: dict[str, list[Message]], place: str, first: int = 0) -> Pair:
    """`place`: of the prompt in the line. `first`: the number of an answer's first message there."""
    if prompt[-1][0]["role"] == "assistant":
        raise LineError(place, "must end with a message that the two answers answer, not with the assistant's own")
    for name, answer in answers.items():
        _require_answer(answer, name, first)
        require_answered_calls([*prompt, *answer], name)
    preferred, rejected = answers.values()
    if preferred == rejected:
        names = " and ".join(answers)
        raise LineError("", f"{names} are the same, so that neither can be preferred: leave the line out")
    return Pair(_sample(prompt, preferred, tools), _sample(prompt, rejected, tools))


def _sample(prompt: list[Message], answer: list[Message], tools: list[Tool]) -> Sample:
    messages = tuple(message for message, _ in (*prompt, *answer))
    return Sample(messages, (0,) * len(prompt) + tuple(weight for _, weight in answer), tuple(tools))


def _require_answer(answer: list[Message], name: str, first: int) -> None:
    if not answer:
        raise LineError(name, "holds no answer behind the messages that both begin with")
    for number, (message, _) in enumerate(answer, first):
        if message["role"] not in ("assistant", "tool"):
            raise LineError(f"{name}.{number}.role", f"must be assistant, or tool, in an answer, not {message['role']}")
    if not any(weight for _, weight in answer):
        raise LineError(name, "holds no assistant message to learn from")


def _common(ours: list[Message], theirs: list[Message]) -> list[Message]:
    """The messages that two conversations begin with, up to the last one that an assistant may answer."""
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    while same and ours[same - 1][0]["role"] == "assistant":
        same -= 1
    return ours[:same]


def _text_or_messages(value: Any, place: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [({"role": role, "content": text_of(value, place)}, 1 if role == "assistant" else 0)]
    return _messages(value, place)


def _messages(value: Any, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise LineError(place, f"must be a list with at least one message, not {kind(value)}")
    return [parse_message(message, f"{place}.{number}") for number, message in enumerate(value)]


def _require(given: Mapping[str, Any], names: tuple[str, ...], prefix: str = "") -> None:
    for name in names:
        if name not in given:
            raise LineError(prefix + name, "is required")
