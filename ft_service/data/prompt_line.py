"""Lines of a file of prompts, which the model answers: a conversation, and what a grader needs.

{"messages": […], "tools": […], "reference_answer": …, …}     OpenAI's format: all other keys are
the item, `{{ item.key }}`

{"prompt": […], …}     the same under the name that TRL's and verl's files have for it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_service.data.chat_line import (
    KEYS,
    parse_messages,
    parse_tools,
    parse_variables,
    require_answered_calls,
)
from ft_service.data.line_errors import LineError, json_of, required, text_of
from ft_service.data.sample_kinds import GradedPrompt
from ft_service.wording import shown_value

_ANSWERED: Mapping[str, str] = {
    **dict.fromkeys(("preferred_output", "non_preferred_output", "chosen", "rejected"), "dpo"),
    "completion": "supervised",
}
"""Keys of other methods' lines → the method.

With them instead of messages, the file is of that method.
"""


def _with_messages(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line whose conversation is its prompt. Raises LineError."""
    prompt = line.get("prompt")
    if isinstance(prompt, list):
        return {
            **{key: value for key, value in line.items() if key != "prompt"},
            "messages": prompt,
        }
    if isinstance(prompt, str):
        raise LineError(
            "prompt",
            "is text, and the model answers conversations: write it as "
            '"messages": [{"role": "user", "content": …}]',
        )
    raise LineError(
        "messages",
        "is required, the conversation that the model answers: data: {messages: COLUMN} names its "
        f"column, and there are {', '.join(map(shown_value, list(line)[:8]))}",
    )


def parse_prompt(line: Mapping[str, Any]) -> GradedPrompt:
    """An object as a prompt to grade. Raises LineError (a DataError) with its first fault."""
    other = (
        next((key for key in _ANSWERED if key in line), None) if "messages" not in line else None
    )
    if other is not None:
        reason = (
            f"is of method: {{type: {_ANSWERED[other]}}}; a prompt to grade has messages, "
            "and no answer"
        )
        raise LineError(other, reason)
    if "messages" not in line:
        line = _with_messages(line)
    given = required(line, "messages")
    parsed = parse_messages(given, "messages")
    for number, message in enumerate(given):
        if message.get("weight") is not None:
            raise LineError(
                f"messages.{number}.weight",
                "says what is learned, and nothing of a prompt is: leave it out",
            )
    require_answered_calls(parsed)
    if parsed[-1][0]["role"] == "assistant":
        raise LineError(
            "messages",
            "must end with a message that the model answers, not with the assistant's own: give "
            "an expected answer under a "
            "key of its own, such as reference_answer",
        )
    item = {
        text_of(key, "a key"): json_of(value, key) for key, value in line.items() if key not in KEYS
    }
    messages = tuple(message for message, _ in parsed)
    return GradedPrompt(messages, tuple(parse_tools(line)), item, parse_variables(line))
