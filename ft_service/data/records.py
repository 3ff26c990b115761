"""What a data file is made of, whatever it looked like: conversations, prompts with their completions, bare texts, and pairs.

Every format becomes one of these four (ft_service/data/formats/), and tokens are made of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ft_service.data.tool_calls import Tool


@dataclass(frozen=True)
class Chat:
    """One conversation, which the base's chat template writes."""

    messages: tuple[dict[str, Any], ...]
    """`{"role", "content"}` each, as a chat template takes them; roles are system, user, assistant and tool. An assistant's may
    have `tool_calls`, whose arguments are objects, and `reasoning_content`, text that is not blank."""
    weights: tuple[int, ...]
    """For each message: 1 if its tokens are trained on, else 0. Always 0 but for assistants."""
    tools: tuple[Tool, ...] = ()
    """Definitions, as a chat template takes them."""

    @property
    def calls_tools(self) -> bool:
        return any("tool_calls" in message for message in self.messages)

    def by_answers(self) -> Iterator[Chat]:
        """A conversation for each learned answer, which ends with it and learns it alone."""
        for index in (index for index, weight in enumerate(self.weights) if weight):
            yield Chat(self.messages[: index + 1], (*(0,) * index, 1), self.tools)


@dataclass(frozen=True)
class PromptCompletion:
    """Bare text that goes on with other bare text, of which only the completion is learned. No chat template sees it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A document, all of which is learned. No chat template sees it."""

    text: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which one is preferred. What comes before the answers is the same in both."""

    preferred: Chat
    """Only the answer has weight 1."""
    rejected: Chat


Record = Chat | PromptCompletion | Text | Pair
