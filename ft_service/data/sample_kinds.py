"""Kinds of records: conversations, prompts with their completions, texts, and pairs.

Records of every format become one of these (ft_service/data/formats/), and all tokens are made from
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

Detail = Literal["auto", "low", "high"]
"""How closely a picture is looked at, as OpenAI's parts of images have it."""
DETAILS: tuple[Detail, ...] = get_args(Detail)
IMAGE = "\ufdd0"
"""Stands for a picture in the content of a user's message: a character that Unicode gives to no
text. The n-th of a conversation with pictures stands for its n-th picture."""

Tool = dict[str, Any]
"""The definition of a tool, as chat templates take it."""
Variable = bool | int | float | str
"""The value of a variable that a chat template reads."""


@dataclass(frozen=True)
class Picture:
    """An image of a sample, as its file had it."""

    key: str
    """64 hexadecimal digits: SHA-256 of the encoded bytes and of `detail`. Equal keys, equal
    pictures."""
    data: bytes = field(repr=False)
    """The encoded image: JPEG, PNG, WEBP or GIF."""
    detail: str = "auto"
    """One of DETAILS."""
    url: str | None = None
    """Where it is on the web, if it was not fetched yet: it has no bytes then."""
    path: str | None = None
    """The file that holds it, as the line names it, if that was not read yet, likewise."""

    @classmethod
    def on_web(cls, url: str, detail: str = "auto") -> Self:
        """One that is to be fetched."""
        return cls(hashlib.sha256(f"{detail} {url}".encode()).hexdigest(), b"", detail, url)

    @classmethod
    def in_file(cls, path: str, detail: str = "auto") -> Self:
        """One that is to be read from a file."""
        key = hashlib.sha256(f"{detail} {path}".encode()).hexdigest()
        return cls(key, b"", detail, path=path)

    @classmethod
    def of(cls, data: bytes, detail: str = "auto") -> Self:
        return cls(hashlib.sha256(detail.encode() + b"\0" + data).hexdigest(), data, detail)


def images_in(messages: Iterable[Mapping[str, Any]]) -> int:
    """The number of pictures in the messages of a conversation that has some."""
    return sum(message["content"].count(IMAGE) for message in messages if message["role"] == "user")


@dataclass(frozen=True)
class Conversation:
    """A conversation, which is rendered with the base's chat template."""

    messages: tuple[dict[str, Any], ...]
    """`{"role", "content"}` each, as a chat template takes them; roles are system, user, assistant
    and tool. An assistant's may have `tool_calls`, whose arguments are objects, and
    `reasoning_content`, text that is not blank. `name` is that of the participant; a tool's is that
    of the function.
    """
    weights: tuple[int, ...]
    """One weight for each message: 1 if its tokens are trained on, else 0.

    Only the assistant's may be 1.
    """
    tools: tuple[Tool, ...] = ()
    """Definitions of tools."""
    variables: Mapping[str, Variable] = field(default_factory=dict)
    """Variables of the chat template that the record sets, beside the job's."""
    images: tuple[Picture, ...] = ()
    """Pictures of the user's messages, whose contents have IMAGE in their places."""
    image_places: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Dotted place of each in its line, for messages."""
    label: bool | None = None
    """Whether its answer is a good one, of data for KTO; None: it has no label."""

    def first(self, count: int, weights: tuple[int, ...]) -> Conversation:
        """The conversation of the first `count` messages, with these weights."""
        messages = self.messages[:count]
        shown = images_in(messages) if self.images else 0
        return replace(
            self,
            messages=messages,
            weights=weights,
            images=self.images[:shown],
            image_places=self.image_places[:shown],
        )

    @property
    def calls_tools(self) -> bool:
        return any("tool_calls" in message for message in self.messages)

    @property
    def is_without_answer(self) -> bool:
        """True if its learned answers have neither words, calls nor reasoning: only the end of a
        turn is learned.
        """
        learned = [
            message for message, weight in zip(self.messages, self.weights, strict=True) if weight
        ]
        return not any(
            message["content"].strip() or "tool_calls" in message or "reasoning_content" in message
            for message in learned
        )

    def by_answers(self) -> Iterator[Conversation]:
        """One conversation for each learned answer, which ends with that answer and learns only
        it.
        """
        for index in (index for index, weight in enumerate(self.weights) if weight):
            yield self.first(index + 1, (*(0,) * index, 1))


@dataclass(frozen=True)
class PromptCompletion:
    """Bare text and its continuation, of which only the continuation is learned.

    The chat template is not applied.
    """

    prompt: str
    completion: str
    label: bool | None = None
    """As of a Conversation."""

    @property
    def as_chat(self) -> Conversation:
        """The conversation of a user's message and its answer."""
        turns = ("user", self.prompt), ("assistant", self.completion)
        return Conversation(
            tuple({"role": role, "content": content} for role, content in turns),
            (0, 1),
            label=self.label,
        )


@dataclass(frozen=True)
class Text:
    """A document, which is learned whole. The chat template is not applied."""

    text: str


@dataclass(frozen=True)
class Pair:
    """Two conversations that differ in the answer, of which one is preferred."""

    preferred: Conversation
    """Only the answer has weight 1."""
    rejected: Conversation


@dataclass(frozen=True)
class GradedPrompt:
    """A conversation for the model to answer, of reinforcement learning: a grader gives the answers
    rewards.
    """

    messages: tuple[dict[str, Any], ...]
    """As of a Conversation; the last one is not the assistant's."""
    tools: tuple[Tool, ...] = ()
    item: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the line, for the grader."""
    variables: Mapping[str, Variable] = field(default_factory=dict)
    """As of a Conversation."""


def in_context(record: Conversation | PromptCompletion | GradedPrompt, context: str) -> Record:
    """The record behind a context: as the beginning of its system message, or before its prompt."""
    if isinstance(record, PromptCompletion):
        return replace(record, prompt=f"{context}{record.prompt}")
    first = record.messages[0]
    if first["role"] == "system":
        begun = {**first, "content": f"{context}\n\n{first['content']}"}
        return replace(record, messages=(begun, *record.messages[1:]))
    behind = ({"role": "system", "content": context}, *record.messages)
    if isinstance(record, GradedPrompt):
        return replace(record, messages=behind)
    return replace(record, messages=behind, weights=(0, *record.weights))


def is_unanswered(record: Record) -> bool:
    """Return whether messages follow a conversation's last answer, of which nothing is learned."""
    return isinstance(record, Conversation) and record.messages[-1]["role"] != "assistant"


def named_roles(record: Record) -> set[str]:
    """The roles of which messages of the record have the name of a participant: system, user,
    assistant.
    """
    if isinstance(record, Pair):
        return named_roles(record.preferred) | named_roles(record.rejected)
    messages = record.messages if isinstance(record, Conversation | GradedPrompt) else ()
    return {
        message["role"] for message in messages if "name" in message and message["role"] != "tool"
    }


def label_of(record: Record) -> bool | None:
    """Whether the record's answer is a good one. None: it has no label."""
    return record.label if isinstance(record, Conversation | PromptCompletion) else None


def images_of(record: Record) -> int:
    """The number of pictures of a record; of a pair those of its prompt."""
    if isinstance(record, Pair):
        return len(record.preferred.images)
    return len(record.images) if isinstance(record, Conversation) else 0


Record = Conversation | PromptCompletion | Text | Pair | GradedPrompt
