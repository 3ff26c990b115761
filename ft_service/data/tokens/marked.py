"""Where the answers of a conversation lie in its full text, for templates that write a turn otherwise once more follows.

Such templates (Qwen3 drops the empty think block of all answers but the last, Phi-3.5 ends a text but no prompt with its
end-of-text token, Gemma 4 and DeepSeek open a prompt with what no answer begins with) make no prompt a prefix of the text. So
marks are put into the messages: characters that occur nowhere else, where a content ends, where a reasoning begins and where a
call's name ends. Rendered, and taken out again, they must leave the very text; then they say where each message lies in it.

What a prompt writes after the last mark (`<|im_end|>\\n<|im_start|>assistant\\n`) is found in the text after the same mark, as
far as both agree: there the answer begins. What a conversation that ends with the answer writes after its last mark
(`<|im_end|>\\n`) is found likewise: there it ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from ft_service.data.line_errors import LineError

Span = tuple[int, int]
Message = dict[str, Any]

TRUSTED_AFTER = 2
"""Answers of a kind that are rendered, and must agree, before others of that kind are taken to begin or end alike."""
_OPEN, _CLOSE = "<think>", "</think>"
_MARKUP = r"<[^<>\n]{1,60}>|\[/?[A-Z_]{2,40}\]"
"""What a base that does not declare its special tokens may still mean as one."""


class Template(Protocol):
    """The base's template: messages as text. Raises LineError."""

    def __call__(self, messages: list[Any], add_generation_prompt: bool = False) -> str: ...


def thought_and_answer(message: Message) -> tuple[str, str]:
    """An assistant's reasoning and its answer, without the space around; either may be empty."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if (thought := _thought(content)) is not None:
        reasoning, content = reasoning or content[slice(*thought)], content[thought[1] + len(_CLOSE) :]
    return reasoning.strip(), content.strip()


def _thought(content: str) -> Span | None:
    """Where a content's reasoning is, less the space before it. None: there is none."""
    end = content.find(_CLOSE)
    if end < 0:
        return None
    begin = _past_space(content, 0)
    if content.startswith(_OPEN, begin):
        begin = _past_space(content, begin + len(_OPEN))
    return min(begin, end), end


def _past_space(text: str, begin: int) -> int:
    rest = text[begin:]
    return begin + len(rest) - len(rest.lstrip())


@dataclass(frozen=True)
class Place:
    """A mark: of the content's end, the reasoning's begin or a call's name."""

    message: int
    part: str


class Marks:
    """Two characters that a conversation does not use, and what is written between them."""

    def __init__(self, *texts: str) -> None:
        used = set().union(*map(set, texts))
        free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used)
        self._opening, self._closing = next(free), next(free)
        self._mark = re.compile(f"{self._opening}([0-9]+)([a-z]){self._closing}")

    def into(self, index: int, message: Message, *, empty: bool) -> Message:
        """A message with its marks. `empty`: into an empty content too."""
        content, calls = message["content"], message.get("tool_calls")
        marked = dict(message)
        thought = _thought(content) if message["role"] == "assistant" else None
        if thought is not None and thought[0] < thought[1]:
            content = content[: thought[0]] + self._text(index, "r") + content[thought[0] :]
        if content.strip() or (empty and not calls):
            core = content.rstrip() or content
            marked["content"] = core + self._text(index, "e") + content[len(core) :]
        if reasoning := (message.get("reasoning_content") or ""):
            begin = _past_space(reasoning, 0)
            marked["reasoning_content"] = reasoning[:begin] + self._text(index, "r") + reasoning[begin:]
        if calls:
            marked["tool_calls"] = [self._into_call(index, call) for call in calls]
        return marked

    def out(self, text: str) -> tuple[str, dict[Place, int]]:
        """A rendering without its marks, and where they were in it, first to last."""
        pieces: list[str] = []
        places: dict[Place, int] = {}
        length = end = 0
        for mark in self._mark.finditer(text):
            pieces.append(text[end : mark.start()])
            length += mark.start() - end
            end = mark.end()
            place = Place(int(mark[1]), mark[2])
            if place.part == "c" and place in places:
                continue  # a tool's answer says again who was called
            places.pop(place, None)  # the order is that of the last time
            places[place] = length
        return "".join([*pieces, text[end:]]), places

    def _into_call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "name": function["name"] + self._text(index, "c")}}

    def _text(self, index: int, part: str) -> str:
        return f"{self._opening}{index}{part}{self._closing}"


class UnmarkableError(LineError):
    """The template does not keep marks."""


class _DiffersError(Exception):
    """Answers of one kind do not begin or end alike."""


