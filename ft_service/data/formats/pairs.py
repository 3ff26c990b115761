"""Preference pairs, as OpenAI and as TRL write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ft_service.data.chat_line import parse_messages
from ft_service.data.line_errors import LineError, kind, refuse_keys, text_of
from ft_service.data.records import Chat, Pair, PromptCompletion
from ft_service.data.tool_calls import parse_tools

Fields = Mapping[str, Any]
Messages = Sequence[dict[str, Any]]

_ANSWERS = (("preferred_output", "preferred_completion"), ("non_preferred_output", "non_preferred_completion"))
"""OpenAI's two answers, by today's name and by the older one."""
_INPUT_KEYS = ("messages", "tools", "parallel_tool_calls")


def openai_pair(fields: Fields) -> Pair:
    """OpenAI's preference line. Raises LineError with its first fault."""
    refuse_keys(fields, ["input", *(name for names in _ANSWERS for name in names)], {}, "")
    if "input" not in fields:
        raise LineError("input", "is required")
    given = fields["input"]
    if not isinstance(given, dict):
        raise LineError("input", f"must be an object with messages, not {kind(given)}")
    refuse_keys(given, _INPUT_KEYS, {}, "input.")
    prompt = _within("input", lambda: parse_messages(given, "messages"))
    tools = tuple(_within("input", lambda: parse_tools(given)))
    chosen, rejected = (_answer(fields, names) for names in _ANSWERS)
    return _pair([message for message, _ in prompt], chosen, rejected, tools, _ANSWERS[1][0])


def trl_pair(fields: Fields) -> Pair:
    """TRL's preference record: strings, or messages; without a prompt, it is what both answers begin with. Raises LineError."""
    for key in ("chosen", "rejected"):
        if key not in fields:
            raise LineError(key, "is required")
    chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _bare_pair(prompt, text_of(chosen, "chosen"), text_of(rejected, "rejected"))
    ours = [message for message, _ in parse_messages(fields, "chosen")]
    others = [message for message, _ in parse_messages(fields, "rejected")]
    tools = tuple(parse_tools(dict(fields)))
    if isinstance(prompt, list) and prompt:
        before = [message for message, _ in parse_messages(fields, "prompt")]
        begins = all(answer[: len(before)] == before and len(answer) > len(before) for answer in (ours, others))
        cut = len(before) if begins else 0  # some write the prompt into the answers too
        return _pair(before, ours[cut:], others[cut:], tools, "rejected")
    if prompt is not None and not isinstance(prompt, str):
        raise LineError("prompt", f"must be a string or a list of messages, not {kind(prompt)}")
    alike = 0  # a string beside whole conversations repeats what they begin with
    while alike < min(len(ours), len(others)) - 1 and ours[alike] == others[alike]:
        alike += 1
    if not alike:
        raise LineError("prompt", "is required: the two conversations do not begin alike")
    return _pair(ours[:alike], ours[alike:], others[alike:], tools, "rejected")


def _bare_pair(prompt: Any, chosen: str, rejected: str) -> Pair:
    if not isinstance(prompt, str):
        raise LineError("prompt", "is required, a string as the two answers are")
    text_of(prompt, "prompt")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise LineError(key, "is empty")
    if chosen == rejected:
        raise LineError("rejected", "is the same as the preferred answer, so there is nothing to tell apart")
    return Pair(PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected))


def _answer(fields: Fields, names: tuple[str, str]) -> Messages:
    there = [name for name in names if name in fields]
    if not there:
        raise LineError(names[0], "is required")
    if len(there) > 1:
        raise LineError(names[1], f"is the older word for {names[0]}, which is given too: keep one")
    return [message for message, _ in parse_messages(fields, there[0])]


def _pair(prompt: Messages, chosen: Messages, rejected: Messages, tools: tuple[Any, ...], second: str) -> Pair:
    """`second`: what the answer that is not preferred is called. Raises LineError."""
    if not prompt or prompt[-1]["role"] == "assistant":
        raise LineError("", "the prompt must end with what is answered: a user's message or a tool's")
    for name, answer in (("chosen" if second == "rejected" else "preferred_output", chosen), (second, rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise LineError(name, "holds no assistant message")
    if list(chosen) == list(rejected):
        raise LineError(second, "is the same as the preferred answer, so there is nothing to tell apart")
    return Pair(_learning(prompt, chosen, tools), _learning(prompt, rejected, tools))


def _learning(prompt: Messages, answer: Messages, tools: tuple[Any, ...]) -> Chat:
    weights = (*(0 for _ in prompt), *(int(message["role"] == "assistant") for message in answer))
    return Chat((*prompt, *answer), weights, tools)


def _within(place: str, parse: Any) -> Any:
    try:
        return parse()
    except LineError as error:
        raise LineError(f"{place}.{error.field}", error.reason) from None
