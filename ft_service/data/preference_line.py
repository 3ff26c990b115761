"""Lines of a preference file: a conversation, and two answers to it of which one is preferred.

    {"input": {"messages": […], "tools": […]}, "preferred_output": […], "non_preferred_output": […]}
    OpenAI's format {"prompt": …, "chosen": …, "rejected": …}     TRL's format: lists of messages,
    or texts, which are a user's message and
                                                  its answers (bare text in TRL); without a prompt,
                                                  chosen and rejected are whole conversations that
                                                  begin alike

Each line becomes two samples that begin with the same conversation; only the answers are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ft_service.data.chat_line import (
    WeightedMessage,
    parse_messages,
    parse_tools,
    require_answered_calls,
)
from ft_service.data.image_part import COLUMNS, LineImages
from ft_service.data.line_errors import LineError, refuse_keys, required, text_of
from ft_service.data.sample_kinds import Conversation, Pair, Tool
from ft_service.wording import kind

_OPENAI = ("input", "preferred_output", "non_preferred_output")
_OLDER: Mapping[Any, str] = {
    "preferred_completion": "preferred_output",
    "non_preferred_completion": "non_preferred_output",
}
"""OpenAI's older names of the answers → the present ones."""
_TRL = ("prompt", "chosen", "rejected")
_ONE_ANSWER = (
    "is of supervised training, which has one answer a line: give method: {type: "
    "supervised}, or two answers"
)
_REFUSED: Mapping[str, str] = {
    "messages": _ONE_ANSWER,
    "completion": _ONE_ANSWER,
    "text": _ONE_ANSWER,
}


def parse_pair(line: Mapping[str, Any]) -> Pair:
    """An object as a pair. Raises LineError (a DataError) with its first fault."""
    if "chosen" in line or "rejected" in line:
        return _parse_trl(line)
    return _parse_openai({_OLDER.get(key, key): value for key, value in line.items()})


def _parse_openai(line: Mapping[str, Any]) -> Pair:
    refuse_keys(line, _OPENAI, _REFUSED, "")
    given, *outputs = (required(line, name) for name in _OPENAI)
    if not isinstance(given, dict):
        raise LineError("input", f"must be an object with messages, not {kind(given)}")
    refuse_keys(given, {"messages", "tools", "parallel_tool_calls"}, {}, "input.")
    images = LineImages()
    prompt = parse_messages(required(given, "messages", "input."), "input.messages", images)
    prompt = images.complete(prompt)
    try:
        tools = parse_tools(given)
    except LineError as error:
        raise LineError(f"input.{error.field}", error.reason) from None
    answers = {
        name: parse_messages(output, name)
        for name, output in zip(_OPENAI[1:], outputs, strict=True)
    }
    return _with_images(_pair(prompt, tools, answers, "input.messages"), images)


def _parse_trl(line: Mapping[str, Any]) -> Pair:
    refuse_keys(line, {*_TRL, "tools", *COLUMNS}, _REFUSED, "")
    chosen = required(line, "chosen")
    rejected = required(line, "rejected")
    tools = parse_tools(line)
    images = LineImages.of(line)
    is_prompt_repeated = (
        isinstance(chosen, list)
        and isinstance(rejected, list)
        and isinstance(line.get("prompt"), str)
    )
    if (
        "prompt" in line and not is_prompt_repeated
    ):  # else both answers begin with the messages that the prompt's text repeats
        prompt = _text_or_messages(line["prompt"], "prompt", "user", images)
        prompt = images.complete(prompt)
        answers = {
            "chosen": _text_or_messages(chosen, "chosen", "assistant", images),
            "rejected": _text_or_messages(rejected, "rejected", "assistant", images),
        }
        return _with_images(_pair(prompt, tools, answers, "prompt"), images)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise LineError(
            "prompt", "is required where chosen and rejected are texts: give there what both answer"
        )
    if images.column:
        raise LineError(
            images.column,
            "needs the messages that show it in a list of their own: give them as prompt",
        )
    answers = {
        "chosen": parse_messages(chosen, "chosen"),
        "rejected": parse_messages(rejected, "rejected"),
    }
    prompt = _common_prompt(answers["chosen"], answers["rejected"])
    if not prompt:
        raise LineError(
            "prompt",
            "is required where chosen and rejected do not begin with the same messages: "
            "data: {prompt: COLUMN} names its column",
        )
    return _pair(
        prompt,
        tools,
        {name: own[len(prompt) :] for name, own in answers.items()},
        "chosen",
        len(prompt),
    )


def _pair(
    prompt: list[WeightedMessage],
    tools: list[Tool],
    answers: dict[str, list[WeightedMessage]],
    place: str,
    first: int = 0,
) -> Pair:
    """A pair of samples. `answers`: the preferred one first.

    `place`: that of the prompt in the line. `first`: the number of an answer's first message in the
    line. Raises LineError.
    """
    if prompt[-1][0]["role"] == "assistant":
        raise LineError(
            place,
            "must end with a message that the two answers answer, not with the assistant's own",
        )
    require_answered_calls(prompt, place)
    for name, answer in answers.items():
        _require_answer(answer, name, first)
        require_answered_calls([*prompt, *answer], name, first - len(prompt))
    preferred, rejected = answers.values()
    if preferred == rejected:
        names = " and ".join(answers)
        raise LineError(
            "", f"{names} are the same, so that neither can be preferred: leave the line out"
        )
    return Pair(_sample(prompt, preferred, tools), _sample(prompt, rejected, tools))


def _sample(
    prompt: list[WeightedMessage], answer: list[WeightedMessage], tools: list[Tool]
) -> Conversation:
    messages = tuple(message for message, _ in (*prompt, *answer))
    return Conversation(
        messages, (0,) * len(prompt) + tuple(weight for _, weight in answer), tuple(tools)
    )


def _require_answer(answer: list[WeightedMessage], name: str, first: int) -> None:
    if not answer:
        raise LineError(name, "holds no answer after the messages that both begin with")
    for number, (message, _) in enumerate(answer, first):
        if message["role"] not in ("assistant", "tool"):
            raise LineError(
                f"{name}.{number}.role",
                f"must be assistant, or tool, in an answer, not {message['role']}",
            )
    if not any(weight for _, weight in answer):
        raise LineError(name, "holds no assistant message to learn from")


def _common_prompt(
    chosen: list[WeightedMessage], rejected: list[WeightedMessage]
) -> list[WeightedMessage]:
    """The messages with which both conversations begin, up to the last one that an assistant may
    answer.
    """
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    while same and chosen[same - 1][0]["role"] == "assistant":
        same -= 1
    return chosen[:same]


def _text_or_messages(
    value: Any, place: str, role: str, images: LineImages
) -> list[WeightedMessage]:
    if isinstance(value, str):
        text = images.text(text_of(value, place), place, of_user=role == "user")
        return [({"role": role, "content": text}, int(role == "assistant"))]
    return parse_messages(value, place, images)


def _with_images(pair: Pair, images: LineImages) -> Pair:
    """A pair whose prompt shows these pictures."""
    preferred, rejected = (
        replace(answer, images=tuple(images.pictures), image_places=tuple(images.places))
        for answer in (pair.preferred, pair.rejected)
    )
    return Pair(preferred, rejected)