class MarkedConversation:
    """A conversation whose messages carry marks that its template keeps, and its full text."""

    def __init__(self, template: Template, messages: list[Message], full: str, special: tuple[str, ...]) -> None:
        """`special`: the tokenizer's tokens that text is never cut within. Raises UnmarkableError."""
        self._template = template
        self._messages = messages
        self._full = full
        self._whole = _tokens_in_text(special)
        self._marks = Marks(full, json.dumps(messages, ensure_ascii=False))
        found = self._marked()
        if found is None:
            raise UnmarkableError(
                "",
                "the base's chat template changes what it writes with the words of a message, so the answers cannot be found "
                "in the conversation's text. Split it into conversations with one answer each; if those are refused too, "
                "take a base whose template writes messages as they are",
            )
        self._carrying, self.places = found
        self._last: dict[int, Place] = {}
        for place in self.places:
            self._last[place.message] = place

    def _marked(self) -> tuple[list[Message], dict[Place, int]] | None:
        everyone = frozenset(message["role"] for message in self._messages)
        for roles, empty in ((everyone, True), (everyone, False), (frozenset({"assistant"}), False)):
            carrying = [
                self._marks.into(index, message, empty=empty) if message["role"] in roles else message
                for index, message in enumerate(self._messages)
            ]
            try:
                text, places = self._marks.out(self._template(carrying))
            except LineError:
                continue
            if text == self._full:
                return carrying, places
        return None

    def spans(self, learned: Sequence[int], exact: int) -> list[Span]:
        """The learned spans, the first `exact` of them by rendering in any case. Raises LineError if one cannot be told."""
        controls = {learned[-1]} | {learned[len(learned) >> halvings] for halvings in range(1, len(learned).bit_length())}
        try:
            return self._spans(learned, controls | set(learned[:exact]))
        except _DiffersError:
            return self._spans(learned, None)

    def words(self) -> list[Span]:
        """Where the words of messages lie: contents and reasonings."""
        spans: list[Span] = []
        for place, at in self.places.items():
            message = self._messages[place.message]
            thought, answer = thought_and_answer(message)
            if place.part == "e":
                words = answer if message["role"] == "assistant" else message["content"].strip()
                begin = at - len(words)
                spans += [(begin, at)] if self._full.startswith(words, begin) else []
            elif place.part == "r":
                spans += [(at, at + len(thought))] if self._full.startswith(thought, at) else []
        return spans

    def require_kept(self, learned: Sequence[int]) -> None:
        """Raises LineError for a learned answer, a reasoning of one, or a system prompt that the template leaves out."""
        for index, message in enumerate(self._messages):
            if message["role"] == "system" and message["content"].strip() and Place(index, "e") not in self.places:
                raise LineError(
                    f"messages.{index}.content",
                    "the base's chat template leaves this system message out, so its words would not be seen. Write them into "
                    "the user message that follows",
                )
        for index in learned:
            thought, answer = thought_and_answer(self._messages[index])
            if answer and Place(index, "e") not in self.places:
                raise self._left_out(index, "text", Place(index, "e"), answer, "Leave the text out")
            if thought and Place(index, "r") not in self.places:
                raise self._left_out(index, "reasoning", Place(index, "r"), thought, "Leave the reasoning out")

    def _left_out(self, index: int, what: str, place: Place, words: str, way_out: str) -> LineError:
        beside = " beside its tool calls" if what == "text" and self._messages[index].get("tool_calls") else ""
        _, alone = self._marks.out(self._template(self._carrying[: index + 1]))
        if place in alone:
            reason = (
                f"the base's chat template leaves the {what} of this answer out once more follows, so it would not be learned. "
                f"{way_out}, or give this message weight 0 here and end a line of its own with it"
            )
        else:
            reason = (
                f"the base's chat template leaves the {what} of this answer out{beside}, so it would not be learned. "
                f"{way_out}, or give this message weight 0"
            )
        key = "reasoning_content" if words in (self._messages[index].get("reasoning_content") or "") else "content"
        return LineError(f"messages.{index}.{key}", reason)

    def _spans(self, learned: Sequence[int], rendered: set[int] | None) -> list[Span]:
        """`rendered`: the answers whose ends are rendered in any case; None: all."""
        begins, ends = _Alike(self._begin), _Alike(self._end)
        spans: list[Span] = []
        for index in learned:
            before, own = (self._kind(index - 1), self._kind(index)) if rendered is not None else (None, None)
            must = rendered is not None and index in rendered
            first = begins.at(index, before, must)
            end = len(self._full) if index == len(self._messages) - 1 else ends.at(index, own, must)
            if end <= first:
                raise _untold(index)
            spans.append((first, end))
        return spans

    def _kind(self, index: int) -> Hashable | None:
        """The features of messages after which text goes on alike. None: no mark to go by."""
        if index not in self._last:
            return None
        message = self._messages[index]
        thought, answer = thought_and_answer(message) if message["role"] == "assistant" else ("", message["content"].strip())
        return message["role"], bool(thought), bool(answer), bool(message.get("tool_calls")), self._last[index].part

    def _begin(self, index: int, known: tuple[str, int] | None) -> tuple[int, tuple[str, int] | None]:
        """Where the answer begins, and (what the prompt writes after the last mark, how much of it the text has).

        `known`: of another of its kind; the begin is -1 if it does not fit.
        """
        if known is not None:
            prompt, reached = known
            here = self.places[self._last[index - 1]]
            agreed = self._agreed(prompt, here)
            return (here + agreed if agreed == reached else -1), known
        place, prompt = self._tail(self._template(self._carrying[:index], add_generation_prompt=True))
        here = self._position(place, index)
        agreed = self._agreed(prompt, here)
        if agreed < len(prompt):
            other, unprompted = self._tail(self._template(self._carrying[:index]))
            shared = self._shared(prompt, unprompted)
            if other != place or agreed <= shared:
                raise _untold(index)
        return here + agreed, ((prompt, agreed) if place == self._last.get(index - 1) else None)

    def _end(self, index: int, known: tuple[str, int] | None) -> tuple[int, tuple[str, int] | None]:
        """Where the answer ends, and (what ends it where it is the last, how much of that the text has); as `_begin`."""
        if known is not None:
            ending, reached = known
            here = self.places[self._last[index]]
            agreed = self._agreed(ending, here)
            return (here + agreed if agreed == reached else -1), known
        place, ending = self._tail(self._template(self._carrying[: index + 1]))
        here = self._position(place, index + 1)
        agreed = self._agreed(ending, here)
        if ending and not agreed:
            return here + self._other_end(ending, here, index), None
        return here + agreed, ((ending, agreed) if place == self._last.get(index) else None)

    def _other_end(self, ending: str, here: int, index: int) -> int:
        """The length of the special token that ends an answer in place of the one that ends it where it is the last (gpt-oss:
        `<|end|>`, `<|return|>`)."""
        usual, there = self._whole.match(ending), self._whole.match(self._full, here)
        if usual is None or there is None or ending[usual.end() :].strip():
            raise _untold(index)
        return there.end() - here

    def _tail(self, rendered: str) -> tuple[Place | None, str]:
        """The last mark of a rendering, and the text after it."""
        text, places = self._marks.out(rendered)
        if not places:
            return None, text
        place = next(reversed(places))
        return place, text[places[place] :]

    def _position(self, place: Place | None, index: int) -> int:
        """Where a mark of the messages before `index` is in the text."""
        if place is None:
            return 0
        if place not in self.places:
            raise _untold(index)
        return self.places[place]

    def _agreed(self, text: str, here: int) -> int:
        """How much of a text the conversation's has at a place, in characters; no special token is cut."""
        return self._shared(text, self._full[here : here + len(text) + 64])

    def _shared(self, one: str, other: str) -> int:
        length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for text in (one, other):
            for token in self._whole.finditer(text):
                if token.start() < length < token.end():
                    length = token.start()
        return length


