"""An answer's text, reasoning and calls of tools, read from what a model has written: the one
reader for evaluations, graders and the preview.

An answer is text with its special tokens. How calls look is asked of the base's chat template
(call_grammar.py). Thoughts are enclosed by pairs of texts that are the same in all published
templates; where the prompt opens a thought, the answer begins within it. Models that write channels
(gpt-oss) write each part as `<|channel|>NAME<|message|>TEXT`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ft_service.data.call_grammar import CallGrammar, calls_of_json
from ft_service.data.tool_call_parser import CallFormat
from ft_service.graders.grades import Sample
from ft_service.ids import new_id

THOUGHTS = (
    *(
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<thought>", "</thought>"),
        ("<seed:think>", "</seed:think>"),
    ),
    *(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>")),
)
"""Pairs of texts that enclose a thought in published templates."""
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
PARTS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
"""What parts of an answer in channels end with."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def closing_of(prompt: str) -> str:
    """The text that closes the thought which a prompt opens at its end; empty: it opens none."""
    end = prompt.rstrip()
    return next((closing for opening, closing in THOUGHTS if end.endswith(opening.rstrip())), "")


@dataclass(frozen=True)
class Answer:
    """An answer, without surrounding white space."""

    text: str
    """The final text: without reasoning, calls and special tokens."""
    reasoning: str = ""
    calls: Sequence[Mapping[str, str]] = field(default_factory=list)
    """Calls of tools: name, and arguments as a string of JSON."""

    @property
    def whole(self) -> str:
        """The text, then a line of JSON for each call, to be compared with another answer's."""
        return "\n".join([*([self.text] if self.text else []), *map(_written, self.calls)])

    def sample(self, *, truncated: bool = False) -> Sample:
        """The answer as graders get it."""
        calls = [
            {"id": new_id("call_"), "type": "function", "function": dict(call)}
            for call in self.calls
        ]
        reason = "tool_calls" if calls else "length" if truncated else "stop"
        return Sample(self.text, calls, reason, self.reasoning)


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of a base are written."""

    special: Sequence[str] = ()
    """Texts of the tokenizer's special tokens."""
    calls: CallFormat | CallGrammar | None = None
    """How the chat template writes calls of tools. None: in no way that is known."""

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> AnswerFormat:
        """The format of its fields as JSON."""
        calls = value.get("calls")
        return cls(tuple(value["special"]), calls and calls_of_json(calls))

    def read(self, text: str, *, tools: bool, closing: str = "") -> Answer:
        """An answer's parts. `text`: with special tokens; those that end it may be left out.

        `tools`: whether its prompt offers any; else nothing is a call. `closing`: of the prompt
        (`closing_of`).
        """
        if self.has_channels and MESSAGE in text:
            return self._of_channels(text, tools=tools)
        reasoning, rest = _thought_and_rest(text, closing)
        words, calls = (self.calls.parse(rest) if tools and self.calls is not None else None) or (
            rest,
            [],
        )
        return Answer(self._plain(words), self._plain(reasoning), calls)

    @property
    def marks_calls(self) -> bool:
        """Whether a call is told from text by what stands before it, and not only by its form."""
        return self.has_channels or (self.calls is not None and bool(self.calls.prefix))

    @cached_property
    def has_channels(self) -> bool:
        """Whether an answer is written in channels."""
        return {CHANNEL, MESSAGE} <= set(self.special)

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        longest_first = sorted(filter(None, self.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def without_special(self, text: str) -> str:
        """A text without special tokens."""
        return self._specials.sub("", text) if self._specials else text

    def _plain(self, text: str) -> str:
        return self.without_special(text).strip()

    def _of_channels(self, text: str, *, tools: bool) -> Answer:
        """The final text is that of the channel `final`; without one, what else is meant for the
        user.
        """
        finals = list[str]()
        asides = list[str]()
        thoughts = list[str]()
        calls = list[dict[str, str]]()
        for part in PARTS.split(text):
            head, found, body = part.partition(MESSAGE)
            if not found or not (words := self._plain(body)):
                continue
            kind = channel_of(head, tools=tools)
            if kind == "call" and (recipient := _RECIPIENT.search(head)) is not None:
                calls.append({"name": recipient[1], "arguments": words})
            else:
                {"reasoning": thoughts, "final": finals}.get(kind, asides).append(words)
        return Answer("\n".join(finals or asides), "\n".join(thoughts), calls)


def channel_of(head: str, *, tools: bool) -> Literal["call", "reasoning", "final", "aside"]:
    """What a part of an answer in channels is. `head`: the text before the part's `<|message|>`."""
    channel = head.partition(CHANNEL)[2].strip()
    if _RECIPIENT.search(head) is not None:
        return "call" if tools else "reasoning"
    return (
        "reasoning"
        if channel.startswith("analysis")
        else "final"
        if channel.startswith("final")
        else "aside"
    )


def _thought_and_rest(text: str, closing: str) -> tuple[str, str]:
    """The thought at an answer's beginning, and what follows it.

    A thought that is not closed is all of the answer.
    """
    begun = text.lstrip()
    for opening, own in THOUGHTS:
        if begun.startswith(opening):
            thought, _, rest = begun.removeprefix(opening).partition(own)
            return thought, rest
    if closing:
        thought, _, rest = text.partition(closing)
        return thought, rest
    for opening, own in THOUGHTS:
        thought, found, rest = text.partition(own)
        if found and opening not in thought:
            return thought, rest
    return "", text


def _written(call: Mapping[str, str]) -> str:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return json.dumps(
        {"name": call["name"], "arguments": arguments}, ensure_ascii=False, sort_keys=True
    )