@lru_cache(maxsize=4)
def _tokens_in_text(special: tuple[str, ...]) -> re.Pattern[str]:
    """What matches special tokens, and what looks like one."""
    looks = re.compile(_MARKUP)
    others = sorted((token for token in special if token and not looks.fullmatch(token)), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, others), _MARKUP]))


class _Alike:
    """Beginnings or ends, which are found by rendering until those of a kind agree."""

    def __init__(self, find: Callable[[int, tuple[str, int] | None], tuple[int, tuple[str, int] | None]]) -> None:
        self._find = find
        self._known: dict[Hashable, tuple[tuple[str, int] | None, int]] = {}

    def at(self, index: int, kind: Hashable | None, must: bool) -> int:
        """`must`: by rendering. Raises _DiffersError if that disagrees with what was taken for others of its kind."""
        known, agreed = self._known.get(kind, (None, 0)) if kind is not None else (None, 0)
        trusted = known is not None and agreed >= TRUSTED_AFTER
        expected = self._find(index, known)[0] if trusted else -1
        if expected >= 0 and not must:
            return expected
        found, made = self._find(index, None)
        if expected not in (-1, found):
            raise _DiffersError
        if kind is not None and not trusted:
            self._known[kind] = (made, agreed + 1 if made == known else 1)
        return found


def _untold(index: int) -> LineError:
    return LineError(
        "",
        f"the base's chat template writes the conversation up to message {index + 1} differently once more follows, so that "
        "where that answer begins and ends is not found in the text. Split the conversation, or give that message weight 0",
    )
